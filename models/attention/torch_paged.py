"""The attention backend of GPUs on which Triton does not work: plain torch, one row at a time, and slow."""

import torch

from models.attention.backend import BACKENDS, AttentionMetaData
from models.attention.gpu import GPUAttentionBackend
from models.ops import paged_attention
from models.ops.types import AttentionInputs, KVCacheTensor


@BACKENDS.register("torch")
class TorchAttentionBackend(GPUAttentionBackend):
    """The torch reference of the Triton kernels, as a backend. It reads lengths on the host, so graphs cannot capture
    it."""

    name = "torch"

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
        options, sinks, norms, rotation, q_scales = inputs
        q = paged_attention.store(q, k, v, cache, metadata.slot_mapping, options, norms, rotation, q_scales)
        starts, lengths, tables = metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables
        return paged_attention.attend(q, cache, starts, lengths, tables, options, sinks)

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> None:
        """None, since graphs cannot capture this backend."""
