"""The attention backend of GPUs on which Triton does not work: plain torch, a row at a time, and slow."""

from typing import NoReturn

import torch

from models.attention.context import AttentionMetaData
from models.attention.gpu import GPUAttentionBackend
from models.ops import paged_attention as reference
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, LatentInputs, Rotation, VectorCache


class TorchAttentionBackend(GPUAttentionBackend):
    """What the Triton kernels are tested against, as a backend. It reads lengths back, so no graph captures it."""

    name = "torch"

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
        """See `AttentionBackend`. # q [T, Hq, D], k and v [T, Hkv, D], [Hq] -> [T, Hq, D]"""
        q = reference.store(q, k, v, cache, metadata.slot_mapping, options, norms, rotation)
        starts, lengths, tables = metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables
        return reference.attend(q, cache, starts, lengths, tables, options, sinks)

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
    ) -> NoReturn:
        """Raises `ValueError`: latents need Triton on a GPU."""
        raise _needs_triton()

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> NoReturn:
        """Raises `ValueError`: latents need Triton on a GPU."""
        raise _needs_triton()

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> None:
        """None: nothing is captured."""


def _needs_triton() -> ValueError:
    return ValueError("the model attends to latents, which on a GPU needs Triton; repair it, or use device cpu")
