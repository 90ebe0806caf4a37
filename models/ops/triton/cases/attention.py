"""Self-test case of attention over the paged cache and of the store before it."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from models.ops import paged_attention as reference
from models.ops.self_test import (
    Case,
    Finding,
    PagedRows,
    Problems,
    exact_match,
    fp8_bounds,
    relative_error,
    rounding_bound,
)
from models.ops.torch_ops import rotate
from models.ops.triton.attention import paged_attention, tokens_of_tile
from models.ops.triton.cache_store import as_hardware_reads, store
from models.ops.triton.grids import PIECE, AttentionPlan, list_pieces, list_tiles, num_pieces
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, NormWeight, Rotation

_WIDEST = 4096
"""The longest window that a row exceeds."""
_STRETCH = 1.25
"""Factor of the rotations."""


class HeadRows(NamedTuple):
    """How a step's heads lie in memory: in elements, as strides of [T, heads, D]."""

    stride: int
    lone_stride: int
    """The stride of a step of one token, which torch computes from its shape."""
    head_stride: int
    first: int
    """The offset of the first token's first head, as far as it decides alignment."""


def head_rows(x: torch.Tensor) -> HeadRows:
    """The rows of heads, of which a pass of one token has `x`. # [1, heads, D]"""
    if x.stride(2) != 1:  # Backends copy such heads.
        x = x.contiguous()
    # A storage is one row of a projection, of which the heads may be a part.
    width = x.untyped_storage().nbytes() // x.itemsize
    return HeadRows(width, x.stride(0), x.stride(1), int(x.storage_offset()) % (_ALIGNMENT // x.itemsize))


_ALIGNMENT = 16
"""Bytes of which compilers know whether addresses and strides are multiples."""


@dataclass(frozen=True, slots=True)
class AttentionCase(Case):
    """Attention of a layer, and its store of keys and values."""

    operator: ClassVar[str] = "attention"
    has_pool: ClassVar[bool] = True
    heads: int
    kv_heads: int
    head_dim: int
    options: AttentionOptions
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    has_sinks: bool
    norms: HeadNorms | None
    rotary_dim: int | None
    query_len: int = 1
    """Tokens of a decode; more than 1 where they verify drafts."""
    has_q_scales: bool = False
    stores: bool = True
    """Whether the layer has keys and values of its own."""
    value_dim: int | None = None
    """Elements of a value; None: `head_dim`."""
    rows: tuple[HeadRows | None, HeadRows | None, HeadRows | None] = (None, None, None)
    """Of queries, keys and values; None: a part of one projection of all three."""

    @property
    def key(self) -> Hashable:
        norms = None if self.norms is None else tuple((norm.eps, norm.offset) for norm in self.norms)
        options = replace(self.options, k_scale=1.0, v_scale=1.0)
        return replace(self, norms=None, options=options), norms

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: a step of decodes and spans, short and over several pieces; its store, then its attention."""
        step = _Step(self, problems)
        before = step.pools_now()
        q, k, v = step.queries_keys_values()
        rotation, norms = step.rotation, self.norms
        cache, options = as_hardware_reads(step.cache, self.options, problems.device)
        q_scales = problems.near_one(len(q), 1) if self.has_q_scales else None
        is_first = options.is_rotated_first
        stored_q = store(q, k, v, cache, step.slots, options, norms, rotation, q_scales)
        if not self.stores:
            before = step.pools_now()
            stored_q = store(q, None, None, cache, step.slots, options, norms, rotation, q_scales)
            is_same = all(torch.equal(_bytes(then), _bytes(now)) for then, now in zip(before, step.pools, strict=True))
            yield Finding(f"a cache that {self} only reads", exact_match(is_same))
            before = step.pools_now()
        rounded, of = rounding_bound(self.dtype), str(self)
        one_q, one_k, one_v = step.first_token(q, k, v)
        kept_k, kept_v = (one_k, one_v) if self.stores else (None, None)
        turned_alone = None if rotation is None else (rotation[0][:1], rotation[1][:1])
        scales_alone = None if q_scales is None else q_scales[:1]
        lone_q = store(one_q, kept_k, kept_v, cache, step.slots[:1], options, norms, turned_alone, scales_alone)
        if norms is not None or rotation is not None or q_scales is not None:
            exact, magnitude = _moved(q, None if norms is None else norms.q, rotation, is_first, q_scales)
            yield Finding(f"queries of {of}", relative_error(stored_q, exact, rounded * magnitude))
            error = relative_error(lone_q, exact[:1], rounded * magnitude[:1])
            yield Finding(f"a lone token's queries of {of}", error)
        sides = (
            ("keys", k, cache.k_cache, options.k_scale, None if norms is None else norms.k, rotation),
            ("values", v, cache.v_cache, options.v_scale, None, None),
        )
        for what, x, pages, scale, norm, turned in sides:
            exact, magnitude = _moved(x, norm, turned, is_first)
            bound = rounded * magnitude
            found = step.stored(pages)
            if pages.dtype.itemsize == 1:
                found, exact, bound = fp8_bounds(found, exact, bound, scale, pages.dtype)
            yield Finding(f"stored {what} of {of}", relative_error(found, exact, bound))
        yield Finding(f"what a store must not change, of {of}", exact_match(step.is_elsewhere_as(before)))

        found = stored_q.new_empty(*stored_q.shape[:2], cache.v_cache.shape[3])
        paged_attention(stored_q, found, cache, step.plan, options, step.sinks)
        exact, magnitude = (
            reference.attend(stored_q.float(), each, *step.rows, options, step.sinks)
            for each in (cache, KVCacheTensor(cache.k_cache, _absolute(cache.v_cache)))
        )
        count = step.plan.num_decodes * self.query_len
        for what, some in (("decodes", slice(0, count)), ("prompts", slice(count, None))):
            yield Finding(f"{what} of {of}", relative_error(found[some], exact[some], rounded * magnitude[some]))

    def __str__(self) -> str:
        window = self.options.sliding_window
        values = "" if self.value_dim is None else f" and values of {self.value_dim}"
        parts = [f"{self.heads} heads to {self.kv_heads} of {self.head_dim}{values}"]
        kind = "chunks" if self.options.is_chunked else "a window"
        parts += [f"{kind} of {window}"] if window is not None else []
        parts += ["a soft cap"] if self.options.soft_cap is not None else []
        parts += ["sinks"] if self.has_sinks else []
        parts += [f"{self.query_len} tokens a row"] if self.query_len > 1 else []
        parts += ["a cache in FP8"] if self.cache_dtype.itemsize == 1 else []
        return parts[0] + (f" with {' and '.join(parts[1:])}" if parts[1:] else "")


class _Step:
    """A step over a paged cache, with NaN around its rows."""

    def __init__(self, form: AttentionCase, problems: Problems) -> None:
        self._form, self._numbers = form, problems
        # Longer than one piece, and than one tile of queries.
        long = PIECE + 30
        some_q = torch.empty(0, form.heads, form.head_dim, dtype=form.dtype, device=problems.device)
        tile_tokens = tokens_of_tile(some_q, form.kv_heads)
        tile = 3 + tile_tokens
        decodes, spans = [max(5, form.query_len), 17, long], [(3, 30), (tile, tile), (7, long)]
        if form.options.sliding_window is not None:
            beyond = min(form.options.sliding_window, _WIDEST) + 70
            decodes, spans = [*decodes, beyond], [*spans, (7, beyond)]
        queries = [form.query_len] * len(decodes) + [count for count, _ in spans]
        lengths = decodes + [each for _, each in spans]
        block = form.block_size
        rows = PagedRows(problems, lengths, block)
        self.slots = _joined(rows.slots, [slice(-count, None) for count in queries], problems.device)
        arrays = np.array(queries), np.array(lengths), rows.tables.numpy()
        self.plan = _plan(*arrays, len(decodes), tile_tokens, problems.device)
        # Of the same size, keys and values are pages of one pool.
        self._dims = form.head_dim, form.value_dim or form.head_dim
        shape = rows.num_blocks, 4 * form.kv_heads, block
        self.pools = [problems.pool(*shape, dim, dtype=form.cache_dtype) for dim in dict.fromkeys(self._dims)]
        pages = (slice(nth * form.kv_heads, (nth + 1) * form.kv_heads) for nth in (1, 2))
        of_keys, of_values = self.pools[0], self.pools[-1]
        self.cache = KVCacheTensor(*(pool[:, some] for pool, some in zip((of_keys, of_values), pages, strict=True)))
        self.sinks = problems.normal(form.heads, dtype=form.dtype) if form.has_sinks else None
        self._num_tokens = len(self.slots)
        cache, options = as_hardware_reads(self.cache, form.options, problems.device)
        earlier = _joined(rows.slots, [slice(0, -count) for count in queries], problems.device)
        k, v = (problems.normal(len(earlier), form.kv_heads, dim, dtype=form.dtype) for dim in self._dims)
        reference.store(k, k, v, cache, earlier, options)

    def queries_keys_values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heads in the rows of the form. # [T, Hq, D], [T, Hkv, D], [T, Hkv, V]"""
        form, (dim, value_dim) = self._form, self._dims
        heads = ((form.heads, dim), (form.kv_heads, dim), (form.kv_heads, value_dim))
        sizes = [count * of_head for count, of_head in heads]
        qkv = self._numbers.normal(self._num_tokens, sum(sizes), dtype=form.dtype, scale=1.5)
        parts = zip(torch.split(qkv, sizes, dim=1), heads, form.rows, strict=True)
        q, k, v = (_in_rows(part.view(self._num_tokens, *of_part), rows) for part, of_part, rows in parts)
        return q, k, v

    def first_token(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first token of each part, with the strides of a step of one token. # each [1, heads, D]"""

        def first(x: torch.Tensor, rows: HeadRows | None) -> torch.Tensor:
            strides = (x[0].numel(), x.shape[2]) if rows is None else (rows.lone_stride, rows.head_stride)
            return x.as_strided((1, *x.shape[1:]), (*strides, 1), x.storage_offset())

        return tuple(first(x, rows) for x, rows in zip(parts, self._form.rows, strict=True))

    @property
    def rotation(self) -> Rotation | None:
        """Random angles, and a factor as `yarn` has it."""
        if self._form.rotary_dim is None:
            return None
        half = Problems(self._numbers.device, 1).normal(self._num_tokens, 1, self._form.rotary_dim // 2, scale=9.0)
        return torch.cat((half, half), -1).cos() * _STRETCH, torch.cat((-half, half), -1).sin() * _STRETCH

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arguments of the reference."""
        return self.plan.query_starts, self.plan.seq_lens, self.plan.block_tables

    def stored(self, pages: torch.Tensor) -> torch.Tensor:
        """The cached vectors of the step's tokens. # [T, Hkv, D] float32"""
        blocks, offsets = self._places
        return pages.view(torch.uint8)[blocks, :, offsets].view(pages.dtype).float()

    def pools_now(self) -> list[torch.Tensor]:
        """Copies of the pools."""
        return [pool.clone() for pool in self.pools]

    def is_elsewhere_as(self, before: list[torch.Tensor]) -> bool:
        """Whether the pools are unchanged except for the step's keys and values."""
        blocks, offsets = self._places
        heads = self._form.kv_heads
        for pool, earlier in zip(self.pools, before, strict=True):
            now, then = _bytes(pool), _bytes(earlier)
            then[blocks, heads : 3 * heads, offsets] = now[blocks, heads : 3 * heads, offsets]
            if not torch.equal(now, then):
                return False
        return True

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots // self._form.block_size, self.slots % self._form.block_size


def _in_rows(x: torch.Tensor, rows: HeadRows | None) -> torch.Tensor:
    """The same heads in rows of memory of their own. # [T, heads, D]"""
    if rows is None:
        return x
    size = rows.first + (len(x) - 1) * rows.stride + (x.shape[1] - 1) * rows.head_stride + x.shape[2]
    strides = rows.stride, rows.head_stride, 1
    return x.new_empty(size).as_strided(x.shape, strides, rows.first).copy_(x)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _joined(slots: list[torch.Tensor], parts: list[slice], device: torch.device) -> torch.Tensor:
    """A part of each row's slots. # -> [tokens] int64"""
    return torch.cat([of_row[part] for of_row, part in zip(slots, parts, strict=True)]).to(device)


def _moved(
    x: torch.Tensor,
    norm: NormWeight | None,
    rotation: Rotation | None,
    is_rotated_first: bool = False,
    q_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads as they are stored, in float32, and the magnitude of each number's terms."""
    exact = x.float()
    if norm is not None and not is_rotated_first:
        exact = exact * _norm_factors(exact, norm)
    magnitude = exact.abs()
    if rotation is not None:
        cos, sin = rotation
        exact, magnitude = rotate(exact, cos, sin), rotate(magnitude, cos.abs(), sin.abs())
    if norm is not None and is_rotated_first:
        factors = _norm_factors(exact, norm)
        exact, magnitude = exact * factors, magnitude * factors.abs()
    by = 1.0 if q_scales is None else q_scales[:, None]
    return exact * by, magnitude * by


def _norm_factors(x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.offset)


def _absolute(values: torch.Tensor) -> torch.Tensor:
    if values.dtype.itemsize > 1:
        return values.abs()
    return (values.view(torch.uint8) & 0x7F).view(values.dtype)


def _plan(
    queries: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int32],
    num_decodes: int,
    tile_tokens: int,
    device: torch.device,
) -> AttentionPlan:
    """# queries and lengths [B], tables [B, max_blocks]"""
    items = list_pieces(lengths[:num_decodes])
    starts = np.concatenate(([0], queries.cumsum()))
    arrays = starts, lengths, tables, items, [len(items)], list_tiles(queries, lengths, tile_tokens, num_decodes)
    on_device = [torch.from_numpy(np.asarray(array, np.int32)).to(device) for array in arrays]
    query_starts, seq_lens, block_tables, work, num_items, tiles = on_device
    most, query_len = int(num_pieces(lengths[:num_decodes]).max()), int(queries[0])
    return AttentionPlan(
        query_starts, seq_lens, block_tables, num_decodes, query_len, work, num_items, most, tiles
    )  # fmt: skip


_BF16, _FP16, _FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Grouped-query attention of a model of 8 billion parameters."""
    del device
    options = AttentionOptions(128**-0.5)
    return (AttentionCase(32, 8, 128, options, _BF16, _BF16, 16, has_sinks=False, norms=None, rotary_dim=128),)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""

    def case(dtype: torch.dtype, cache: torch.dtype, **fields: Any) -> AttentionCase:
        options = AttentionOptions(0.25, k_scale=0.5, v_scale=2.0)
        defaults: dict[str, Any] = {"options": options, "has_sinks": False, "norms": None, "rotary_dim": 16}
        defaults |= {"heads": 3, "kv_heads": 1, "head_dim": 16, "block_size": 16}
        return AttentionCase(dtype=dtype, cache_dtype=cache, **(defaults | fields))

    def norms(offset: float) -> HeadNorms:
        problems = Problems(device)
        q, k = (NormWeight(problems.near_one(16) - offset, 1e-6, offset) for _ in range(2))
        return HeadNorms(q, k)

    chunked = AttentionOptions(0.3, sliding_window=20, is_chunked=True)
    later = replace(chunked, is_rotated_first=True)
    windowed = AttentionOptions(0.3, sliding_window=20, soft_cap=5.0)
    return {
        "attention in bf16": case(_BF16, _BF16),
        "attention that verifies drafts": case(_BF16, _BF16, query_len=5),
        "attention with norms in bf16": case(_BF16, _BF16, norms=norms(1.0)),
        "attention in fp16, its cache in FP8": case(_FP16, _FP8, norms=norms(0.0)),
        "chunks, scaled queries, norms after the rotation": case(
            _BF16, _BF16, options=later, norms=norms(0.0), has_q_scales=True, rotary_dim=8
        ),
        "chunks of the last tokens, in another layer's cache": case(
            _FP16, _FP16, options=chunked, query_len=3, stores=False
        ),
        "values smaller than keys, windows and sinks": case(
            _BF16, _BF16, head_dim=24, value_dim=16, options=windowed, has_sinks=True, rotary_dim=8
        ),
        "values with rows of their own, unaligned": case(
            _FP16,
            _FP16,
            head_dim=24,
            value_dim=20,
            rotary_dim=8,
            rows=(None, HeadRows(60, 24, 24, 4), HeadRows(20, 20, 20, 0)),
        ),
        "values larger than keys, FP8": case(_BF16, _FP8, value_dim=24, query_len=2),
        "windows, soft caps and sinks, FP8": case(_BF16, _FP8, options=windowed, has_sinks=True, rotary_dim=8),
    }
