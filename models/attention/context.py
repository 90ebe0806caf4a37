"""`ForwardContext`: what a step's attention needs besides its activations, and the one sanctioned global.

The model runner sets it with a `with` around the forward pass; attention layers read it. Passing it beside the
arguments keeps the model's signature fixed, which captured graphs rely on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from models.ops.types import LayerCache

if TYPE_CHECKING:
    from models.attention.backend import AttentionBackend
    from models.ops.cpu.structures import Step


@dataclass(slots=True, kw_only=True)
class AttentionMetaData:
    """A step as every layer's attention sees it: B rows, decodes first, of T tokens together."""

    backend: "AttentionBackend"
    cu_seqlens_q: torch.Tensor  # [B + 1] int32, where each row's tokens begin among the T
    seq_lens: torch.Tensor  # [B] int32, tokens attended to, this step's included
    block_tables: torch.Tensor  # [B, max_blocks] int32
    slot_mapping: torch.Tensor  # [T] int64, block * block_size + offset of each token's K and V
    num_decodes: int
    """Leading rows of `query_len` tokens each."""
    query_len: int = 1
    """One token, and as many drafts as are verified with it."""
    slots: torch.Tensor | None = None  # [B] int64, each row's place in the layers' `StateCache`
    step: "Step | None" = None
    """The same as the CPU's operators read it, where they run."""


@dataclass(slots=True)
class Context:
    """The step as the model sees it."""

    positions: torch.Tensor  # [T] int64
    is_prefill: bool
    batch_size: int
    graph_bs: int = 0
    """Rows of the captured graph that replays the step; 0 when it runs eagerly."""
    is_draft: bool = False
    """Whether a draft model runs it."""


@dataclass(slots=True)
class DPMetadata:
    """How many tokens each data-parallel rank computes in this step."""

    num_tokens_across_dp: tuple[int, ...]

    @property
    def max_tokens_across_dp(self) -> int:
        return max(self.num_tokens_across_dp)

    def is_dummy(self, replica: int) -> bool:
        """Whether what a replica computes is nobody's."""
        return not self.num_tokens_across_dp[replica]


@dataclass(slots=True)
class SpecDecodeMetadata:
    """Where a step's draft tokens and their logits are."""

    draft_token_ids: torch.Tensor  # [drafts] int64, of all rows
    target_logits_indices: torch.Tensor  # [drafts] int64, the logits that verify each draft
    bonus_logits_indices: torch.Tensor  # [rows] int64, the logits after a row's last draft


class LoRATokens(NamedTuple):
    """The tokens of a step that use one LoRA adapter."""

    adapter: int
    tokens: slice | torch.Tensor  # [n] int64, their places among the step's


class LoRARows(NamedTuple):
    """Which adapter each token of a captured graph uses: another at each replay."""

    adapters: torch.Tensor  # [T] int64, 0: none


@dataclass(slots=True)
class ForwardContext:
    """Everything about the current step that is not an activation."""

    attn_metadata: AttentionMetaData
    context: Context
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: SpecDecodeMetadata | None = None
    kv_cache_data: dict[str, LayerCache] = field(default_factory=dict)
    """By layer name, `model.layers.N.self_attn`."""
    lora: tuple[LoRATokens, ...] | LoRARows | None = None
    """The tokens by adapter; None where no token of the step uses one."""


_current: ForwardContext | None = None
_kv_cache_data: dict[str, LayerCache] = {}


def set_kv_cache_data(kv_cache_data: dict[str, LayerCache]) -> None:
    """Register the cache that every later context refers to."""
    global _kv_cache_data
    _kv_cache_data = kv_cache_data


def set_forward_context(
    attn_metadata: AttentionMetaData,
    context: Context,
    dp_metadata: DPMetadata | None = None,
    spec_decode_metadata: SpecDecodeMetadata | None = None,
    lora: tuple[LoRATokens, ...] | LoRARows | None = None,
) -> None:
    """Begin a step."""
    global _current
    _current = ForwardContext(attn_metadata, context, dp_metadata, spec_decode_metadata, _kv_cache_data, lora)


def get_forward_context() -> ForwardContext:
    """The step that is running. Raises `RuntimeError` outside one."""
    if _current is None:
        raise RuntimeError("a model was run outside a step; wrap the call in `with forward_context(...)`")
    return _current


def reset_forward_context() -> None:
    """End the step."""
    global _current
    _current = None


@contextmanager
def forward_context(
    attn_metadata: AttentionMetaData,
    context: Context,
    dp_metadata: DPMetadata | None = None,
    spec_decode_metadata: SpecDecodeMetadata | None = None,
    lora: tuple[LoRATokens, ...] | LoRARows | None = None,
) -> Iterator[None]:
    """A step: the context is set inside, and gone afterwards whatever happens."""
    set_forward_context(attn_metadata, context, dp_metadata, spec_decode_metadata, lora)
    try:
        yield
    finally:
        reset_forward_context()
