"""The attention backend of GPUs: Triton kernels over the paged cache, on ROCm and CUDA alike."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from models.attention.context import AttentionMetaData
from models.attention.gpu import GPUAttentionBackend, TritonMetaData
from models.ops.memory import upload
from models.ops.triton.attention import attention_decode, attention_merge, attention_prefill, tokens_of_tile
from models.ops.triton.cache_store import (
    as_hardware_reads,
    latent_store,
    store,
    vector_store,
    vectors_as_hardware_reads,
)
from models.ops.triton.latent_attention import Piece, indexer_scores, latent_prefill
from models.ops.triton.latent_attention import latent_attention as attend_absorbed
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, LatentInputs, Rotation, VectorCache

_PROGRAMS_PER_PROCESSOR = 16
"""Of a decode, where its items are more: enough that several are resident, and few enough to share them out evenly."""


class TritonAttentionBackend(GPUAttentionBackend):
    """Decodes by pieces of their rows, spans by tiles of their queries; any mix of them in a step."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        processors = 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
        self._max_programs = processors * _PROGRAMS_PER_PROCESSOR

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # q [T, Hq, D], k and v [T, Hkv, D], [Hq] -> [T, Hq, D]

        Raises `ValueError` for a cache in FP8 where the hardware has none.
        """
        assert isinstance(metadata, TritonMetaData)
        q, k, v = _with_dense_heads(q), _with_dense_heads(k), _with_dense_heads(v)
        cache, options = as_hardware_reads(cache, options, q.device)
        q = store(q, k, v, cache, metadata.slot_mapping, options, norms, rotation)
        out = q.new_empty(*q.shape)
        self._attend(q, out, cache, metadata, options, sinks)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVCacheTensor,
        metadata: TritonMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
    ) -> None:
        """To what is stored. # [T, Hq, D] each"""
        decodes, tokens = metadata.num_decodes * metadata.query_len, q.shape[0]
        if 0 < decodes < tokens:
            self._decode(q[:decodes], out[:decodes], cache, metadata, options, sinks)
        elif decodes:
            self._decode(q, out, cache, metadata, options, sinks)
        if decodes < tokens:
            tiles = metadata.tiles(tokens_of_tile(q, cache.k_cache.shape[1]))
            starts, lengths = metadata.cu_seqlens_q, metadata.seq_lens
            attention_prefill(q, out, cache, tiles, starts, lengths, metadata.block_tables, options, sinks)

    def _decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVCacheTensor,
        metadata: TritonMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
    ) -> None:
        """# [B * query_len, Hq, D] each"""
        _, heads, head_dim = q.shape
        rows, members = metadata.num_decodes, metadata.query_len * heads
        pieces = metadata.pieces(cache.k_cache.shape[2])
        partial = q.new_empty(rows, pieces, members, head_dim, dtype=torch.float32)
        weights = q.new_empty(rows, pieces, members, dtype=torch.float32)
        lengths = metadata.seq_lens
        attention_decode(
            q,
            partial,
            weights,
            cache,
            metadata.items,
            metadata.num_items,
            lengths,
            metadata.block_tables,
            options,
            query_len=metadata.query_len,
            max_programs=self._max_programs,
        )
        attention_merge(partial, weights, out, lengths, options.v_scale, sinks, query_len=metadata.query_len)

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

        return latent_attention(q, latent, kv_b, cache, metadata, options, selected, inputs)

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

        return index_top_k(q, weights, k, cache, metadata, top_k)


def _with_dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Each head's dimensions side by side. # [T, heads, D]"""
    return x if x.stride(2) == 1 else x.contiguous()


# [triton_latent] Latent attention and the lightning indexer on GPUs: which tokens go which way, and over which
# pages.
#
# Two ways to the same numbers, as on the CPU. Absorbed: queries go into the latents' space and attend there to one
# key that all heads share. Expanded: latents become every head's keys and values first, after which a query costs
# less. Decodes absorb, and so do tokens that select among more than they may attend to; a span of many queries
# expands. What a token takes depends on its own row alone.

MAX_EXPANDED_ELEMENTS = 1 << 27
"""Of expanded latents at a time: 256 MiB in bfloat16. One latent of a model may need more."""
MAX_INDEX_SCORES = 1 << 27
"""That are in memory at a time: 512 MiB. One token over a long context may need more."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The step's tokens one by one."""

    rows: torch.Tensor  # [T] int32
    lens: torch.Tensor  # [T] int32, latents that each sees
    longest: int


@dataclass(frozen=True, slots=True)
class _Launch:
    """Spans, or parts of long ones, whose latents are expanded together."""

    pieces: torch.Tensor  # [P, 7] int32
    keys: torch.Tensor  # [2, keys] int64, rows and positions of the latents
    longest: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who goes which way."""

    absorbed: list[tuple[slice, int]]
    """Tokens, and the most latents that one of them sees."""
    expanded: list[_Launch]
    are_carried: bool
    """Whether a span has several pieces."""


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    cache: VectorCache,
    metadata: AttentionMetaData,
    options: AttentionOptions,
    selected: torch.Tensor | None = None,
    inputs: LatentInputs | None = None,
) -> torch.Tensor:
    """See `AttentionBackend`. # [T, H, nope + rope], [T, rank + rope], [H, nope + v, rank] -> [T, H, v]

    Raises `ValueError` for a cache in FP8 where the hardware has none.
    """
    assert isinstance(metadata, TritonMetaData)
    rank, rope = kv_b.shape[2], cache.vectors.shape[2] - kv_b.shape[2]
    nope = q.shape[2] - rope
    vectors, scale = vectors_as_hardware_reads(cache.vectors, options.k_scale, q.device)
    if inputs is None:
        vector_store(latent, vectors, metadata.slot_mapping, scale)
        q_rope = q[..., nope:]
    else:
        q_rope = latent_store(
            q,
            latent,
            vectors,
            metadata.slot_mapping,
            norm=(inputs.norm.weight, inputs.norm.eps),
            rotation=inputs.rotation,
            is_interleaved=inputs.is_interleaved,
            scale=scale,
        )
    if vectors.dtype.itemsize > 1:
        scale = 1.0
    q_nope = q[..., :nope]
    tokens = _tokens(metadata, vectors.shape[1])
    top_k = None if selected is None else selected.shape[1]
    plan = _plan(metadata, tokens, kv_b, rope, nope, top_k)
    out = q.new_empty(*q.shape[:2], kv_b.shape[1] - nope)
    for some, longest in plan.absorbed:
        attended = attend_absorbed(
            torch.einsum("thn,hnr->thr", q_nope[some], kv_b[:, :nope]),
            q_rope[some],
            vectors,
            metadata.block_tables,
            tokens.rows[some],
            tokens.lens[some],
            longest=longest,
            scale=options.scale,
            cache_scale=scale,
            selected=None if selected is None else selected[some],
        )
        out[some] = torch.einsum("thr,hvr->thv", attended, kv_b[:, nope:])
    carried = None
    if plan.are_carried:
        carried = (
            torch.empty(out.shape, dtype=torch.float32, device=q.device),
            torch.empty(*q.shape[:2], 2, dtype=torch.float32, device=q.device),
        )
    for launch in plan.expanded:
        latents = _gathered(vectors, metadata.block_tables, launch.keys, scale, q.dtype)
        expanded = F.linear(latents[:, :rank], kv_b.flatten(0, 1)).view(len(latents), *kv_b.shape[:2])
        latent_prefill(
            q_nope,
            q_rope,
            expanded,
            latents[:, rank:],
            launch.pieces,
            out,
            carried,
            longest=launch.longest,
            scale=options.scale,
        )
    return out


def index_top_k(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cache: VectorCache,
    metadata: AttentionMetaData,
    top_k: int,
) -> torch.Tensor | None:
    """See `AttentionBackend`. # [T, H, D], [T, H], [T, D] -> [T, top_k] or None

    Raises `ValueError` for a cache in FP8 where the hardware has none.
    """
    assert isinstance(metadata, TritonMetaData)
    # Keys of the indexer have no scale.
    vectors, scale = vectors_as_hardware_reads(cache.vectors, 1.0, q.device)
    vector_store(k, vectors, metadata.slot_mapping, scale)
    tokens = _tokens(metadata, vectors.shape[1])
    if tokens.longest <= top_k:
        return None
    selected = torch.full((len(q), top_k), -1, device=q.device)
    step = max(1, MAX_INDEX_SCORES // tokens.longest)
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        # A scale of 2 or none: all scores alike, and their order the same.
        scores = indexer_scores(
            q[some],
            weights[some],
            vectors,
            metadata.block_tables,
            tokens.rows[some],
            tokens.lens[some],
            tokens.longest,
        )
        best = scores.topk(top_k, sorted=False)
        selected[some] = best.indices.masked_fill(best.values == -torch.inf, -1)
    return selected


def _tokens(metadata: TritonMetaData, block_size: int) -> _Tokens:
    """In a captured graph every row may be as long as its block table."""
    if metadata.lengths is None:
        rows = torch.arange(metadata.num_decodes, dtype=torch.int32, device=metadata.seq_lens.device)
        seen, count = metadata.seq_lens, metadata.query_len
        if count > 1:
            behind = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=seen.device)
            # A row of nobody's stays empty.
            seen = (seen[:, None] - behind).clamp_(min=0).flatten()
            rows = rows.repeat_interleave(count, output_size=len(seen))
        return _Tokens(rows, seen, metadata.block_tables.shape[1] * block_size)
    if "tokens" not in metadata.plans:
        queries, contexts = metadata.lengths.queries, metadata.lengths.contexts
        of_rows = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
        places = np.arange(len(of_rows)) - np.repeat(np.cumsum(queries) - queries, queries)
        lens = ((contexts - queries)[of_rows] + places + 1).astype(np.int32)
        rows, seen = upload([of_rows, lens], metadata.seq_lens.device)
        metadata.plans["tokens"] = _Tokens(rows, seen, int(contexts.max()))
    found: _Tokens = metadata.plans["tokens"]
    return found


def _plan(
    metadata: TritonMetaData, tokens: _Tokens, kv_b: torch.Tensor, rope: int, nope: int, top_k: int | None
) -> _Plan:
    if metadata.lengths is None:
        return _Plan([(slice(0, len(tokens.rows)), tokens.longest)], [], are_carried=False)
    key = ("latents", tuple(kv_b.shape), top_k)
    if key not in metadata.plans:
        metadata.plans[key] = _make_plan(metadata, kv_b, rope, nope, top_k)
    plan: _Plan = metadata.plans[key]
    return plan


def _make_plan(metadata: TritonMetaData, kv_b: torch.Tensor, rope: int, nope: int, top_k: int | None) -> _Plan:
    assert metadata.lengths is not None
    decodes = metadata.num_decodes
    queries, contexts = metadata.lengths.queries.tolist(), metadata.lengths.contexts.tolist()
    num_decoded = decodes * metadata.query_len
    absorbed = [(slice(0, num_decoded), max(contexts[:decodes]))] if decodes else []
    heads, width, rank = kv_b.shape
    most = max(1, MAX_EXPANDED_ELEMENTS // (heads * width))
    pieces: list[list[tuple[int, Piece, int]]] = []  # by launch: row, piece, position of its first key
    room, first = 0, num_decoded
    for row in range(decodes, len(queries)):
        count, length = queries[row], contexts[row]
        is_sparse = top_k is not None and length > top_k
        if is_sparse or _absorbing_is_cheaper(count, length, width, rank, rope, nope):
            absorbed.append((slice(first, first + count), length))
        else:
            for start in range(0, length, most):
                keys = min(most, length - start)
                if keys > room or start > 0:
                    pieces.append([])
                    room = most
                at, offset = most - room, length - count - start
                piece = Piece(first, count, at, keys, offset, start == 0, start + keys == length)
                pieces[-1].append((row, piece, start))
                room -= keys
        first += count
    device = metadata.seq_lens.device
    launches = [_launch(some, device) for some in pieces]
    return _Plan(absorbed, launches, any(not piece.is_last for some in pieces for _, piece, _ in some))


def _launch(pieces: list[tuple[int, Piece, int]], device: torch.device) -> _Launch:
    table = np.array([piece for _, piece, _ in pieces], np.int32)
    rows = np.concatenate([np.full(piece.num_keys, row) for row, piece, _ in pieces])
    places = np.concatenate([np.arange(start, start + piece.num_keys) for _, piece, start in pieces])
    on, keys = upload([table, np.stack((rows, places)).astype(np.int64)], device)
    return _Launch(on, keys, max(piece.num_queries for _, piece, _ in pieces))


def _absorbing_is_cheaper(count: int, length: int, width: int, rank: int, rope: int, nope: int) -> bool:
    """Whether so many queries multiply less in the latent space than expanding `length` latents costs."""
    absorbed = count * (width * rank + length * (2 * rank + rope))
    expanded = length * (width * rank + count * (width + rope))
    return absorbed < expanded


def _gathered(
    vectors: torch.Tensor, block_tables: torch.Tensor, keys: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Latents at some positions of some rows, as they are meant. # [2, keys] int64 -> [keys, rank + rope]"""
    rows, places = keys
    block_size = vectors.shape[1]
    blocks = block_tables[rows, places // block_size].long()
    if vectors.dtype.itemsize > 1:
        return vectors[blocks, places % block_size]
    stored = vectors.view(torch.uint8)[blocks, places % block_size].view(vectors.dtype)
    return (stored.float() * scale).to(dtype)
