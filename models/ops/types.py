"""Values that layers and operators exchange: activations, caches, and options, norms and rotations of attention.

Imports torch only, so that operators and what calls them can both import it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from models.ops.cpu.latent_attention import PackedHeads

SILU, GELU_TANH, CLAMPED_SILU = range(3)
"""Activations of a gated feed-forward layer, as the operators number them."""
FP8_GROUP = 128
"""Inputs that share an FP8 weight's scale, where scales are of blocks."""


class Gating(NamedTuple):
    """A gated activation with its parameters."""

    activation: int
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One layer's paged cache, in the shape of the backend's `kv_cache_shape`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor


@dataclass(frozen=True, slots=True)
class VectorCache:
    """One layer's paged vectors."""

    vectors: torch.Tensor  # [num_blocks, block_size, dim]


@dataclass(frozen=True, slots=True)
class StateCache:
    """One recurrent layer's state, a row a slot of the worker."""

    tensors: tuple[torch.Tensor, ...]  # each [max_num_seqs, ...]


LayerCache: TypeAlias = KVCacheTensor | VectorCache | StateCache

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a step's positions, of `RotaryEmbedding`. # 2 x [T, 1, rotary_dim] float32"""


class NormWeight(NamedTuple):
    """What a root-mean-square norm multiplies by: `x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

    weight: torch.Tensor  # [size]
    eps: float
    offset: float
    """What is added to the weight: 1 where the checkpoint holds the weight less one."""


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, before they are rotated."""

    q: NormWeight
    k: NormWeight


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends."""

    scale: float
    """Factor of the scores."""
    sliding_window: int | None = None
    """Tokens that a query sees, its own included; None: all before it."""
    soft_cap: float | None = None
    """Scores become `soft_cap * tanh(score / soft_cap)`."""
    k_scale: float = 1.0
    """What keys, or latents, in an 8-bit cache are multiplied by."""
    v_scale: float = 1.0
    """What values in it are multiplied by."""


class AttentionInputs(NamedTuple):
    """How one call attends, and what is done to its queries and keys before."""

    options: AttentionOptions
    sinks: torch.Tensor | None = None
    """[Hq], logits that take part in the softmax and have no value."""
    norms: HeadNorms | None = None
    rotation: Rotation | None = None
    """Applied after the norms."""


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """What is done to a step's queries and latents before they meet, and with which weights."""

    norm: NormWeight
    """The norm of the latents."""
    rotation: Rotation
    """Rotates the last dimensions of queries, and the key that follows each latent."""
    is_interleaved: bool
    """Whether rotated dimensions are neighbouring pairs, not halves."""
    heads: "PackedHeads | None"
    """`kv_b` as the CPU's operators read it, where they run."""
