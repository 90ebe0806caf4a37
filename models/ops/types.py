"""Types that layers and operators exchange: activations, caches, and attention's options, norms and rotations.

It imports only torch, so that both operators and their callers can import it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from models.ops.cpu.latent_attention import PackedHeads

SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU, RELU_SQUARED, CLIPPED_SILU = range(7)
"""The operators' numbers of a feed-forward layer's activations."""


class Gating(NamedTuple):
    """A gated activation with its parameters."""

    activation: int
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One layer's paged keys and values, of the backend's `kv_cache_shape`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor


@dataclass(frozen=True, slots=True)
class VectorCache:
    """One layer's paged vectors."""

    vectors: torch.Tensor  # [num_blocks, block_size, dim]


@dataclass(frozen=True, slots=True)
class StateCache:
    """One recurrent layer's states, one row per state slot of the worker."""

    tensors: tuple[torch.Tensor, ...]  # each [max_num_seqs, ...]


LayerCache: TypeAlias = KVCacheTensor | VectorCache | StateCache

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a step's positions, from `RotaryEmbedding`. # 2 x [T, 1, rotary_dim] float32"""


class NormWeight(NamedTuple):
    """A norm's parameters: `x / sqrt(mean(x^2) + eps) * (weight + offset) + bias`."""

    weight: torch.Tensor  # [size], or [heads, size] if each head has its own
    eps: float
    offset: float
    """Added to the weight; 1 if the checkpoint stores the weight minus 1."""
    bias: torch.Tensor | None = None  # shape of the weight
    is_centred: bool = False
    """Whether the mean of `x` is subtracted first, as in a layer norm."""


class HeadNorms(NamedTuple):
    """RMS norms of each head's query and key."""

    q: NormWeight
    k: NormWeight


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention."""

    scale: float
    """Factor of the scores."""
    sliding_window: int | None = None
    """Number of tokens to which a query attends, including its own; None for all earlier ones."""
    soft_cap: float | None = None
    """Scores become `soft_cap * tanh(score / soft_cap)`."""
    is_chunked: bool = False
    """Whether a query attends only to the tokens of its own chunk of `sliding_window` positions, up to itself."""
    is_rotated_first: bool = False
    """Whether queries and keys are rotated before their norm instead of after it."""
    k_scale: float = 1.0
    """Factor of keys, or of latents, that are read from an 8-bit cache."""
    v_scale: float = 1.0
    """Factor of values that are read from an 8-bit cache."""


class AttentionInputs(NamedTuple):
    """Inputs of one attention call in addition to queries, keys and values."""

    options: AttentionOptions
    sinks: torch.Tensor | None = None
    """[Hq], logits in the softmax without values."""
    norms: HeadNorms | None = None
    rotation: Rotation | None = None
    """Applied after the norms, or before them with `AttentionOptions.is_rotated_first`."""
    q_scales: torch.Tensor | None = None
    """[T, 1] float32, factors of the queries, applied last."""


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """Norm, rotation and weights that latent attention applies to a step's queries and latents."""

    norm: NormWeight
    """The norm of the latents."""
    rotation: Rotation
    """The rotation of the last dimensions of queries, and of the key that follows each latent."""
    is_interleaved: bool
    """Whether adjacent dimensions are rotated as a pair; otherwise halves are."""
    heads: "PackedHeads | None"
    """`kv_b` in the layout of the CPU operators, if they run."""
