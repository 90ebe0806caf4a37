"""What the model runner needs of any model."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import nn


class KVCacheSpec(NamedTuple):
    """One attention layer's part of the KV cache on this rank."""

    name: str
    """`model.layers.N.self_attn`: the layer's key in `ForwardContext.kv_cache_data`."""
    num_kv_heads: int
    head_dim: int


class CausalLM(Protocol):
    """A language model whose attention reads the `ForwardContext`."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states of the step's tokens. # 2 x [tokens] int64 -> [tokens, hidden_size]"""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32"""

    def kv_cache_layers(self) -> list[KVCacheSpec]:
        """The attention layers, first to last."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every weight once."""
