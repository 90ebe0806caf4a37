"""`ObservingBackend`: records the attention calls of a model's layers, from which the start derives checks."""

from typing import NamedTuple

import torch

from models.attention.backend import AttentionMetaData
from models.attention.gpu import GPUAttentionBackend
from models.ops.types import AttentionInputs, AttentionOptions, KVCacheTensor, LatentInputs, VectorCache


class Attended(NamedTuple):
    """A layer's call of `forward`."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache: KVCacheTensor
    inputs: AttentionInputs


class AttendedLatents(NamedTuple):
    """A layer's call of `latent_attention`."""

    q: torch.Tensor
    kv_b: torch.Tensor
    cache: VectorCache
    options: AttentionOptions
    inputs: LatentInputs
    num_selected: int | None
    """Columns of the selected positions; None without a selection."""


class Indexed(NamedTuple):
    """A layer's call of `index_top_k`."""

    q: torch.Tensor
    cache: VectorCache
    top_k: int


class ObservingBackend(GPUAttentionBackend):
    """A backend that records calls and returns zeros."""

    name = "observer"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.attended: list[Attended] = []
        self.latents: list[AttendedLatents] = []
        self.indexed: list[Indexed] = []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        del metadata
        self.attended.append(Attended(q, k, v, cache, inputs))
        return q.new_zeros(*q.shape[:2], cache.v_cache.shape[3])

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
        """See `AttentionBackend`."""
        del metadata
        assert inputs is not None, "layers leave norms and rotation to the backend"
        num_selected = None if selected is None else selected.shape[1]
        self.latents.append(AttendedLatents(q, kv_b, cache, options, inputs, num_selected))
        nope = q.shape[2] - (latent.shape[1] - kv_b.shape[2])
        return q.new_zeros(*q.shape[:2], kv_b.shape[1] - nope)

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> None:
        """See `AttentionBackend`. Returns None: the only token of the pass attends to itself."""
        del weights, k, metadata
        self.indexed.append(Indexed(q, cache, top_k))

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> None:
        """None, since nothing is captured."""
