"""`CausalLM`, what the model runner needs of any model, and the caches that layers declare."""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import nn


class KVCacheSpec(NamedTuple):
    """An attention layer's paged keys and values on this rank."""

    name: str
    """`model.layers.N.self_attn`: the layer's key in `ForwardContext.kv_cache_data`."""
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """The number of tokens that a query sees, its own included; None: all before it."""


class VectorCacheSpec(NamedTuple):
    """One paged vector per token, the same on every rank: a compressed latent, or an indexer's key."""

    name: str
    dim: int


class StateCacheSpec(NamedTuple):
    """A recurrent layer's state, one for each running sequence, which sequences cannot share."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the state's tensors, for one sequence."""
    dtypes: tuple[torch.dtype | None, ...]
    """The dtype of each; None: the model's."""

    def bytes_per_sequence(self, model_dtype: torch.dtype) -> int:
        """Bytes of one sequence's state."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * (dtype or model_dtype).itemsize for shape, dtype in pairs)


CacheSpec: TypeAlias = KVCacheSpec | VectorCacheSpec | StateCacheSpec


class CausalLM(Protocol):
    """A language model whose attention reads the `ForwardContext`."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states of the step's tokens. # 2 x [tokens] int64 -> [tokens, hidden_size]"""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [rows, hidden_size] -> [rows, vocab_size] float32"""

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The caches of the layers, first to last."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every weight once."""
