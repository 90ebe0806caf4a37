"""The attention backend of GPUs: Triton kernels over the paged cache, on ROCm and CUDA alike."""

import torch

from models.attention.gpu import GPUAttentionBackend
from models.attention.triton_metadata import TritonMetaData
from models.forward_context import AttentionMetaData
from models.kernels.triton.attention_decode import attention_decode
from models.kernels.triton.attention_merge import attention_merge
from models.kernels.triton.attention_prefill import attention_prefill, tokens_of_tile
from models.kernels.triton.cache_view import as_hardware_reads
from models.kernels.triton.store import store
from models.kernels.types import AttentionOptions, HeadNorms, KVCacheTensor, LatentInputs, Rotation, VectorCache

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
        import models.attention.triton_latent as latents

        return latents.latent_attention(q, latent, kv_b, cache, metadata, options, selected, inputs)

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
        import models.attention.triton_latent as latents

        return latents.index_top_k(q, weights, k, cache, metadata, top_k)


def _with_dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Each head's dimensions side by side. # [T, heads, D]"""
    return x if x.stride(2) == 1 else x.contiguous()
