"""Values that layers and operators exchange: activations, caches, and options, norms and rotations of attention.

Imports torch only, so that operators and what calls them can both import it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from models.ops.cpu.latent_attention import PackedHeads

SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU, RELU_SQUARED = range(6)
"""Activations of a feed-forward layer, as the operators number them."""
FP8_GROUP = 128
"""Inputs that share an FP8 weight's scale, where scales are of blocks."""


class Gating(NamedTuple):
    """A gated activation with its parameters."""

    activation: int
    alpha: float = 0.0
    limit: float = 0.0


class RoundedRows(NamedTuple):
    """Rows rounded to a device's FP8, each group of 128 inputs by its largest value."""

    codes: torch.Tensor  # [M, K] FP8
    scales: torch.Tensor  # [M, groups] float32, what the codes are multiplied by

    @classmethod
    def empty(cls, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> "RoundedRows":
        """Memory for rows that a kernel rounds to `dtype`."""
        groups = -(-inputs // FP8_GROUP)
        return cls(
            torch.empty(rows, inputs, dtype=dtype, device=device),
            torch.empty(rows, groups, dtype=torch.float32, device=device),
        )


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
    """A norm's parameters: `x / sqrt(mean(x^2) + eps) * (weight + offset) + bias`."""

    weight: torch.Tensor  # [size], or [heads, size] where each head has its own
    eps: float
    offset: float
    """What is added to the weight: 1 where the checkpoint holds the weight less one."""
    bias: torch.Tensor | None = None  # as the weight
    is_centred: bool = False
    """Whether `x` is first shifted to mean 0, as a layer norm does."""


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, by root mean square."""

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
    is_chunked: bool = False
    """Whether a query sees those tokens of its own chunk of `sliding_window` positions that are not after it."""
    is_rotated_first: bool = False
    """Whether queries and keys are rotated before their norm, not after it."""
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
    """Applied after the norms, unless the options say otherwise."""
    q_scales: torch.Tensor | None = None
    """[T, 1] float32, factors of the queries, applied last."""


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
