"""`CausalLM` and `DraftLM`, the interfaces of models and draft models, and the specs of the layers' caches."""

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
    """The attention window in tokens, the query's own included; None for no window."""
    value_dim: int | None = None
    """Elements of a value; None for `head_dim`."""


class VectorCacheSpec(NamedTuple):
    """Paged vectors, replicated on every rank: a compressed latent, an indexer's key, or a window's entry."""

    name: str
    dim: int
    tokens_per_vector: int = 1
    """Number of tokens per vector; the vector is in the block that holds the last of them."""
    is_latent: bool = False
    """Whether all heads attend to the vectors by `AttentionBackend.latent_attention`."""

    def vectors_per_block(self, block_size: int) -> int:
        """The most vectors in a block of `block_size` tokens."""
        return -(-block_size // self.tokens_per_vector)


class StateCacheSpec(NamedTuple):
    """A recurrent layer's state: one per running sequence, not shared between sequences."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors of one sequence's state."""
    dtypes: tuple[torch.dtype | None, ...]
    """The dtype of each tensor; None for the model's."""

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
        """The logits. # [rows, hidden_size] -> [rows, vocab_size] float32"""

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of the layers, in order."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights, without duplicates."""


class DraftLM(nn.Module, ABC):
    """A model that drafts tokens for another model, its target.

    Its entry at position `i` has keys and values at the slot of position `i`. A drafter that reads hidden states
    computes this entry from the target's state of position `i` and from token `i + 1`, and its output there drafts
    token `i + 2`. A drafter without hidden states is a complete language model: token `i` at position `i` drafts token
    `i + 1`. To draft further, the next position reads the draft as its token and `forward`'s output as its hidden
    state.
    """

    hidden_layers: tuple[int, ...] = ()
    """The target's hidden states that `combine` reads, concatenated: `l` is the residual stream that is the input of
    the target's layer `l`, and -1 is the target's output after its final norm."""
    hidden_size: int
    """Number of features of `forward`'s output."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The output of each entry. # 2 x [tokens] int64, [tokens, hidden_size] -> [tokens, hidden_size]"""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of `forward`'s output, minus infinity for tokens that the model cannot draft.

        # [rows, hidden_size] -> [rows, vocab_size] float32
        """

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the target's hidden states to `forward`'s input, of which the first features may be left out.

        # [tokens, features] -> [tokens, up to hidden_size]
        """
        return hidden

    @abstractmethod
    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of its layers, in order."""
