"""Torch references and self-test cases of latent attention and its indexer."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from models.ops.self_test import (
    FLOAT32,
    Case,
    Exact,
    Finding,
    PagedRows,
    Problems,
    fp8_bounds,
    relative_error,
    rounding_bound,
)
from models.ops.torch_ops import deinterleave, rotate
from models.ops.triton.cache_store import latent_store, vector_store, vectors_as_hardware_reads
from models.ops.triton.configs import launch_of
from models.ops.triton.latent_attention import Piece, indexer_scores, latent_attention, latent_prefill
from models.ops.types import LatentInputs, NormWeight


def reference_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    *,
    scale: float,
    cache_scale: float = 1.0,
    selected: torch.Tensor | None = None,
) -> Exact:
    """As the kernel's launcher, one token at a time. # -> [T, H, rank]"""
    rank, whole = q.shape[2], torch.cat((q, q_rope), -1).float()
    value = torch.empty_like(q, dtype=torch.float32)
    magnitude = torch.empty_like(value)
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        positions = torch.arange(length, device=q.device)
        if selected is not None:
            positions = selected[token][selected[token] >= 0]
        latents = cached_vectors(vectors, block_tables[row], positions) * cache_scale
        shares = (whole[token] @ latents.T * scale).softmax(-1)
        value[token], magnitude[token] = shares @ latents[:, :rank], shares @ latents[:, :rank].abs()
    return Exact(value, magnitude)


def reference_latent_prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    pieces: Iterable[Piece],
    scale: float,
) -> Exact:
    """As the kernel's launcher over all pieces of every row. # -> [T, H, v], zero for tokens of no row"""
    nope = q.shape[2]
    whole = torch.cat((q, q_rope), -1).float()
    value = whole.new_zeros(*q.shape[:2], expanded.shape[2] - nope)
    magnitude = torch.zeros_like(value)
    of_row: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_row.setdefault(piece.first_query, []).append(piece)
    for parts in of_row.values():
        keys = torch.cat([torch.arange(one.first_key, one.first_key + one.num_keys) for one in parts])
        rotated = shared[keys].float()[:, None].expand(-1, q.shape[1], -1)
        k, v = torch.cat((expanded[keys, :, :nope].float(), rotated), -1), expanded[keys, :, nope:].float()
        first, count = parts[0].first_query, parts[0].num_queries
        scores = torch.einsum("qhd,khd->hqk", whole[first : first + count], k) * scale
        hidden = torch.arange(len(keys)) > parts[0].offset + torch.arange(count)[:, None]
        shares = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        for out, values in ((value, v), (magnitude, v.abs())):
            out[first : first + count] = torch.einsum("hqk,khv->qhv", shares, values)
    return Exact(value, magnitude)


def reference_indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    width: int,
) -> Exact:
    """As the kernel's launcher, one token at a time. # -> [T, width], -inf beyond a token's keys"""
    value = torch.full((len(q), width), -torch.inf, device=q.device)
    magnitude = torch.zeros_like(value)
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        keys = cached_vectors(vectors, block_tables[row], torch.arange(length, device=q.device))
        value[token, :length] = weights[token] @ (q[token].float() @ keys.T).relu()
        magnitude[token, :length] = weights[token].abs() @ (q[token].float().abs() @ keys.abs().T)
    return Exact(value, magnitude)


def cached_vectors(vectors: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A row's vectors at some positions, unscaled. # [max_blocks], [n] -> [n, dim] float32"""
    block_size = vectors.shape[1]
    slots = table.long()[positions // block_size], positions % block_size
    if vectors.dtype.itemsize == 1:
        return vectors.view(torch.uint8)[slots].view(vectors.dtype).float()
    return vectors[slots].float()


_SHORT = (1, 19)
"""Lengths of short contexts."""
_BEYOND = 30
"""Latents beyond those that one program attends to."""


@dataclass(frozen=True, slots=True)
class IndexCase(Case):
    """Scores of an indexer, and its store of keys."""

    operator: ClassVar[str] = "latents"
    has_pool: ClassVar[bool] = True
    heads: int
    """0 for a store alone."""
    dim: int
    top_k: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    layers: int = 2
    """Layers of which a block has vectors: the kernels' form depends on whether 16 divides the distance of blocks."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: keys as they are stored, and scores."""
        lengths = [*_SHORT, self.top_k + 40]
        pages = _Pages(problems, lengths, self.dim, self.block_size, self.cache_dtype, self.layers)
        vectors, scale = vectors_as_hardware_reads(pages.vectors, 1.0, problems.device)
        keys = problems.normal(len(pages.slots), self.dim, dtype=self.dtype)
        vector_store(keys, vectors, pages.slots, scale)
        of = f"an indexer of {self.heads} heads of {self.dim}"
        error = _stored(pages, vectors, keys.float(), keys.float().abs(), scale, self.dtype)
        yield Finding(f"stored keys of {of}" if self.heads else f"stored vectors of {self.dim}", error)
        if not self.heads:
            return
        q = problems.normal(len(lengths), self.heads, self.dim, dtype=self.dtype)
        weights = problems.normal(len(lengths), self.heads)
        seen = pages.ints(lengths)
        rows = pages.ints(range(len(lengths)))
        found = indexer_scores(q, weights, vectors, pages.tables, rows, seen, max(lengths))
        exact, terms = reference_indexer_scores(q, weights, vectors, pages.tables, rows, seen, max(lengths))
        yield Finding(f"scores of {of}", relative_error(found, exact, FLOAT32 * terms))


@dataclass(frozen=True, slots=True)
class SelectionCase(IndexCase):
    """The same kernels where layers launch them without the attention backend, and torch can compute them."""

    operator: ClassVar[str] = "attention"
    is_in_aiter: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LatentCase(Case):
    """Attention to latents, absorbed and expanded, and its store."""

    operator: ClassVar[str] = "latents"
    has_pool: ClassVar[bool] = True
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    scale: float
    cache_scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    inputs: LatentInputs
    top_k: int | None
    """Tokens that an indexer selects; None without one."""

    @property
    def key(self) -> Hashable:
        inputs = self.inputs.norm.eps, self.inputs.is_interleaved
        return replace(self, cache_scale=1.0, inputs=None), inputs  # type: ignore[arg-type]

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: what is stored, and both algorithms."""
        shape = {"heads": self.heads, "sparse": False, "element": self.dtype.itemsize}
        run = launch_of("latent_attention", problems.device, **shape).blocks["RUN"]
        pages = _Pages(problems, [*_SHORT, run + _BEYOND], self.rank + self.rope, self.block_size, self.cache_dtype)
        vectors, scale = vectors_as_hardware_reads(pages.vectors, self.cache_scale, problems.device)
        yield from self._store(problems, pages, vectors, scale)
        cache_scale = 1.0 if vectors.dtype.itemsize > 1 else scale
        yield from self._absorbed(problems, pages, vectors, cache_scale)
        yield from self._expanded(problems)

    def _store(self, problems: Problems, pages: "_Pages", vectors: torch.Tensor, scale: float) -> Iterator[Finding]:
        """Stores all rows' latents, to which the other parts attend."""
        tokens, norm = len(pages.slots), self.inputs.norm
        q = problems.normal(tokens, self.heads, self.nope + self.rope, dtype=self.dtype)
        latent = problems.normal(tokens, self.rank + self.rope, dtype=self.dtype)
        angles = problems.normal(tokens, 1, self.rope // 2, scale=9.0)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
        found = latent_store(
            q,
            latent,
            vectors,
            pages.slots,
            norm=(norm.weight, norm.eps),
            rotation=(cos, sin),
            is_interleaved=self.inputs.is_interleaved,
            scale=scale,
        )

        def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = deinterleave(x.float()) if self.inputs.is_interleaved else x.float()
            return rotate(x, cos, sin), rotate(x.abs(), cos.abs(), sin.abs())

        exact, magnitude = turned(q[..., self.nope :])
        of = f"latents of {self.rank}+{self.rope}"
        yield Finding(f"queries to {of}", relative_error(found, exact, rounding_bound(self.dtype) * magnitude))
        normed = latent[:, : self.rank].float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
        keys, of_keys = (each[:, 0] for each in turned(latent[:, None, self.rank :]))
        exact, magnitude = torch.cat((normed, keys), -1), torch.cat((normed.abs(), of_keys), -1)
        yield Finding(f"stored {of}", _stored(pages, vectors, exact, magnitude, scale, self.dtype))

    def _absorbed(self, problems: Problems, pages: "_Pages", vectors: torch.Tensor, scale: float) -> Iterator[Finding]:
        """The absorbed algorithm, over all positions and over selected ones."""
        lengths = pages.lengths
        count = len(lengths)
        # So large that scores are of some units.
        size = 2 / (self.scale * (self.rank + self.rope) ** 0.5)
        q = problems.normal(self.heads, count, self.rank, dtype=self.dtype, scale=size).transpose(0, 1)
        q_rope = problems.normal(count, self.heads, self.rope, dtype=self.dtype, scale=size)
        rows, lens = pages.ints(range(count)), pages.ints(lengths)
        selections: list[torch.Tensor | None] = [None]
        if self.top_k is not None:
            selections.append(self._selected(problems, lengths))
        for selected in selections:
            step = q, q_rope, vectors, pages.tables, rows, lens
            how: dict[str, Any] = {"scale": self.scale, "cache_scale": scale, "selected": selected}
            found = latent_attention(*step, longest=max(lengths), **how)
            exact, terms = reference_latent_attention(*step, **how)
            name = f"{'absorbed' if selected is None else 'selected'} latents of {self.rank}+{self.rope}"
            yield Finding(name, relative_error(found, exact, rounding_bound(self.dtype) * terms))

    def _selected(self, problems: Problems, lengths: list[int]) -> torch.Tensor:
        """Positions of each token, in random order. # [tokens, top_k] int64"""
        assert self.top_k is not None
        selected = torch.full((len(lengths), self.top_k), -1)
        for row, length in enumerate(lengths):
            some = problems.permutation(length)[: self.top_k]
            selected[row, : len(some)] = some
        return selected.to(problems.device)

    def _expanded(self, problems: Problems) -> Iterator[Finding]:
        """The expanded algorithm: a prompt, and a chunk after a cached prefix."""
        spans = (Piece(0, 40, 0, 40, 0, True, True), Piece(40, 7, 40, 90, 83, True, True))
        tokens, keys = 47, 130
        q = problems.normal(tokens, self.heads, self.nope + self.rope, dtype=self.dtype)
        expanded = problems.normal(keys, self.heads, self.nope + self.value, dtype=self.dtype)
        shared = problems.normal(keys, self.rank + self.rope, dtype=self.dtype)[:, self.rank :]
        out = q.new_empty(tokens, self.heads, self.value)
        # The rotated part lies apart, and the shared key next to latents, as layers pass them: kernels are compiled by
        # which addresses and strides are multiples of 16.
        nope, rope = q[..., : self.nope], q[..., self.nope :].contiguous()
        pieces = torch.tensor(spans, dtype=torch.int32, device=problems.device)
        latent_prefill(nope, rope, expanded, shared, pieces, out, None, longest=40, scale=self.scale)
        exact, terms = reference_latent_prefill(nope, rope, expanded, shared, spans, self.scale)
        error = relative_error(out, exact, rounding_bound(self.dtype) * terms)
        yield Finding(f"expanded latents of {self.heads} heads", error)


class _Pages:
    """A layer's paged vectors; NaN everywhere else."""

    def __init__(
        self, problems: Problems, lengths: list[int], dim: int, block_size: int, dtype: torch.dtype, layers: int = 2
    ) -> None:
        self.lengths, self._device = lengths, problems.device
        rows = PagedRows(problems, lengths, block_size)
        self.tables, self.slots = rows.tables.to(problems.device), torch.cat(rows.slots).to(problems.device)
        # Rows of other layers lie in between.
        self.vectors = problems.pool(rows.num_blocks, layers, block_size, dim, dtype=dtype)[:, -1]

    def ints(self, values: Iterable[int]) -> torch.Tensor:
        """# [len(values)] int32"""
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)

    def stored(self, vectors: torch.Tensor) -> torch.Tensor:
        """The cached vectors of all rows. # [tokens, dim] float32"""
        size = vectors.shape[1]
        return vectors.view(torch.uint8)[self.slots // size, self.slots % size].view(vectors.dtype).float()


def _stored(
    pages: _Pages,
    vectors: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> float:
    """The relative error of what is stored."""
    found, bound = pages.stored(vectors), rounding_bound(dtype) * magnitude
    if vectors.dtype.itemsize == 1:
        found, exact, bound = fp8_bounds(found, exact, bound, scale, vectors.dtype)
    return relative_error(found, exact, bound)


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """None: few models have latents, and those check their own sizes when they are loaded."""
    del device
    return ()


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

    def latents(dtype: torch.dtype, cache: torch.dtype, *, is_interleaved: bool) -> LatentCase:
        norm = NormWeight(Problems(device).near_one(24), 1e-6, 0.0)
        inputs = LatentInputs(norm, (torch.empty(0), torch.empty(0)), is_interleaved, None)
        return LatentCase(2, 16, 8, 16, 24, 0.2, 0.5, dtype, cache, 16, inputs, 32)

    return {
        "latents in bf16": latents(bf16, bf16, is_interleaved=True),
        "latents in fp16, their cache in FP8": latents(fp16, fp8, is_interleaved=False),
        "indexer in bf16": IndexCase(4, 16, 32, bf16, bf16, 16),
        "indexer in FP8": IndexCase(3, 24, 32, bf16, fp8, 16),
        "entries of four tokens": SelectionCase(4, 16, 32, bf16, bf16, 4),
        "entries of as many tokens as a block has, stored alone": SelectionCase(0, 24, 0, bf16, bf16, 1, 1),
    }
