"""Attention of long prompts by a library's variable-length flash attention, over keys and values gathered from pages.

The library is aiter if it passed its probe, else torch.

For long prompts, a library's kernel may reach a higher share of the matrix rate than a kernel that follows block
tables; in return, gathering reads each key once more. It is used for spans of at least `LEAST_QUERIES` tokens with at
most `MOST_KEYS` times as many keys, in layers for whose form a small problem agreed with the reference at the start.
Triton's kernels compute all other attention.
"""

import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from models.ops import aiter
from models.ops import paged_attention as reference
from models.ops.aiter.attention import varlen
from models.ops.memory import upload
from models.ops.self_test import Case, Finding, PagedRows, Problems, relative_error, rounding_bound
from models.ops.types import AttentionOptions, KVCacheTensor

LEAST_QUERIES = 128
"""Smallest number of tokens of a step's longest span for which keys are gathered."""
MOST_KEYS = 2
"""Limit of the keys of a step's spans as a multiple of their tokens. More keys take more time, and more memory than
was measured at the start."""

_started: frozenset[Hashable] = frozenset()
"""Forms of layers (see `form_of`) that flash attention computes."""


class Spans(NamedTuple):
    """Rows of a step, and the positions of their keys in the cache."""

    query_starts: torch.Tensor  # [S + 1] int32
    key_starts: torch.Tensor  # [S + 1] int32
    rows: torch.Tensor  # [keys] int64, row in the block tables
    positions: torch.Tensor  # [keys] int64
    most_queries: int
    most_keys: int


def start(forms: frozenset[Hashable]) -> None:
    """Use flash attention for layers of these forms (`FlashCase.key`) from now on."""
    global _started
    _started = forms


def form_of(q: torch.Tensor, num_kv_heads: int, options: AttentionOptions) -> Hashable:
    """Return the properties of a layer that select a kernel; each form is compared with the reference. # q [T, Hq,
    D]"""
    return q.shape[1], num_kv_heads, q.shape[2], q.dtype, options.sliding_window


def takes(q: torch.Tensor, cache: KVCacheTensor, options: AttentionOptions, sinks: torch.Tensor | None) -> bool:
    """Whether flash attention computes a layer. # q [T, Hq, D]"""
    is_even = cache.k_cache.shape[3] == cache.v_cache.shape[3]
    return (
        bool(_started)
        and is_even
        and supports(options, sinks)
        and form_of(q, cache.k_cache.shape[1], options) in _started
    )


def supports(options: AttentionOptions, sinks: torch.Tensor | None) -> bool:
    """Whether the library supports these options."""
    return sinks is None and options.soft_cap is None and not options.is_chunked


def library() -> Callable[..., torch.Tensor] | None:
    """Return aiter's or torch's variable-length attention, or None if neither is available."""
    return varlen if aiter.takes("prefill") else _of_torch()


@cache
def _of_torch() -> Callable[..., torch.Tensor] | None:
    """Return torch's variable-length attention, or None if this release has none.

    Splitting of keys is disabled if the release has an option for it, because the number of splits depends on the
    longest row of a step.
    """
    try:
        found: Callable[..., torch.Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    takes_splits = "num_splits" in inspect.signature(found).parameters
    return partial(found, num_splits=1) if takes_splits else found


def spans_of(
    queries: npt.NDArray[np.int64],
    contexts: npt.NDArray[np.int64],
    first_row: int,
    window: int | None,
    device: torch.device,
) -> Spans | None:
    """Return the rows from `first_row` on, without keys that no query attends to; None if gathering would be slower.

    # [B] each
    """
    queries, contexts = queries[first_row:], contexts[first_row:]
    firsts = np.zeros_like(contexts) if window is None else np.maximum(contexts - queries - window + 1, 0)
    counts = contexts - firsts
    if len(queries) == 0 or queries.max() < LEAST_QUERIES or counts.sum() > MOST_KEYS * queries.sum():
        return None
    query_starts, key_starts = (np.concatenate(([0], np.cumsum(each))).astype(np.int32) for each in (queries, counts))
    rows = np.repeat(np.arange(first_row, first_row + len(counts)), counts)
    positions = np.arange(len(rows)) + np.repeat(firsts - key_starts[:-1], counts)
    starts_q, starts_k, of_rows, at = upload([query_starts, key_starts, rows, positions], device)
    return Spans(starts_q, starts_k, of_rows, at, int(queries.max()), int(counts.max()))


def attend(
    q: torch.Tensor,
    cache: KVCacheTensor,
    block_tables: torch.Tensor,
    spans: Spans,
    options: AttentionOptions,
) -> torch.Tensor:
    """Compute causal attention of the spans to the cached keys and values. # q [T, Hq, D] -> [T, Hq, D]

    `block_tables`: those of all rows of the step. # [B, max_blocks] int32
    """
    compute = library()
    assert compute is not None, "it was started"
    block_size = cache.k_cache.shape[2]
    blocks = block_tables[spans.rows, spans.positions // block_size]
    offsets = spans.positions % block_size
    k, v = (_gathered(pages, blocks, offsets, q.dtype) for pages in (cache.k_cache, cache.v_cache))
    window = -1 if options.sliding_window is None else options.sliding_window - 1
    out = compute(
        q,
        k,
        v,
        spans.query_starts,
        spans.key_starts,
        spans.most_queries,
        spans.most_keys,
        scale=options.scale * options.k_scale,
        window_size=(window, 0),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out if options.v_scale == 1.0 else out * options.v_scale


def _gathered(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """# [num_blocks, Hkv, block, D], 2 x [keys] -> [keys, Hkv, D]"""
    if pages.dtype.itemsize > 1:
        return pages[blocks, :, offsets]
    return pages.view(torch.uint8)[blocks, :, offsets].view(pages.dtype).to(dtype)


@dataclass(frozen=True, slots=True)
class FlashCase(Case):
    """Spans of a layer, one of which follows a cached prefix."""

    operator: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    options: AttentionOptions
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int

    @property
    def key(self) -> Hashable:
        q = torch.empty(0, self.heads, self.head_dim, dtype=self.dtype)
        return form_of(q, self.kv_heads, self.options)

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`."""
        window = self.options.sliding_window
        queries, lengths = [5, LEAST_QUERIES + 3, 40], [5, LEAST_QUERIES + 3, 110]
        if window is not None and window < LEAST_QUERIES:
            lengths[2] += window
        rows = PagedRows(problems, lengths, self.block_size)
        shape = rows.num_blocks, self.kv_heads, self.block_size, self.head_dim
        cache = KVCacheTensor(*(problems.normal(*shape).to(self.cache_dtype) for _ in range(2)))
        tables = rows.tables.to(problems.device)
        arrays = np.array(queries), np.array(lengths)
        spans = spans_of(*arrays, 0, window, problems.device)
        assert spans is not None
        q = problems.normal(sum(queries), self.heads, self.head_dim, dtype=self.dtype)
        found = attend(q, cache, tables, spans, self.options)
        starts, contexts = spans.query_starts, torch.tensor(lengths, device=problems.device)
        absolute = KVCacheTensor(cache.k_cache, cache.v_cache.float().abs())
        exact, magnitude = (
            reference.attend(q.float(), each, starts, contexts, tables, self.options) for each in (cache, absolute)
        )
        # The softmax weights are also rounded before they multiply values.
        yield Finding(f"prompts of {self}", relative_error(found, exact, 2 * rounding_bound(self.dtype) * magnitude))
