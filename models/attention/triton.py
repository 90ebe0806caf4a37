"""The attention backend of GPUs: Triton kernels over the paged cache, on ROCm and CUDA alike.

Attention over keys and values comes first, latent attention and the lightning indexer after it.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from models.attention.backend import BACKENDS, AttentionMetaData
from models.attention.gpu import GPUAttentionBackend, TritonMetaData
from models.ops import flash_attention
from models.ops.flash_attention import Spans
from models.ops.memory import upload
from models.ops.torch_ops import top_k_lower_first
from models.ops.triton.attention import attend_decodes, paged_attention, tokens_of_tile
from models.ops.triton.cache_store import (
    as_hardware_reads,
    latent_store,
    store,
    vector_store,
    vectors_as_hardware_reads,
)
from models.ops.triton.grids import AttentionPlan
from models.ops.triton.latent_attention import Piece, indexer_scores, latent_prefill
from models.ops.triton.latent_attention import latent_attention as attend_absorbed
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor, LatentInputs, VectorCache

MAX_EXPANDED_ELEMENTS = 1 << 27
"""The most elements of expanded latents at a time: 256 MiB in bfloat16. One latent of a model may take more."""
MAX_INDEX_SCORES = 1 << 25
"""The most index scores in memory at a time: 128 MiB, and five times that to choose among them. One token over a long
context may take more."""


@BACKENDS.register("triton")
class TritonAttentionBackend(GPUAttentionBackend):
    """Computes decodes by pieces of their keys, and prefills by tiles of their queries; a step may mix them."""

    name = "triton"

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
        assert isinstance(metadata, TritonMetaData)
        options, sinks, norms, rotation, q_scales = inputs
        q = _with_dense_heads(q)
        k, v = (None if x is None else _with_dense_heads(x) for x in (k, v))
        cache, options = as_hardware_reads(cache, options, q.device)
        q = store(q, k, v, cache, metadata.slot_mapping, options, norms, rotation, q_scales)
        out = q.new_empty(*q.shape[:2], cache.v_cache.shape[3])
        self._attend(q, out, cache, metadata, options, sinks)
        if self.observer is not None:
            self.observer(q, out, cache, options, sinks, False)
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
        """Attend to the stored keys and values. # q [T, Hq, D], out [T, Hq, V]"""
        spans = flash_spans(q, cache, metadata, options, sinks)
        if spans is None:
            paged_attention(q, out, cache, plan_of(q, cache, metadata), options, sinks)
            return
        decodes = metadata.num_decodes * metadata.query_len
        if decodes:
            plan = metadata.plan(cache.k_cache.shape[2], None)
            attend_decodes(q[:decodes], out[:decodes], cache, plan, options, sinks)
        tokens = slice(decodes, None)
        out[tokens] = flash_attention.attend(q[tokens], cache, metadata.block_tables, spans, options)

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


def flash_spans(
    q: torch.Tensor,
    cache: KVCacheTensor,
    metadata: TritonMetaData,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> Spans | None:
    """The rows after the decodes, if a library's flash attention computes them; None otherwise."""
    if metadata.lengths is None or not flash_attention.takes(q, cache, options, sinks):
        return None
    return metadata.flash_spans(options.sliding_window)


def plan_of(q: torch.Tensor, cache: KVCacheTensor, metadata: TritonMetaData) -> AttentionPlan:
    """The kernels' split of the step into pieces and tiles for layers of this shape. # q [T, Hq, D]"""
    num_kv_heads, block_size = cache.k_cache.shape[1], cache.k_cache.shape[2]
    has_spans = metadata.num_decodes_by_pieces * metadata.query_len < q.shape[0]
    return metadata.plan(block_size, tokens_of_tile(q, num_kv_heads) if has_spans else None)


def _with_dense_heads(x: torch.Tensor) -> torch.Tensor:
    """A tensor with equal values and each head contiguous. # [T, heads, D]"""
    return x if x.stride(2) == 1 else x.contiguous()


# Latent attention has two equivalent forms, as on the CPU. Absorbed: queries are projected into the latent space and
# attend there to one key that all heads share. Expanded: latents are first projected to every head's keys and values,
# after which a query costs less. Decodes absorb, and so do tokens that select among more tokens than they may attend
# to; a prefill of many queries expands. The form of a token depends on its own row alone.


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The step's tokens, for absorbed attention and the indexer."""

    rows: torch.Tensor  # [T] int32
    lens: torch.Tensor  # [T] int32, the number of latents that each token attends to
    longest: int


@dataclass(frozen=True, slots=True)
class _Launch:
    """Prefills, or pieces of long ones, whose latents are expanded together."""

    pieces: torch.Tensor  # [P, 7] int32
    keys: torch.Tensor  # [2, keys] int64, row and position of each latent
    longest: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which tokens absorb, and which expand."""

    absorbed: list[tuple[slice, int]]
    """Slices of tokens, with the most latents that a token of each attends to."""
    expanded: list[_Launch]
    are_carried: bool
    """Whether a prefill has several pieces, which carry partial results from launch to launch."""


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
    """See `AttentionBackend`. # [T, H, nope + rope], [T, rank + rope], [H, nope + v, rank] -> [T, H, v]"""
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
    """See `AttentionBackend`. # [T, H, D], [T, H], [T, D] -> [T, top_k] or None"""
    assert isinstance(metadata, TritonMetaData)
    # Index keys have no scale.
    vectors, scale = vectors_as_hardware_reads(cache.vectors, 1.0, q.device)
    vector_store(k, vectors, metadata.slot_mapping, scale)
    tokens = _tokens(metadata, vectors.shape[1])
    if tokens.longest <= top_k:
        return None
    selected = torch.full((len(q), top_k), -1, device=q.device)
    step = max(1, MAX_INDEX_SCORES // tokens.longest)
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        # The scale of stored keys, if any, is a power of two, which does not change the order of scores.
        scores = indexer_scores(
            q[some],
            weights[some],
            vectors,
            metadata.block_tables,
            tokens.rows[some],
            tokens.lens[some],
            tokens.longest,
        )
        values, positions = top_k_lower_first(scores, top_k)
        selected[some] = positions.masked_fill(values == -torch.inf, -1)
    return selected


def _tokens(metadata: TritonMetaData, block_size: int) -> _Tokens:
    """The step's tokens. In a captured graph every row may be as long as its block table."""
    if metadata.lengths is None:
        rows = torch.arange(metadata.num_decodes, dtype=torch.int32, device=metadata.seq_lens.device)
        seen, count = metadata.seq_lens, metadata.query_len
        if count > 1:
            later = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=seen.device)
            # A padding row has no latents.
            seen = (seen[:, None] - later).clamp_(min=0).flatten()
            rows = rows.repeat_interleave(count, output_size=len(seen))
        return _Tokens(rows, seen, metadata.block_tables.shape[1] * block_size)
    if "tokens" not in metadata.plans:
        queries, contexts = metadata.lengths.queries, metadata.lengths.contexts
        row_of = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
        offsets = np.arange(len(row_of)) - np.repeat(np.cumsum(queries) - queries, queries)
        lens = ((contexts - queries)[row_of] + offsets + 1).astype(np.int32)
        rows, seen = upload([row_of, lens], metadata.seq_lens.device)
        metadata.plans["tokens"] = _Tokens(rows, seen, int(contexts.max()))
    tokens: _Tokens = metadata.plans["tokens"]
    return tokens


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
        if is_sparse or _absorbing_is_cheaper(count, length, width, rank, rope):
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
    positions = np.concatenate([np.arange(start, start + piece.num_keys) for _, piece, start in pieces])
    uploaded, keys = upload([table, np.stack((rows, positions)).astype(np.int64)], device)
    return _Launch(uploaded, keys, max(piece.num_queries for _, piece, _ in pieces))


def _absorbing_is_cheaper(count: int, length: int, width: int, rank: int, rope: int) -> bool:
    """Whether absorbing `count` queries takes fewer multiplications than expanding `length` latents."""
    absorbed = count * (width * rank + length * (2 * rank + rope))
    expanded = length * (width * rank + count * (width + rope))
    return absorbed < expanded


def _gathered(
    vectors: torch.Tensor, block_tables: torch.Tensor, keys: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Gather latents by row and position, in `dtype`. # [2, keys] int64 -> [keys, rank + rope]"""
    rows, positions = keys
    block_size = vectors.shape[1]
    blocks = block_tables[rows, positions // block_size].long()
    if vectors.dtype.itemsize > 1:
        return vectors[blocks, positions % block_size]
    stored = vectors.view(torch.uint8)[blocks, positions % block_size].view(vectors.dtype)
    return (stored.float() * scale).to(dtype)
