"""`ForwardContext`: the inputs of a step's layers other than activations, and the global variable that holds it.

The model runner sets it around the forward pass, and layers read it. It is global so that the model's signature is
fixed, as captured graphs require.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from models.attention.backend import AttentionMetaData
from models.ops.types import LayerCache


class EncoderPrompts(NamedTuple):
    """The prompts of an encoder's step, one after the other; each is computed whole."""

    lengths: list[int]
    is_second: torch.Tensor | None = None  # [T] int64
    """1 for the tokens of a pair's second text; None if there are no pairs."""


@dataclass(slots=True)
class Context:
    """The step's inputs to the model."""

    positions: torch.Tensor  # [T] int64
    is_prefill: bool
    batch_size: int
    graph_bs: int = 0
    """Rows of the captured graph that replays the step; 0 when it runs eagerly."""
    is_draft: bool = False
    """Whether a draft model runs it."""
    prompts: EncoderPrompts | None = None
    """The prompts of an encoder's step."""


@dataclass(slots=True)
class DPMetadata:
    """The number of tokens that each data-parallel replica computes in this step; 0 for a dummy step."""

    num_tokens_across_dp: tuple[int, ...]

    @property
    def max_tokens_across_dp(self) -> int:
        return max(self.num_tokens_across_dp)

    def is_dummy(self, replica: int) -> bool:
        """Whether a replica runs a dummy step, whose results are discarded."""
        return not self.num_tokens_across_dp[replica]


@dataclass(slots=True)
class SpecDecodeMetadata:
    """The draft tokens of a step, and the indices of the logits that verify them."""

    draft_token_ids: torch.Tensor  # [drafts] int64, of all rows
    target_logits_indices: torch.Tensor  # [drafts] int64, the logits that verify each draft
    bonus_logits_indices: torch.Tensor  # [rows] int64, the logits after a row's last draft


class LoRATokens(NamedTuple):
    """The tokens of a step that use one LoRA adapter."""

    adapter: int
    tokens: slice | torch.Tensor  # [n] int64, their indices in the step


class LoRARows(NamedTuple):
    """The adapter of each token of a captured graph, which differs from replay to replay."""

    adapters: torch.Tensor  # [T] int64, 0 for none


OfTokens: TypeAlias = Callable[..., torch.Tensor]
"""Computes output rows of a step's tokens from input rows. # n x [T, ...] or None -> [T, ...]"""
Between: TypeAlias = Callable[[OfTokens, tuple[torch.Tensor | None, ...], tuple[torch.Tensor, ...]], torch.Tensor]
"""Runs a call between captured graphs: see `between_graphs`."""


@dataclass(slots=True)
class ForwardContext:
    """The data of the current step other than activations."""

    attn_metadata: AttentionMetaData
    context: Context
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: SpecDecodeMetadata | None = None
    kv_cache_data: dict[str, LayerCache] = field(default_factory=dict)
    """Each layer's cache by name, `model.layers.N.self_attn`."""
    lora: tuple[LoRATokens, ...] | LoRARows | None = None
    """The tokens of each adapter; None if no token of the step uses one."""
    stream_layers: tuple[int, ...] = ()
    """Indices of the layers whose input residual stream a drafter reads."""
    streams: dict[int, torch.Tensor] = field(default_factory=dict)
    """These residual streams by layer, stored by the model. # each [T, hidden_size]"""
    selected: torch.Tensor | None = None
    """Positions that the latest indexer selected, for layers that reuse them; None for all. # [T, selected] int64"""
    between: Between | None = None
    """Set while a pass is captured in pieces; runs the calls between graphs."""
    thread: int = field(default_factory=threading.get_ident)
    """Id of the thread that runs the step."""


_current: ForwardContext | None = None
_kv_cache_data: dict[str, LayerCache] = {}


def set_kv_cache_data(kv_cache_data: dict[str, LayerCache]) -> None:
    """Set the caches that every later context refers to."""
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
    """The context of the running step. Raises `RuntimeError` outside a step."""
    if _current is None:
        raise RuntimeError("a model was run outside a step; wrap the call in `with forward_context(...)`")
    return _current


def between_graphs(
    call: OfTokens, *tokens: torch.Tensor | None, shared: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """Return `call(*tokens, *shared)`. Where a pass is captured in pieces, the call runs between two graphs.

    Each tensor has a row per token. `call` may read the forward context, but nothing else that differs between steps.
    `shared`: tensors that several layers receive. # n x [T, ...] -> [T, ...]
    """
    between = get_forward_context().between
    return call(*tokens, *shared) if between is None else between(call, tokens, shared)


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
    kv_cache_data: dict[str, LayerCache] | None = None,
    stream_layers: tuple[int, ...] = (),
) -> Iterator[ForwardContext]:
    """A context manager that sets the context of a step. On exit, also after an exception, it restores the context of
    the step that this thread has paused, if any.

    `kv_cache_data` replaces the caches of `set_kv_cache_data`. The input residual streams of the `stream_layers` are
    stored in the context's `streams`.
    """
    global _current
    paused = _current if _current is not None and _current.thread == threading.get_ident() else None
    set_forward_context(attn_metadata, context, dp_metadata, spec_decode_metadata, lora)
    if kv_cache_data is not None:
        get_forward_context().kv_cache_data = kv_cache_data
    context_of_step = get_forward_context()
    context_of_step.stream_layers = stream_layers
    try:
        yield context_of_step
    finally:
        _current = paused
