"""Self-test case of attention over the paged cache and of the store before it."""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from models.ops import paged_attention as reference
from models.ops.self_test import Finding, Numbers, excess, of_fp8, slack, unless
from models.ops.torch_ops import rotate
from models.ops.triton.attention import paged_attention, tokens_of_tile
from models.ops.triton.cache_store import as_hardware_reads, store
from models.ops.triton.grids import PIECE, AttentionPlan, list_pieces, list_tiles, num_pieces
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, NormWeight, Rotation

_WIDEST = 4096
"""Of the windows that a row goes beyond."""


class AttentionForm(NamedTuple):
    """How a layer attends."""

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
    tokens_a_row: int = 1
    """Of decodes: more where they verify drafts."""

    @property
    def key(self) -> Hashable:
        """Equal for layers that the same kernels compute."""
        norms = None if self.norms is None else tuple((norm.eps, norm.offset) for norm in self.norms)
        options = dataclasses.replace(self.options, k_scale=1.0, v_scale=1.0)
        return self._replace(norms=None, options=options), norms

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """Decodes and spans, short and over several pieces, in one step: what is stored, then what is attended to."""
        step = _Step(self, numbers)
        before = step.pool.clone()
        q, k, v = step.queries_keys_values()
        rotation, norms = step.rotation, self.norms
        cache, options = as_hardware_reads(step.cache, self.options, numbers.device)
        stored_q = store(q, k, v, cache, step.slots, options, norms, rotation)
        rounded, of = slack(self.dtype), str(self)
        if norms is not None or rotation is not None:
            exact, magnitude = _moved(q, None if norms is None else norms.q, rotation)
            yield Finding(f"queries of {of}", excess(stored_q, exact, rounded * magnitude))
        sides = (
            ("keys", k, cache.k_cache, options.k_scale, None if norms is None else norms.k, rotation),
            ("values", v, cache.v_cache, options.v_scale, None, None),
        )
        for what, x, pages, scale, norm, turned in sides:
            exact, magnitude = _moved(x, norm, turned)
            bound = rounded * magnitude
            found = step.stored(pages)
            if pages.dtype.itemsize == 1:
                found, exact, bound = of_fp8(found, exact, bound, scale, pages.dtype)
            yield Finding(f"stored {what} of {of}", excess(found, exact, bound))
        yield Finding(f"what a store leaves alone, of {of}", unless(step.is_elsewhere_as(before)))

        found = torch.empty_like(stored_q)
        paged_attention(stored_q, found, cache, step.plan, options, step.sinks)
        exact, magnitude = (
            reference.attend(stored_q.float(), each, *step.rows, options, step.sinks)
            for each in (cache, KVCacheTensor(cache.k_cache, _absolute(cache.v_cache)))
        )
        count = step.plan.num_decodes * self.tokens_a_row
        for what, some in (("decodes", slice(0, count)), ("prompts", slice(count, None))):
            yield Finding(f"{what} of {of}", excess(found[some], exact[some], rounded * magnitude[some]))

    def __str__(self) -> str:
        window = self.options.sliding_window
        parts = [f"{self.heads} heads to {self.kv_heads} of {self.head_dim}"]
        parts += [f"a window of {window}"] if window is not None else []
        parts += ["a soft cap"] if self.options.soft_cap is not None else []
        parts += ["sinks"] if self.has_sinks else []
        parts += [f"{self.tokens_a_row} tokens a row"] if self.tokens_a_row > 1 else []
        parts += ["a cache in FP8"] if self.cache_dtype.itemsize == 1 else []
        return parts[0] + (f" with {' and '.join(parts[1:])}" if parts[1:] else "")


class _Step:
    """A step over a cache whose blocks lie apart, with what are no numbers around them."""

    def __init__(self, form: AttentionForm, numbers: Numbers) -> None:
        self._form, self._numbers = form, numbers
        # More than a piece, and more than a tile of queries.
        long = PIECE + 30
        some_q = torch.empty(0, form.heads, form.head_dim, dtype=form.dtype, device=numbers.device)
        tile_tokens = tokens_of_tile(some_q, form.kv_heads)
        tile = 3 + tile_tokens
        decodes, spans = [max(5, form.tokens_a_row), 17, long], [(3, 30), (tile, tile), (7, long)]
        if form.options.sliding_window is not None:
            beyond = min(form.options.sliding_window, _WIDEST) + 70
            decodes, spans = [*decodes, beyond], [*spans, (7, beyond)]
        queries = [form.tokens_a_row] * len(decodes) + [count for count, _ in spans]
        lengths = decodes + [each for _, each in spans]
        block = form.block_size
        counts = [-(-length // block) for length in lengths]
        order = 1 + numbers.order(sum(counts)).numpy()
        tables = np.zeros((len(lengths), max(counts)), np.int32)
        places, is_of_step = [], []
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            tables[row, :count], order = order[:count], order[count:]
            tokens = np.arange(length)
            places.append(tables[row, tokens // block].astype(np.int64) * block + tokens % block)
            is_of_step.append(tokens >= length - queries[row])
        slots, now = np.concatenate(places), np.concatenate(is_of_step)
        self.slots = torch.from_numpy(slots[now]).to(numbers.device)
        self.plan = _plan(np.array(queries), np.array(lengths), tables, len(decodes), tile_tokens, numbers.device)
        shape = sum(counts) + 1, 4 * form.kv_heads, block, form.head_dim
        self.pool = torch.full(shape, torch.nan, dtype=form.dtype, device=numbers.device).to(form.cache_dtype)
        pages = (slice(nth * form.kv_heads, (nth + 1) * form.kv_heads) for nth in (1, 2))
        self.cache = KVCacheTensor(*(self.pool[:, some] for some in pages))
        self.sinks = numbers.normal(form.heads, dtype=form.dtype) if form.has_sinks else None
        self._num_tokens = int(now.sum())
        cache, options = as_hardware_reads(self.cache, form.options, numbers.device)
        earlier = torch.from_numpy(slots[~now]).to(numbers.device)
        k, v = (numbers.normal(len(earlier), form.kv_heads, form.head_dim, dtype=form.dtype) for _ in range(2))
        reference.store(k, k, v, cache, earlier, options)

    def queries_keys_values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the step's tokens, as a projection leaves them: side by side. # [T, Hq, D], 2 x [T, Hkv, D]"""
        form = self._form
        heads = form.heads + 2 * form.kv_heads
        qkv = self._numbers.normal(self._num_tokens, heads * form.head_dim, dtype=form.dtype, scale=1.5)
        by_head = qkv.view(self._num_tokens, heads, form.head_dim)
        q, k, v = torch.split(by_head, [form.heads, form.kv_heads, form.kv_heads], dim=1)
        return q, k, v

    @property
    def rotation(self) -> Rotation | None:
        """By any angles."""
        if self._form.rotary_dim is None:
            return None
        half = Numbers(self._numbers.device, 1).normal(self._num_tokens, 1, self._form.rotary_dim // 2, scale=9.0)
        return torch.cat((half, half), -1).cos(), torch.cat((-half, half), -1).sin()

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the reference takes them."""
        return self.plan.query_starts, self.plan.seq_lens, self.plan.block_tables

    def stored(self, pages: torch.Tensor) -> torch.Tensor:
        """What the step's tokens have in a cache. # [T, Hkv, D] float32"""
        blocks, offsets = self._places
        return pages.view(torch.uint8)[blocks, :, offsets].view(pages.dtype).float()

    def is_elsewhere_as(self, before: torch.Tensor) -> bool:
        """Whether all is as it was but for the step's keys and values."""
        blocks, offsets = self._places
        heads = self._form.kv_heads
        now, then = self.pool.view(torch.uint8), before.view(torch.uint8)
        then[blocks, heads : 3 * heads, offsets] = now[blocks, heads : 3 * heads, offsets]
        return torch.equal(now, then)

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots // self._form.block_size, self.slots % self._form.block_size


def _moved(x: torch.Tensor, norm: NormWeight | None, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads as they are stored, in float32, and how large the terms of each number are."""
    exact = x.float()
    if norm is not None:
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.eps)
        exact = exact * scale * (norm.weight.float() + norm.offset)
    if rotation is None:
        return exact, exact.abs()
    cos, sin = rotation
    return rotate(exact, cos, sin), rotate(exact.abs(), cos.abs(), sin.abs())


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
