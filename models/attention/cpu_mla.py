"""Multi-head latent attention on the CPU, in plain torch over paged latents. Used by the CPU backend.

Two ways to the same numbers. Absorbed: queries go into the latent space through the key half of `kv_b`, attend there
to one key that all heads share, and come back through the value half; nothing is done for each latent and head.
Expanded: latents become every head's keys and values first, after which a query costs less. A decode absorbs, a span
of many queries expands.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from models.attention.cache_dtype import restored
from models.attention.cpu_attend import Attend
from models.attention.cpu_pages import PageReader, chunks, token_places, write_vectors
from models.attention.cpu_plan import MAX_MASK_ELEMENTS, CPUAttentionMetaData, PrefillSpan
from models.kernels.norm import rms_norm
from models.kernels.rotary import deinterleave, rotate
from models.kernels.types import AttentionOptions, LatentInputs, VectorCache

MAX_LATENT_ELEMENTS = 1 << 23
"""Elements of gathered latents, or of expanded keys, at a time: 32 MiB in float32. One row or head may need more."""

_Piece = tuple[slice, int, torch.Tensor | None]


def prepared(q: torch.Tensor, latent: torch.Tensor, inputs: LatentInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Both normalised and rotated. # [T, H, nope + rope], [T, rank + rope]"""
    cos, sin = inputs.rotation
    rope_dim = cos.shape[-1]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        last = x[..., -rope_dim:]
        return rotate(deinterleave(last) if inputs.is_interleaved else last, cos, sin)

    return (
        torch.cat((q[..., :-rope_dim], rotated(q)), -1),
        torch.cat((rms_norm(latent[:, :-rope_dim], inputs.norm), rotated(latent[:, None])[:, 0]), -1),
    )


class LatentAttention:
    """One layer's step: its queries, its cache and how latents expand."""

    def __init__(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        cache: VectorCache,
        metadata: CPUAttentionMetaData,
        options: AttentionOptions,
        selected: torch.Tensor | None,
        pages: PageReader,
    ) -> None:
        """See `AttentionBackend.latent_attention`."""
        self._heads = _Heads(kv_b, rope_dim=cache.vectors.shape[-1] - kv_b.shape[-1], q_dim=q.shape[-1])
        self._q = q
        self._cache = cache
        self._metadata = metadata
        self._plan = metadata.plan(1, cache.vectors.shape[1], 1)
        self._attend = Attend(options, None)
        self._scale = options.k_scale
        self._selected = selected
        self._pages = pages

    def run(self, latent: torch.Tensor) -> torch.Tensor:
        """Write the step's latents, then attend. # [T, rank + rope] -> [T, H, v]"""
        latent = write_vectors(latent, self._cache, self._plan, self._scale)
        out = self._q.new_empty(*self._q.shape[:2], self._heads.v_dim)
        decodes = self._metadata.num_decodes
        if decodes:
            absorbed = self._heads.absorb(self._q[:decodes])
            attended = torch.empty_like(absorbed)
            if self._selected is None:
                self._decode(absorbed, attended)
            else:
                self._decode_selected(absorbed, attended, self._selected[:decodes])
            out[:decodes] = self._heads.values(attended)
        for span in self._plan.spans:
            if span.pages:
                latents = self._restored(self._pages.gather(self._cache, span.pages[0].rows)[: span.length])
            else:
                latents = latent[span.tokens]
            self._attend_span(span, latents, out[span.tokens])
        return out

    def _decode(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of one token, to all their latents. # 2 x [decodes, H, rank + rope]"""
        dim = q.shape[-1]
        for bucket in self._plan.buckets:
            rows = torch.arange(len(q)) if bucket.rows is None else bucket.rows
            blocks = bucket.pages[0].rows.view(bucket.batch, -1)
            for some in chunks(bucket.batch, MAX_LATENT_ELEMENTS // (bucket.length * dim)):
                latents = self._restored(self._pages.gather(self._cache, blocks[some].flatten()))
                latents = latents.view(-1, 1, bucket.length, dim)
                queries = q[rows[some], None]
                attended = self._attend.grouped_rows(queries, latents, latents, bucket.mask[some], slice(None))
                out[rows[some]] = attended[:, 0]

    def _decode_selected(self, q: torch.Tensor, out: torch.Tensor, selected: torch.Tensor) -> None:
        """Rows of one token, to some of their latents. # 2 x [decodes, H, rank + rope], [decodes, K]"""
        dim = q.shape[-1]
        blocks, offsets = token_places(self._metadata.block_tables[: len(q)], selected.clamp(min=0), self._cache)
        # A row that selects fewer is padded with its own first token, which the mask then hides.
        mask = torch.zeros_like(selected, dtype=torch.float32).masked_fill_(selected < 0, -torch.inf)[:, None, None]
        for some in chunks(len(q), MAX_LATENT_ELEMENTS // (selected.shape[1] * dim)):
            latents = self._restored(self._cache.vectors[blocks[some], offsets[some]][:, None])
            out[some] = self._attend.grouped_rows(q[some, None], latents, latents, mask[some], slice(None))[:, 0]

    def _restored(self, stored: torch.Tensor) -> torch.Tensor:
        """What latents of the cache mean, in the queries' type."""
        return restored(stored, self._q.dtype, self._scale)

    def _attend_span(self, span: PrefillSpan, latents: torch.Tensor, out: torch.Tensor) -> None:
        """Consecutive tokens of one sequence. # [length, rank + rope], [n, H, v]"""
        q = self._q[span.tokens]
        if self._heads.absorbing_is_cheaper(span.num_tokens, span.length):
            queries = self._heads.absorb(q).transpose(0, 1)  # [H, n, rank + rope]
            shared = latents.expand(len(queries), -1, -1)
            for piece in self._pieces(span):
                out[piece[0]] = self._heads.values(self._over_heads(queries, shared, shared, piece))
            return
        num_heads, width = q.shape[1], self._heads.width
        queries = F.pad(q, (0, width - q.shape[-1])).transpose(0, 1)  # [H, n, width]
        for some in chunks(num_heads, MAX_LATENT_ELEMENTS // (span.length * width)):
            keys, values = self._heads.expand(latents, some)
            for piece in self._pieces(span):
                out[piece[0], some] = self._over_heads(queries[some], keys, values, piece)[..., : out.shape[-1]]

    def _over_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """A piece's queries, head by head. # [h, n, D], 2 x [h, length, D] -> [rows, h, D]"""
        rows, end, mask = piece
        attended = self._attend.grouped_heads(q[None, :, rows], k[None, :, :end], v[None, :, :end], mask, slice(None))
        return attended[0].transpose(0, 1)

    def _pieces(self, span: PrefillSpan) -> Iterator[_Piece]:
        """Which queries attend together, to how many of the first latents, under which mask; None: causally."""
        # Tokens that see no more than are selected see all of them.
        selected = None if self._selected is None else self._selected[span.tokens]
        if selected is not None and span.length > selected.shape[1]:
            for rows in chunks(span.num_tokens, MAX_MASK_ELEMENTS // span.length):
                yield rows, span.length, _selection_mask(selected[rows], span.length)
        elif span.pages:
            mask = self._plan.mask
            assert mask is not None, "the plan has a mask for spans with context"
            chunk, longest = mask.shape
            for rows in chunks(span.num_tokens, chunk):
                end = span.length - span.num_tokens + rows.stop
                yield rows, end, mask[chunk - (rows.stop - rows.start) :, longest - end :]
        else:
            yield slice(None), span.length, None


@dataclass(frozen=True, slots=True)
class _Heads:
    """How latents become keys and values of the rank's heads."""

    kv_b: torch.Tensor  # [H, nope + v, rank]
    rope_dim: int
    q_dim: int

    @property
    def nope_dim(self) -> int:
        return self.q_dim - self.rope_dim

    @property
    def v_dim(self) -> int:
        return self.kv_b.shape[1] - self.nope_dim

    @property
    def width(self) -> int:
        """To which expanded keys and values are padded: the fused kernel wants one size."""
        return max(self.q_dim, self.v_dim)

    def absorbing_is_cheaper(self, num_queries: int, length: int) -> bool:
        """Whether so many queries multiply less in the latent space than expanding `length` latents costs."""
        rank = self.kv_b.shape[2]
        absorbed = num_queries * (self.kv_b.shape[1] * rank + length * (2 * rank + self.rope_dim))
        expanded = length * (self.kv_b.shape[1] * rank + num_queries * (self.q_dim + self.v_dim))
        return absorbed < expanded

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries in the latent space. # [T, H, nope + rope] -> [T, H, rank + rope]"""
        in_latent = torch.einsum("thn,hnr->thr", q[..., : self.nope_dim], self.kv_b[:, : self.nope_dim])
        return torch.cat((in_latent, q[..., self.nope_dim :]), -1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What was attended to in the latent space, as values. # [T, H, rank + rope] -> [T, H, v]"""
        return torch.einsum("thr,hvr->thv", attended[..., : self.kv_b.shape[2]], self.kv_b[:, self.nope_dim :])

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some heads. # [length, rank + rope] -> 2 x [heads, length, width]"""
        weight = self.kv_b[heads]
        rank = weight.shape[2]
        expanded = F.linear(latents[:, :rank], weight.flatten(0, 1)).view(len(latents), len(weight), -1)
        k = latents.new_zeros(len(weight), len(latents), self.width)
        v = torch.zeros_like(k)
        k[..., : self.nope_dim] = expanded[..., : self.nope_dim].transpose(0, 1)
        k[..., self.nope_dim : self.q_dim] = latents[:, rank:]
        v[..., : self.v_dim] = expanded[..., self.nope_dim :].transpose(0, 1)
        return k, v


def _selection_mask(selected: torch.Tensor, length: int) -> torch.Tensor:
    """# [n, K] positions, -1 for none -> [n, length] float32, 0 or minus infinity"""
    mask = torch.full((len(selected), length + 1), -torch.inf)
    mask.scatter_(1, torch.where(selected < 0, length, selected), 0.0)
    return mask[:, :length]
