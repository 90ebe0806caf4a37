"""The CPU attention backend by the compiled operators; layers that they do not support run on torch."""

from dataclasses import dataclass, field

import numpy as np
import torch

from models.attention.backend import BACKENDS, AttentionMetaData
from models.attention.cpu import CPUAttentionBackend, normalize_and_rotate
from models.attention.cpu_cache import from_cache, write_vectors
from models.attention.cpu_plan import CPUAttentionMetaData
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import gated_delta as delta_ops
from models.ops.cpu import latent_attention as latent_ops
from models.ops.cpu.structures import Step
from models.ops.torch_ops import top_k_lower_first
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor, LatentInputs, VectorCache


@dataclass(slots=True, kw_only=True)
class NativeMetaData(CPUAttentionMetaData):
    """A step's metadata, with the structure that the operators read."""

    step: Step = field(init=False)

    def __post_init__(self) -> None:
        self.block_tables = self.block_tables.contiguous()
        self.step = attention_ops.make_step(
            slots=self.slot_mapping,
            query_starts=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            state_slots=self.states,
            states_after=self.states_after,
        )


@BACKENDS.register("cpu-native")
class NativeCPUAttentionBackend(CPUAttentionBackend):
    """Reads keys and values in place, for decodes and prefills alike.

    The operators and torch's code store values in different orders, so one of them computes all steps of a layer.
    """

    name = "cpu-native"
    _metadata_type = NativeMetaData

    def stored_size(self, dim: int, dtype: torch.dtype, *, is_latent: bool = False) -> int:
        """See `AttentionBackend`."""
        if dtype is not torch.bfloat16:
            return dim  # Torch attends there.
        return latent_ops.stored_size(dim) if is_latent else attention_ops.stored_size(dim)

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
        assert isinstance(metadata, NativeMetaData)
        if not attention_ops.supports(q, cache.k_cache, cache.v_cache):
            return super().forward(q, k, v, cache, metadata, inputs)
        options, sinks, norms, rotation, q_scales = inputs
        q = _with_adjacent_heads(q)
        k, v = (None if part is None else _with_adjacent_heads(part) for part in (k, v))
        attention_ops.rope_store(
            q,
            k,
            v,
            cache.k_cache,
            cache.v_cache,
            metadata.step,
            norms=norms,
            rotation=rotation,
            q_scales=q_scales,
            is_rotated_first=options.is_rotated_first,
        )
        out = attention_ops.attention(
            q, cache.k_cache, cache.v_cache, metadata.step, options, None if sinks is None else sinks.float()
        )
        if self.observer is not None:
            self.observer(q, out, cache, options, sinks, True)
        return out

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
        """See `AttentionBackend`. # [T, H, nope + rope], [T, rank + rope], [H, nope + v, rank] -> [T, H, v]

        Every query is absorbed into the latent space, so that a result does not depend on the number of queries.
        """
        assert isinstance(metadata, NativeMetaData)
        rank = kv_b.shape[-1]
        if inputs is None or inputs.heads is None or not latent_ops.supports(q, cache.vectors, rank):
            if selected is not None:
                return _attend_selected(q, latent, kv_b, cache, metadata, options, selected, inputs)
            return super().latent_attention(q, latent, kv_b, cache, metadata, options, selected, inputs)
        heads, step = inputs.heads, metadata.step
        latent_q = latent_ops.latent_queries(q, heads, cache.vectors.stride(1))
        latent_ops.latent_store(
            q,
            latent,
            latent_q,
            cache.vectors,
            step,
            norm=(inputs.norm.weight, inputs.norm.eps),
            rotation=inputs.rotation,
            is_interleaved=inputs.is_interleaved,
        )
        if selected is None:
            attended = latent_ops.latent_attention(latent_q, cache.vectors, step, rank, options.scale)
        else:
            entries = latent_ops.Entries(cache.vectors, cache.vectors.shape[1], 1, _in_order(selected))
            attended = latent_ops.latent_attention(latent_q, None, step, rank, options.scale, entries=entries)
        return latent_ops.latent_values(attended, heads)

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> torch.Tensor | None:
        """See `AttentionBackend`. # [T, H, D], [T, H], [T, D] -> [T, top_k]

        Each token is computed separately over its visible keys, and the result is never None: rounding in torch
        depends on the batch size, and small differences would change the selection.
        """
        assert isinstance(metadata, NativeMetaData)
        write_vectors(k, cache, metadata.plan(1, cache.vectors.shape[1], 1))
        selected = torch.full((len(q), top_k), -1)
        ends = metadata.context_lens - metadata.query_lens - np.cumsum(metadata.query_lens) + metadata.query_lens
        for token, row in enumerate(_rows_of_tokens(metadata)):
            count = int(ends[row]) + token + 1
            positions = torch.arange(count)
            if count > top_k:
                keys = _vectors_at(cache, metadata, row, positions).float()
                scores = weights[token, None] @ (q[token].float() @ keys.T).relu_()
                positions = top_k_lower_first(scores, top_k)[1][0].sort().values
            selected[token, : len(positions)] = positions
        return selected


def _in_order(selected: torch.Tensor) -> torch.Tensor:
    """Convert positions, from the operators or from torch in any order, for the operators. # [T, K] -> [T, K] int32"""
    if selected.dtype is torch.int32:
        return selected
    last = torch.iinfo(torch.int32).max
    ascending = torch.where(selected < 0, last, selected).sort().values
    return torch.where(ascending == last, -1, ascending).int()


def _attend_selected(
    q: torch.Tensor,
    latent: torch.Tensor,
    kv_b: torch.Tensor,
    cache: VectorCache,
    metadata: CPUAttentionMetaData,
    options: AttentionOptions,
    selected: torch.Tensor,
    inputs: LatentInputs | None,
) -> torch.Tensor:
    """`latent_attention` to selected positions, one token after the other, absorbed: see `index_top_k` below."""
    if inputs is not None:
        q, latent = normalize_and_rotate(q, latent, inputs)
    write_vectors(latent, cache, metadata.plan(1, cache.vectors.shape[1], 1), options.k_scale)
    rank = kv_b.shape[-1]
    rope = cache.vectors.shape[-1] - rank
    nope = q.shape[-1] - rope
    to_latent = kv_b[:, :nope].float()  # [H, nope, rank]
    to_value = kv_b[:, nope:].float().transpose(1, 2)  # [H, rank, v]
    out = q.new_empty(*q.shape[:2], kv_b.shape[1] - nope)
    for token, row in enumerate(_rows_of_tokens(metadata)):
        positions = selected[token][selected[token] >= 0].long()
        latents = from_cache(_vectors_at(cache, metadata, row, positions), torch.float32, options.k_scale)
        own = q[token].float()
        absorbed = torch.cat(((own[:, None, :nope] @ to_latent)[:, 0], own[:, nope:]), -1)
        shares = (absorbed @ latents.T * options.scale).softmax(-1)
        out[token] = ((shares @ latents[:, :rank])[:, None] @ to_value)[:, 0].to(out.dtype)
    return out


def _rows_of_tokens(metadata: CPUAttentionMetaData) -> list[int]:
    """The row of each of the step's tokens."""
    return np.repeat(np.arange(len(metadata.query_lens)), metadata.query_lens).tolist()


def _vectors_at(cache: VectorCache, metadata: CPUAttentionMetaData, row: int, positions: torch.Tensor) -> torch.Tensor:
    """A row's stored vectors at some positions. # [n] int64 -> [n, dim]"""
    block_size = cache.vectors.shape[1]
    blocks = metadata.block_tables[row].long()[positions // block_size]
    return cache.vectors[blocks, positions % block_size]


def _with_adjacent_heads(part: torch.Tensor) -> torch.Tensor:
    """A tensor with equal values and the heads of a token adjacent in memory. # [T, heads, D]"""
    if part.stride(2) != 1:
        return part.contiguous()
    return part if part.stride(1) == part.shape[2] else delta_ops.gate_heads(part, None)
