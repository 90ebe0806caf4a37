"""Torch references and self-test cases of latent attention and its indexer."""

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import torch

from models.ops.self_test import FLOAT32, Finding, Numbers, excess, of_fp8, slack
from models.ops.torch_ops import deinterleave, rotate
from models.ops.triton.cache_store import latent_store, vector_store, vectors_as_hardware_reads
from models.ops.triton.configs import launch_of
from models.ops.triton.latent_attention import Piece, indexer_scores, latent_attention, latent_prefill
from models.ops.types import LatentInputs

_SHORT = (1, 19)
"""Latents that tokens see."""
_BEYOND = 30
"""Latents more than a program attends to."""


class IndexForm(NamedTuple):
    """An indexer's heads."""

    heads: int
    dim: int
    top_k: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """Keys as they are stored, and scores."""
        lengths = [1, 19, self.top_k + 40]
        pages = _Pages(numbers, lengths, self.dim, self.block_size, self.cache_dtype)
        vectors, scale = vectors_as_hardware_reads(pages.vectors, 1.0, numbers.device)
        keys = numbers.normal(len(pages.slots), self.dim, dtype=self.dtype)
        vector_store(keys, vectors, pages.slots, scale)
        of = f"an indexer of {self.heads} heads of {self.dim}"
        error = _stored(pages, vectors, keys.float(), keys.float().abs(), scale, self.dtype)
        yield Finding(f"stored keys of {of}", error)
        q = numbers.normal(len(lengths), self.heads, self.dim, dtype=self.dtype)
        weights = numbers.normal(len(lengths), self.heads)
        seen = pages.ints(lengths)
        found = indexer_scores(q, weights, vectors, pages.tables, pages.ints(range(len(lengths))), seen, max(lengths))
        for row, length in enumerate(lengths):
            of_row = pages.of_row(vectors, row)
            products = q[row].float() @ of_row.T
            terms = (q[row].float().abs() @ of_row.abs().T * weights[row, :, None].abs()).sum(0)
            exact = (products.relu() * weights[row, :, None]).sum(0)
            yield Finding(f"scores of {of}", excess(found[row, :length], exact, FLOAT32 * terms))


class LatentForm(NamedTuple):
    """How heads attend to latents."""

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
    """Of the tokens that an indexer selects."""

    @property
    def key(self) -> Hashable:
        """Equal for layers that the same kernels compute."""
        inputs = self.inputs.norm.eps, self.inputs.is_interleaved
        return self._replace(cache_scale=1.0, inputs=None), inputs  # type: ignore[arg-type]

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """What is stored, and both ways of attending."""
        shape = {"heads": self.heads, "sparse": False, "element": self.dtype.itemsize}
        run = launch_of("latent_attention", numbers.device, **shape).blocks["RUN"]
        pages = _Pages(numbers, [*_SHORT, run + _BEYOND], self.rank + self.rope, self.block_size, self.cache_dtype)
        vectors, scale = vectors_as_hardware_reads(pages.vectors, self.cache_scale, numbers.device)
        yield from self._store(numbers, pages, vectors, scale)
        cache_scale = 1.0 if vectors.dtype.itemsize > 1 else scale
        yield from self._absorbed(numbers, pages, vectors, cache_scale)
        yield from self._expanded(numbers)

    def _store(self, numbers: Numbers, pages: "_Pages", vectors: torch.Tensor, scale: float) -> Iterator[Finding]:
        """All the rows' latents, which the others then attend to."""
        tokens, norm = len(pages.slots), self.inputs.norm
        q = numbers.normal(tokens, self.heads, self.nope + self.rope, dtype=self.dtype)
        latent = numbers.normal(tokens, self.rank + self.rope, dtype=self.dtype)
        angles = numbers.normal(tokens, 1, self.rope // 2, scale=9.0)
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
        yield Finding(f"queries to {of}", excess(found, exact, slack(self.dtype) * magnitude))
        normed = latent[:, : self.rank].float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
        keys, of_keys = (each[:, 0] for each in turned(latent[:, None, self.rank :]))
        exact, magnitude = torch.cat((normed, keys), -1), torch.cat((normed.abs(), of_keys), -1)
        yield Finding(f"stored {of}", _stored(pages, vectors, exact, magnitude, scale, self.dtype))

    def _absorbed(self, numbers: Numbers, pages: "_Pages", vectors: torch.Tensor, scale: float) -> Iterator[Finding]:
        """In the latents' space, to all and to some."""
        lengths = pages.lengths
        count = len(lengths)
        # As large as scores of some units want them.
        size = 2 / (self.scale * (self.rank + self.rope) ** 0.5)
        q = numbers.normal(count, self.heads, self.rank, dtype=self.dtype, scale=size)
        q_rope = numbers.normal(count, self.heads, self.rope, dtype=self.dtype, scale=size)
        whole = torch.cat((q, q_rope), -1).float()
        selections: list[torch.Tensor | None] = [None]
        if self.top_k is not None:
            selections.append(self._selected(numbers, lengths))
        for selected in selections:
            found = latent_attention(
                q,
                q_rope,
                vectors,
                pages.tables,
                pages.ints(range(count)),
                pages.ints(lengths),
                longest=max(lengths),
                scale=self.scale,
                cache_scale=scale,
                selected=selected,
            )
            way = "absorbed" if selected is None else "selected"
            for row in range(count):
                latents = pages.of_row(vectors, row) * scale
                if selected is not None:
                    latents = latents[selected[row][selected[row] >= 0]]
                shares = (whole[row] @ latents.T * self.scale).softmax(-1)
                exact = shares @ latents[:, : self.rank]
                bound = slack(self.dtype) * (shares @ latents[:, : self.rank].abs())
                yield Finding(f"{way} latents of {self.rank}+{self.rope}", excess(found[row], exact, bound))

    def _selected(self, numbers: Numbers, lengths: list[int]) -> torch.Tensor:
        """Positions of each token, in no order. # [tokens, top_k] int64"""
        assert self.top_k is not None
        selected = torch.full((len(lengths), self.top_k), -1)
        for row, length in enumerate(lengths):
            some = numbers.order(length)[: self.top_k]
            selected[row, : len(some)] = some
        return selected.to(numbers.device)

    def _expanded(self, numbers: Numbers) -> Iterator[Finding]:
        """A prompt, and a chunk behind what was computed."""
        spans = (Piece(0, 40, 0, 40, 0, True, True), Piece(40, 7, 40, 90, 83, True, True))
        tokens, keys = 47, 130
        q = numbers.normal(tokens, self.heads, self.nope + self.rope, dtype=self.dtype)
        expanded = numbers.normal(keys, self.heads, self.nope + self.value, dtype=self.dtype)
        shared = numbers.normal(keys, self.rope, dtype=self.dtype)
        out = q.new_empty(tokens, self.heads, self.value)
        nope, rope = torch.split(q, [self.nope, self.rope], -1)
        pieces = torch.tensor(spans, dtype=torch.int32, device=numbers.device)
        latent_prefill(nope, rope, expanded, shared, pieces, out, None, longest=40, scale=self.scale)
        for first, count, first_key, num_keys, offset, *_ in spans:
            some = slice(first_key, first_key + num_keys)
            k, v = torch.split(expanded[some].float(), [self.nope, self.value], -1)
            k = torch.cat((k, shared[some, None].float().expand(-1, self.heads, -1)), -1)
            scores = torch.einsum("qhd,khd->hqk", q[first : first + count].float(), k) * self.scale
            at = torch.arange(num_keys, device=numbers.device)
            shares = scores.masked_fill(at > offset + at[:count, None], -torch.inf).softmax(-1)
            exact, terms = (torch.einsum("hqk,khv->qhv", shares, each) for each in (v, v.abs()))
            error = excess(out[first : first + count], exact, slack(self.dtype) * terms)
            yield Finding(f"expanded latents of {self.heads} heads", error)


class _Pages:
    """Rows of a cache, whose blocks lie in no order; what is none of theirs is no number."""

    def __init__(self, numbers: Numbers, lengths: list[int], dim: int, block_size: int, dtype: torch.dtype) -> None:
        self.lengths, self._device = lengths, numbers.device
        width = -(-max(lengths) // block_size)
        order = numbers.order(len(lengths) * width)
        tables = order.view(len(lengths), width)
        self.tables = tables.int().to(numbers.device)
        places = [torch.arange(length) for length in lengths]
        slots = [tables[row][at // block_size] * block_size + at % block_size for row, at in enumerate(places)]
        self.slots = torch.cat(slots).to(numbers.device)
        # Rows of other layers lie between.
        shape = len(order), 2, block_size, dim
        self.vectors = torch.full(shape, torch.nan, device=numbers.device).to(dtype)[:, 1]

    def ints(self, values: Iterable[int]) -> torch.Tensor:
        """# [len(values)] int32"""
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)

    def stored(self, vectors: torch.Tensor) -> torch.Tensor:
        """Of all rows, in float32. # [tokens, dim]"""
        size = vectors.shape[1]
        return vectors.view(torch.uint8)[self.slots // size, self.slots % size].view(vectors.dtype).float()

    def of_row(self, vectors: torch.Tensor, row: int) -> torch.Tensor:
        """# [its tokens, dim] float32"""
        return torch.split(self.stored(vectors), self.lengths)[row]


def _stored(
    pages: _Pages,
    vectors: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> float:
    """How far off what is stored is."""
    found, bound = pages.stored(vectors), slack(dtype) * magnitude
    if vectors.dtype.itemsize == 1:
        found, exact, bound = of_fp8(found, exact, bound, scale, vectors.dtype)
    return excess(found, exact, bound)


# References, one token at a time.


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
) -> torch.Tensor:
    """As the kernel's launcher."""
    block_size = vectors.shape[1]
    out, rank = torch.empty_like(q), q.shape[2]
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        places = torch.arange(length, device=q.device)
        if selected is not None:
            places = selected[token][selected[token] >= 0]
        blocks = block_tables[row].long()[places // block_size]
        latents = vectors[blocks, places % block_size].float() * cache_scale
        shares = (torch.cat((q[token], q_rope[token]), -1).float() @ latents.T * scale).softmax(-1)
        out[token] = (shares @ latents[:, :rank]).to(q.dtype)
    return out


def reference_latent_prefill(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    pieces: Iterable[Piece],
    scale: float,
) -> torch.Tensor:
    """As the kernel's launcher over all of every row's pieces. # -> [T, H, v], zero for tokens of no row"""
    nope = q.shape[2]
    whole = torch.cat((q, q_rope), -1).float()
    out = q.new_zeros(*q.shape[:2], expanded.shape[2] - nope)
    of_row: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_row.setdefault(piece.first_query, []).append(piece)
    for parts in of_row.values():
        places = torch.cat([torch.arange(one.first_key, one.first_key + one.num_keys) for one in parts])
        keys = expanded[places].float()
        rotated = shared[places].float()[:, None].expand(-1, q.shape[1], -1)
        k, v = torch.cat((keys[..., :nope], rotated), -1), keys[..., nope:]
        first, count = parts[0].first_query, parts[0].num_queries
        scores = torch.einsum("qhd,khd->hqk", whole[first : first + count], k) * scale
        hidden = torch.arange(len(places)) > parts[0].offset + torch.arange(count)[:, None]
        shares = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1)
        out[first : first + count] = torch.einsum("hqk,khv->qhv", shares, v).to(q.dtype)
    return out


def reference_indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """As the kernel's launcher."""
    scores = torch.full((len(q), width), -torch.inf, device=q.device)
    for token, (row, length) in enumerate(zip(token_rows.tolist(), token_lens.tolist(), strict=True)):
        places = torch.arange(length, device=q.device)
        keys = vectors[block_tables[row].long()[places // vectors.shape[1]], places % vectors.shape[1]]
        scores[token, :length] = weights[token] @ (q[token].float() @ keys.float().T).relu()
    return scores
