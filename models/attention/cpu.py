"""The CPU attention backend in plain torch over the paged cache, the reference for all other backends.

In order: attention over keys and values of heads; latent attention; the lightning indexer; the backend.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from models.attention.backend import BACKENDS, AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.cpu_cache import (
    PagedKV,
    Scratch,
    block_and_offset,
    chunks,
    from_cache,
    gather_vectors,
    pages_of_block,
    write_vectors,
)
from models.attention.cpu_plan import MAX_MASK_ELEMENTS, CPUAttentionMetaData, DecodeBucket, PrefillSpan
from models.ops.memory import Send
from models.ops.norm import rms_norm
from models.ops.torch_ops import deinterleave, moved, rotate
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor, LatentInputs, VectorCache

_MAX_SCORES = 1 << 24
"""The most scores in memory at a time if a soft cap excludes the fused kernel: 64 MiB."""
MAX_LATENT_ELEMENTS = 1 << 23
"""The most elements of gathered latents, or of expanded keys, at a time: 32 MiB in float32. One row or head may take
more."""
MAX_INDEX_SCORES = 1 << 23
"""The most scores of all heads in memory at a time: 32 MiB. One query over a long context may take more."""


class AttentionMath:
    """One layer's softmax attention over contiguous keys and values, with an optional soft cap and sinks."""

    def __init__(self, options: AttentionOptions, sinks: torch.Tensor | None) -> None:
        """`sinks` are indexed by KV head and query head of its group. # [Hkv, group]"""
        self._options = options
        self._sinks = sinks

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` attends to."""
        window = self._options.sliding_window
        if window is not None and self._options.is_chunked:
            return position // window * window
        return 0 if window is None else max(0, position - window + 1)

    def grouped_rows(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, heads: slice
    ) -> torch.Tensor:
        """Attention of one token per sequence; the query heads of a group are rows of one product.

        # q [batch, heads, group, D], k and v [batch, heads, length, D], mask [batch, 1, 1, length]
        """
        sinks = None if self._sinks is None else self._sinks[heads]
        return self._attend(q, k, v, mask, sinks)

    def grouped_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, heads: slice
    ) -> torch.Tensor:
        """Attention of consecutive tokens of one sequence, causal if there is no mask.

        # q [heads, group, n, D], k and v [heads, group, length, D], mask [n, length]
        """
        sinks = None if self._sinks is None else self._sinks[heads][..., None]
        return self._attend(q, k, v, mask, sinks)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """# q [..., rows, D], k [..., length, D], v [..., length, V], sinks [...] as a row of scores"""
        scale, soft_cap = self._options.scale, self._options.soft_cap
        if soft_cap is not None:
            return _capped(q, k, v, mask, sinks, scale, soft_cap)
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        dim, value_dim = k.shape[-1], v.shape[-1]
        if value_dim != dim:  # This kernel requires equal sizes of keys and values.
            width = max(dim, value_dim)
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        # A sink takes a share of the probability; 1 / (1 + exp(sink - logsumexp)) remains for the tokens.
        shared = out * torch.sigmoid(logsumexp - sinks.float())[..., None]
        return shared[..., :value_dim].to(q.dtype)  # type: ignore[no-any-return]


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with soft-capped scores, a few rows of queries at a time."""
    num_rows, length = q.shape[-2], k.shape[-2]
    step = max(1, _MAX_SCORES // (q[..., 0, 0].numel() * length))
    if mask is None:
        mask = torch.full((num_rows, length), -torch.inf, device=q.device).triu_(1)
    pieces = []
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        scores = (q[..., rows, :] @ k.transpose(-1, -2)).float() * scale
        scores = soft_cap * torch.tanh(scores / soft_cap) + (mask[..., rows, :] if mask.shape[-2] > 1 else mask)
        shift = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float()[..., rows, None] if sinks.shape[-1] > 1 else sinks.float()[..., None]
            shift = torch.maximum(shift, sink)
        weights = torch.exp(scores - shift)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - shift)
        pieces.append((weights / total).to(v.dtype) @ v)
    return torch.cat(pieces, dim=-2)


_Piece = tuple[slice, int, torch.Tensor | None]


def normalize_and_rotate(
    q: torch.Tensor, latent: torch.Tensor, inputs: LatentInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and latents, normalised and rotated. # [T, H, nope + rope], [T, rank + rope]"""
    cos, sin = inputs.rotation
    rope_dim = cos.shape[-1]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        last = x[..., x.shape[-1] - rope_dim :]
        return rotate(deinterleave(last) if inputs.is_interleaved else last, cos, sin)

    return (
        torch.cat((q[..., : q.shape[-1] - rope_dim], rotated(q)), -1),
        torch.cat(
            (rms_norm(latent[:, : latent.shape[1] - rope_dim], inputs.norm), rotated(latent[:, None])[:, 0]), -1
        ),
    )


class LatentAttention:
    """Multi-head latent attention of one layer in one step.

    It has two equivalent forms. Absorbed: queries are projected into the latent space through the key half of `kv_b`,
    attend there to one key that all heads share, and the result is projected by the value half; no work is done per
    latent and head. Expanded: latents are first projected to every head's keys and values, after which a query costs
    less. A decode absorbs; a prefill of many queries expands.
    """

    def __init__(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        cache: VectorCache,
        metadata: CPUAttentionMetaData,
        options: AttentionOptions,
        selected: torch.Tensor | None,
        scratch: Scratch,
    ) -> None:
        """See `AttentionBackend.latent_attention`."""
        self._heads = _Heads(kv_b, rope_dim=cache.vectors.shape[-1] - kv_b.shape[-1], q_dim=q.shape[-1])
        self._q = q
        self._cache = cache
        self._metadata = metadata
        self._plan = metadata.plan(1, cache.vectors.shape[1], 1)
        self._attention = AttentionMath(options, None)
        self._scale = options.k_scale
        self._selected = selected
        self._scratch = scratch

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
            latents = self._gather(span.pages[0].rows)[: span.length] if span.pages else latent[span.tokens]
            self._attend_span(span, latents, out[span.tokens])
        return out

    def _decode(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of decodes of one token to all their latents. # 2 x [decodes, H, rank + rope]"""
        dim = q.shape[-1]
        for bucket in self._plan.buckets:
            rows = torch.arange(len(q)) if bucket.rows is None else bucket.rows
            blocks = bucket.pages[0].rows.view(bucket.batch, -1)
            for some in chunks(bucket.batch, MAX_LATENT_ELEMENTS // (bucket.length * dim)):
                latents = self._gather(blocks[some].flatten()).view(-1, 1, bucket.length, dim)
                queries = q[rows[some], None]
                attended = self._attention.grouped_rows(queries, latents, latents, bucket.mask[some], slice(None))
                out[rows[some]] = attended[:, 0]

    def _decode_selected(self, q: torch.Tensor, out: torch.Tensor, selected: torch.Tensor) -> None:
        """Attention of decodes of one token to selected latents. # 2 x [decodes, H, rank + rope], [decodes, K]"""
        dim = q.shape[-1]
        blocks, offsets = block_and_offset(self._metadata.block_tables[: len(q)], selected.clamp(min=0), self._cache)
        # A row that selects fewer tokens is padded with its own first token, which the mask excludes.
        mask = torch.zeros_like(selected, dtype=torch.float32).masked_fill_(selected < 0, -torch.inf)[:, None, None]
        for some in chunks(len(q), MAX_LATENT_ELEMENTS // (selected.shape[1] * dim)):
            latents = self._cache.vectors[blocks[some], offsets[some]][:, None]
            latents = from_cache(latents, self._q.dtype, self._scale)
            out[some] = self._attention.grouped_rows(q[some, None], latents, latents, mask[some], slice(None))[:, 0]

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Gather the latents of blocks, in the queries' dtype. # [n] -> [n * block_size, rank + rope]"""
        return from_cache(gather_vectors(self._cache, blocks, self._scratch), self._q.dtype, self._scale)

    def _attend_span(self, span: PrefillSpan, latents: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of consecutive tokens of one sequence. # [length, rank + rope], [n, H, v]"""
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
        """Attention of a piece's queries. # [h, n, D], 2 x [h, length, D] -> [rows, h, D]"""
        rows, end, mask = piece
        attended = self._attention.grouped_heads(
            q[None, :, rows], k[None, :, :end], v[None, :, :end], mask, slice(None)
        )
        return attended[0].transpose(0, 1)

    def _pieces(self, span: PrefillSpan) -> Iterator[_Piece]:
        """Yield groups of queries: their rows, the number of leading latents they attend to, and the mask; None for
        causal attention.
        """
        # A token that may select as many tokens as it can attend to selects all of them.
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
    """The projection from latents to keys and values of the rank's heads."""

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
        """The size to which expanded keys and values are padded, since the fused kernel requires equal sizes."""
        return max(self.q_dim, self.v_dim)

    def absorbing_is_cheaper(self, num_queries: int, length: int) -> bool:
        """Whether absorbing this many queries takes fewer multiplications than expanding `length` latents."""
        rank = self.kv_b.shape[2]
        absorbed = num_queries * (self.kv_b.shape[1] * rank + length * (2 * rank + self.rope_dim))
        expanded = length * (self.kv_b.shape[1] * rank + num_queries * (self.q_dim + self.v_dim))
        return absorbed < expanded

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Project queries to the latent space. # [T, H, nope + rope] -> [T, H, rank + rope]"""
        in_latent = torch.einsum("thn,hnr->thr", q[..., : self.nope_dim], self.kv_b[:, : self.nope_dim])
        return torch.cat((in_latent, q[..., self.nope_dim :]), -1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attention outputs from the latent space to values. # [T, H, rank + rope] -> [T, H, v]"""
        return torch.einsum("thr,hvr->thv", attended[..., : self.kv_b.shape[2]], self.kv_b[:, self.nope_dim :])

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand latents to the keys and values of a range of heads. # [length, rank + rope] -> 2 x [heads, length,
        width]"""
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
    """The mask of selected positions, -1 for none. # [n, K] -> [n, length] float32, 0 or minus infinity"""
    mask = torch.full((len(selected), length + 1), -torch.inf)
    mask.scatter_(1, torch.where(selected < 0, length, selected), 0.0)
    return mask[:, :length]


def index_top_k(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cache: VectorCache,
    metadata: CPUAttentionMetaData,
    top_k: int,
    scratch: Scratch,
) -> torch.Tensor | None:
    """The lightning indexer's scores and selection. See `AttentionBackend.index_top_k`."""
    plan = metadata.plan(1, cache.vectors.shape[1], 1)
    k = write_vectors(k, cache, plan)
    longest = int(metadata.context_lens.max())
    if longest <= top_k:
        return None
    selected = torch.full((len(q), top_k), -1)
    dim = q.shape[-1]
    for bucket in plan.buckets:
        rows = torch.arange(bucket.batch) if bucket.rows is None else bucket.rows
        blocks = bucket.pages[0].rows.view(bucket.batch, -1)
        for some in chunks(bucket.batch, MAX_INDEX_SCORES // (bucket.length * max(dim, q.shape[1]))):
            keys = gather_vectors(cache, blocks[some].flatten(), scratch).view(-1, bucket.length, dim)
            scores = _scores(q[rows[some]], weights[rows[some]], keys)
            _choose(scores.masked_fill_(bucket.mask[some, 0, 0] < 0, -torch.inf), rows[some], selected)
    for span in plan.spans:
        cached = gather_vectors(cache, span.pages[0].rows, scratch)[: span.length] if span.pages else k[span.tokens]
        keys = cached.float()
        rows, ends = torch.arange(len(q))[span.tokens], torch.arange(span.length)[-span.num_tokens :]
        for some in chunks(span.num_tokens, MAX_INDEX_SCORES // (span.length * q.shape[1])):
            scores = _scores(q[rows[some]], weights[rows[some]], keys)
            unseen = torch.arange(span.length) > ends[some, None]
            _choose(scores.masked_fill_(unseen, -torch.inf), rows[some], selected)
    return selected


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """# [n, Hi, D], [n, Hi] float32, [n, length, D] or [length, D] -> [n, length] float32"""
    by_head = (q.float() @ keys.float().transpose(-1, -2)).relu_()
    return (weights[:, None] @ by_head)[:, 0]


def _choose(scores: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor) -> None:
    """Write the positions of the best scores to the rows of `selected`, -1 for tokens that are not visible.

    Ties are resolved as in transformers: with few heads many scores are 0, and this path is the reference.
    """
    best = scores.topk(min(selected.shape[1], scores.shape[1]), sorted=False)
    selected[rows, : best.indices.shape[1]] = best.indices.masked_fill(best.values == -torch.inf, -1)


@BACKENDS.register("cpu")
class CPUAttentionBackend(AttentionBackend):
    """Computes decodes as padded batches of similar lengths, and prefills one by one; a step may mix them.

    K and V are not copied for the query heads that share them: a decode passes these heads as further queries, a
    prefill as heads over one expanded view of K and V.
    """

    name = "cpu"
    _metadata_type: type[CPUAttentionMetaData] = CPUAttentionMetaData

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008, immutable
        super().__init__(device)
        self._scratch = Scratch()

    def build_metadata(
        self, batch: AttentionBatch, tables: torch.Tensor | None = None, send: Send | None = None
    ) -> CPUAttentionMetaData:
        """See `AttentionBackend`. All rows of several tokens count as prefills, including those that verify drafts."""
        assert batch.block_tables is not None, "the CPU backend reads block tables from NumPy arrays"
        states, states_after = batch.states, batch.states_after
        return self._metadata_type(
            backend=self,
            cu_seqlens_q=torch.from_numpy(np.concatenate(([0], np.cumsum(batch.query_lens))).astype(np.int32)),
            seq_lens=torch.from_numpy(batch.seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(batch.block_tables),
            slot_mapping=torch.from_numpy(batch.slot_mapping),
            num_decodes=batch.num_decodes if batch.query_len == 1 else 0,
            query_len=batch.query_len,
            states=None if states is None else torch.from_numpy(states),
            states_after=None if states_after is None else torch.from_numpy(states_after),
            num_by_token=batch.num_by_token,
            query_lens=batch.query_lens,
            context_lens=batch.seq_lens,
            host_block_tables=batch.block_tables,
            host_slot_mapping=batch.slot_mapping,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, V] -> [T, Hq, V]"""
        assert isinstance(metadata, CPUAttentionMetaData)
        options, sinks, norms, rotation, q_scales = inputs
        is_first = options.is_rotated_first
        q = moved(q, None if norms is None else norms.q, rotation, is_rotated_first=is_first, scales=q_scales)
        _, num_kv_heads, block_size, head_dim = cache.k_cache.shape
        plan = metadata.plan(
            num_kv_heads,
            block_size,
            pages_of_block(cache.k_cache),
            options.sliding_window,
            is_chunked=options.is_chunked,
            reads_all=k is None,
        )
        paged = PagedKV(cache, options, q.dtype, self._scratch)
        if k is not None and v is not None:
            k = moved(k, None if norms is None else norms.k, rotation, is_rotated_first=is_first)
            k, v = paged.write(k, v, plan)
        grouped = q.view(len(q), num_kv_heads, -1, head_dim)  # [T, Hkv, group, D]
        attention = AttentionMath(options, None if sinks is None else sinks.view(num_kv_heads, -1))
        out = grouped.new_empty(*grouped.shape[:-1], cache.v_cache.shape[-1])  # [T, Hkv, group, V]
        decodes = metadata.num_decodes
        for bucket in plan.buckets:
            _decode(grouped[:decodes], out[:decodes], paged, bucket, attention)
        for span in plan.spans:
            if span.pages:
                _chunked_prefill(grouped[span.tokens], out[span.tokens], paged, span, plan.mask, attention)
            else:
                assert k is not None
                assert v is not None
                _prefill(grouped[span.tokens], out[span.tokens], k[span.tokens], v[span.tokens], attention)
        return out.view(*q.shape[:-1], -1)

    def latent_attention(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        selected: torch.Tensor | None = None,
        inputs: LatentInputs | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # [T, H, nope + rope], [T, rank + rope], [H, nope + v, rank] -> [T, H, v]"""
        assert isinstance(metadata, CPUAttentionMetaData)
        if inputs is not None:
            q, latent = normalize_and_rotate(q, latent, inputs)
        return LatentAttention(q, kv_b, cache, metadata, options, selected, self._scratch).run(latent)

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> torch.Tensor | None:
        """See `AttentionBackend`. # [T, H, D], [T, H], [T, D] -> [T, top_k] or None"""
        assert isinstance(metadata, CPUAttentionMetaData)
        return index_top_k(q, weights, k, cache, metadata, top_k, self._scratch)


def _decode(
    q: torch.Tensor,
    out: torch.Tensor,
    paged: PagedKV,
    bucket: DecodeBucket,
    attention: AttentionMath,
) -> None:
    """Decodes of one token per row. # q and out [decodes, Hkv, group, D or V]"""
    queries = q if bucket.rows is None else q[bucket.rows]
    for pages in bucket.pages:
        k, v = paged.gather(pages.rows, bucket.batch, bucket.length)
        attended = attention.grouped_rows(queries[:, pages.heads], k, v, bucket.mask, pages.heads)
        if bucket.rows is None:
            out[:, pages.heads] = attended
        else:
            out[bucket.rows, pages.heads] = attended


def _prefill(q: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: AttentionMath) -> None:
    """A prefill without cached context. # q and out [n, Hkv, group, D or V], k and v [n, Hkv, D or V]"""
    queries = q.permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, q.shape[2], -1, -1) for x in (k, v))
    out.copy_(attention.grouped_heads(queries, keys, values, None, slice(None)).permute(2, 0, 1, 3))


def _chunked_prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    paged: PagedKV,
    span: PrefillSpan,
    mask: torch.Tensor | None,
    attention: AttentionMath,
) -> None:
    """A prefill after cached context, in chunks of queries that share the end of their context.

    # q and out [n, Hkv, group, D or V]
    """
    assert mask is not None, "the plan has a mask for spans with context"
    chunk, longest = mask.shape
    queries = q.permute(1, 2, 0, 3)  # [Hkv, group, n, D]
    for pages in span.pages:
        k, v = (side[0, :, None] for side in paged.gather(pages.rows, 1, span.padded))  # [heads, 1, padded, D]
        for first in range(0, span.num_tokens, chunk):
            last = min(first + chunk, span.num_tokens)
            end = span.length - span.num_tokens + last
            begin = max(span.first_key, attention.first_key(end - (last - first)))
            chunk_queries = queries[pages.heads, :, first:last]
            seen = slice(begin - span.first_key, end - span.first_key)
            attended = attention.grouped_heads(
                chunk_queries,
                k[..., seen, :].expand(-1, chunk_queries.shape[1], -1, -1),
                v[..., seen, :].expand(-1, chunk_queries.shape[1], -1, -1),
                mask[chunk - (last - first) :, longest - (end - begin) :],
                pages.heads,
            )
            out[first:last, pages.heads] = attended.permute(2, 0, 1, 3)
