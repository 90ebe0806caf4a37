"""`CausalLM` and `DraftLM`, what the model runner needs of models and drafters, and the caches that layers declare."""

import math
from abc import ABC, abstractmethod
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
    value_dim: int | None = None
    """Elements of a value; None: `head_dim`."""


class VectorCacheSpec(NamedTuple):
    """Paged vectors of tokens, the same on every rank: a compressed latent, an indexer's key, or a window's entry."""

    name: str
    dim: int
    tokens_per_vector: int = 1
    """One vector for each so many tokens, in the block that holds the last of them."""

    def vectors_per_block(self, block_size: int) -> int:
        """The most vectors that end in a block of so many tokens."""
        return -(-block_size // self.tokens_per_vector)


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


class DraftLM(nn.Module, ABC):
    """A model that drafts the tokens of another one, its target.

    Its entry at position `i` has keys and values at the slot of position `i`. A drafter that reads hidden states makes
    that entry of the target's state of position `i` and of token `i + 1`, and what it returns there drafts token
    `i + 2`. One that reads none is a language model of its own: token `i` at position `i` drafts token `i + 1`. To
    draft further, the next position takes the draft as its token and what `forward` returned as its hidden state.
    """

    hidden_layers: tuple[int, ...] = ()
    """The hidden states of the target that `combine` reads, next to each other: `l` is the residual stream that layer
    `l` of the target receives, and -1 is what the target returns, after its final norm."""
    hidden_size: int
    """Features of what `forward` returns."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64, [tokens, hidden_size] -> [tokens, hidden_size]"""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of what `forward` returned. Tokens that it cannot draft have minus infinity.

        # [rows, hidden_size] -> [rows, vocab_size] float32
        """

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as `forward` takes them. # [tokens, features] -> [tokens, hidden_size]"""
        return hidden

    @abstractmethod
    def kv_cache_layers(self) -> list[CacheSpec]:
        """The caches of its layers, first to last."""
