"""Recurrent states of transformers' models in Kaon's slots. Used by `TransformersModel`.

transformers' layers take a batch of sequences of one length, with one object that holds their states. A step is
therefore computed in parts: decodes together, one token of each at a time, and each prefill by itself.
`RecurrentStates` splits a step into `Part`s, gives the model the states of a part's sequences, and stores the states
that the model returns. Where transformers keeps states differs between families, which the classes of `_KINDS` hide.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from models.attention.backend import AttentionBatch, AttentionMetaData
from models.attention.context import LoRARows, LoRATokens, get_forward_context
from models.layers.base import StateCacheSpec
from models.layers.recurrent import row_spans, single_tokens
from models.ops.types import StateCache

_NAME = "states"
"""The name of the cache that holds the states of all layers."""


class Part(NamedTuple):
    """Sequences with the same number of tokens in a step, which are computed in one call of the model."""

    tokens: torch.Tensor  # [B, n] int64, their indices in the step
    before: torch.Tensor | None  # [B] int64
    """Index of each initial state; None if sequences begin."""
    after: torch.Tensor  # [B] int64
    """Index at which each final state is stored."""


class _Holder(Protocol):
    """Where a model keeps the states of a batch of sequences. All tensors have the batch as their first dimension."""

    batches: ClassVar[bool] = True
    """Whether the model computes several sequences that continue at once."""

    def __init__(self, body: nn.Module, config: Any) -> None:
        """`body`: the module that `serves` accepted; `config`: its text configuration."""

    @staticmethod
    def serves(body: nn.Module, config: Any) -> bool:
        """Whether the model keeps its states here."""
        raise NotImplementedError

    def give(self, states: list[torch.Tensor] | None) -> dict[str, Any]:
        """Return the model's arguments for sequences with these states; None for sequences that begin."""
        raise NotImplementedError

    def take(self, output: Any) -> list[torch.Tensor]:
        """Return the states after a call of the model, whose result is `output`."""
        raise NotImplementedError


class _Unstored(DynamicCache):  # type: ignore[misc]
    """transformers' cache without keys and values, which `PagedAttention` stores."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs."""
        return key_states, value_states


class _CacheStates(_Holder):
    """States in the layers of transformers' common cache."""

    def __init__(self, body: nn.Module, config: Any) -> None:
        self._config = config
        is_mamba = "past_key_values" not in inspect.signature(body.forward).parameters
        self._argument = "cache_params" if is_mamba else "past_key_values"
        self._cache = _Unstored(config=config)
        self._layout: list[tuple[int, bool, int]] = []
        """Layer, whether the state is a convolution's, and index among the layer's states of this kind."""
        self._shapes: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = []

    @staticmethod
    def serves(_body: nn.Module, config: Any) -> bool:
        """Whether transformers makes a cache with states for this configuration."""
        kinds = getattr(config, "layer_types", None) or ()
        return bool({"conv", "linear_attention", "hybrid", "hybrid_sliding"} & set(kinds)) and any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers
        )

    def give(self, states: list[torch.Tensor] | None) -> dict[str, Any]:
        """See `_Holder`."""
        self._cache = _Unstored(config=self._config)
        # Without this, the first tokens of a short sequence would define the width of a convolution's state.
        given = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._shapes]
        for (index, is_convolution, state), tensor in zip(self._layout, states or given, strict=True):
            layer = cast(Any, self._cache.layers[index])
            layer.has_previous_state[state] = states is not None
            layer.device, layer.dtype = tensor.device, tensor.dtype
            if is_convolution:
                layer.conv_states[state], layer.is_conv_states_initialized[state] = tensor, True
                layer.conv_kernel_size[state] = tensor.shape[-1]
            else:
                layer.recurrent_states[state], layer.is_recurrent_states_initialized[state] = tensor, True
        return {self._argument: self._cache, "use_cache": True}

    def take(self, _output: Any) -> list[torch.Tensor]:
        """See `_Holder`. The first call finds out which layers have states."""
        layers = cast(Any, self._cache.layers)
        if not self._layout:
            for index, layer in enumerate(layers):
                if isinstance(layer, LinearAttentionCacheLayerMixin):
                    kinds = ((True, layer.conv_states), (False, layer.recurrent_states))
                    self._layout += [
                        (index, is_convolution, state)
                        for is_convolution, tensors in kinds
                        for state, tensor in tensors.items()
                        if tensor is not None
                    ]
        found = [
            (layers[index].conv_states if is_convolution else layers[index].recurrent_states)[state]
            for index, is_convolution, state in self._layout
        ]
        self._shapes = [((1, *tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in found]
        return found


class _ListStates(_Holder):
    """RWKV's list of states, an argument and a result of the model."""

    batches = False  # The states of several sequences would be broadcast to all of them.

    @staticmethod
    def serves(body: nn.Module, _config: Any) -> bool:
        """Whether the model has such an argument."""
        return "state" in inspect.signature(body.forward).parameters

    def give(self, states: list[torch.Tensor] | None) -> dict[str, Any]:
        """See `_Holder`."""
        return {"state": states, "use_cache": True}

    def take(self, output: Any) -> list[torch.Tensor]:
        """See `_Holder`."""
        return list(output.state)


class _XlstmStates(_Holder):
    """xLSTM's cache, whose `rnn_state` has a tuple of states for each layer."""

    def __init__(self, _body: nn.Module, _config: Any) -> None:
        self._cache: Any = None

    @staticmethod
    def serves(body: nn.Module, _config: Any) -> bool:
        """Whether the model takes such a cache."""
        return "cache_params" in inspect.signature(body.forward).parameters

    def give(self, states: list[torch.Tensor] | None) -> dict[str, Any]:
        """See `_Holder`."""
        if states is None:
            return {"cache_params": None, "use_cache": True}
        cache, left = copy.copy(self._cache), iter(states)
        cache.rnn_state = {layer: tuple(next(left) for _ in own) for layer, own in self._cache.rnn_state.items()}
        return {"cache_params": cache, "use_cache": True}

    def take(self, output: Any) -> list[torch.Tensor]:
        """See `_Holder`."""
        self._cache = output.cache_params
        return [state for own in self._cache.rnn_state.values() for state in own]


class _ModuleStates(_Holder):
    """RecurrentGemma's states, attributes of its layers."""

    _ATTRIBUTES = ("conv1d_state", "recurrent_states")

    def __init__(self, body: nn.Module, config: Any) -> None:
        self._config = config
        self._owners = [
            (module, name) for module in body.modules() for name in self._ATTRIBUTES if name in vars(module)
        ]
        self._initial: list[torch.Tensor] | None = None

    @staticmethod
    def serves(body: nn.Module, _config: Any) -> bool:
        """Whether layers have such attributes."""
        return any(name in vars(module) for module in body.modules() for name in _ModuleStates._ATTRIBUTES)

    def give(self, states: list[torch.Tensor] | None) -> dict[str, Any]:
        """See `_Holder`."""
        given: Sequence[torch.Tensor | None] = states or self._initial or [None] * len(self._owners)
        for (module, name), state in zip(self._owners, given, strict=True):
            setattr(module, name, state)
        return {"past_key_values": _Unstored(config=self._config), "use_cache": True}

    def take(self, _output: Any) -> list[torch.Tensor]:
        """See `_Holder`."""
        found = [cast(torch.Tensor, getattr(module, name)) for module, name in self._owners]
        self._initial = [torch.zeros_like(state[:1]) for state in found]
        return found


_KINDS: tuple[type[_Holder], ...] = (_ModuleStates, _ListStates, _CacheStates, _XlstmStates)


class RecurrentStates:
    """The states of a model's layers, which are read from and written to Kaon's slots."""

    def __init__(self, holder: _Holder) -> None:
        self._holder = holder
        self.by_token = False
        """Whether a prefill that continues a sequence is computed token by token, since the model would compute
        several tokens at once from an empty state."""
        self._spec: StateCacheSpec | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "RecurrentStates | None":
        """Return the states of a model of transformers, or None if it has none."""
        body = cast(nn.Module, getattr(model, cast(Any, model).base_model_prefix, model))
        config = cast(Any, model).config.get_text_config(decoder=True)
        holder = next((kind(body, config) for kind in _KINDS if kind.serves(body, config)), None)
        return None if holder is None else cls(holder)

    @property
    def spec(self) -> StateCacheSpec:
        """The cache of the states of all layers."""
        assert self._spec is not None
        return self._spec

    def watched(self) -> dict[str, Any]:
        """Return the model's arguments for the recorded pass over one sequence."""
        return self._holder.give(None)

    def record(self, output: Any) -> None:
        """Take the shapes of states from the result of the recorded pass."""
        states = self._holder.take(output)
        shapes = tuple(tuple(state.shape[1:]) for state in states)
        self._spec = StateCacheSpec(_NAME, shapes, tuple(state.dtype for state in states))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the current step. While the caller uses one, the forward context is that of the part."""
        metadata = get_forward_context().attn_metadata
        every = torch.arange(len(metadata.slot_mapping), device=metadata.slot_mapping.device)
        for tokens, before, after in single_tokens(metadata):
            size = len(after) if self._holder.batches else 1
            rows = zip(*(torch.split(each, size) for each in (every[tokens], before, after)), strict=True)
            yield from (Part(own[:, None], states, stored) for own, states, stored in rows)
        for slot, span, is_first in row_spans(metadata):
            state = every.new_tensor([slot])
            if is_first or not self.by_token:
                yield Part(every[None, span], None if is_first else state, state)
            else:
                yield from (Part(token[None, None], state, state) for token in every[span])

    def read(self, part: Part) -> dict[str, Any]:
        """Return the model's arguments for a part, with its sequences' states."""
        if part.before is None:
            return self._holder.give(None)
        return self._holder.give([tensor[part.before] for tensor in self._cache().tensors])

    def write(self, part: Part, output: Any) -> None:
        """Store the states after a part, whose result is `output`."""
        for tensor, state in zip(self._cache().tensors, self._holder.take(output), strict=True):
            tensor[part.after] = state

    def _cache(self) -> StateCache:
        cache = get_forward_context().kv_cache_data[_NAME]
        assert isinstance(cache, StateCache)
        return cache


@contextmanager
def context_of_part(part: Part, metadata: AttentionMetaData, positions: torch.Tensor) -> Iterator[None]:
    """Within the context, the forward context is that of a part of a step. `positions`: of its tokens. # [B, n]"""
    context = get_forward_context()
    step, adapters = context.context, context.lora
    assert not isinstance(adapters, LoRARows)
    count, length = part.tokens.shape
    lengths = metadata.cu_seqlens_q.diff().long()
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[part.tokens[:, 0]]
    context.context = replace(step, positions=positions.flatten(), batch_size=count)
    context.attn_metadata = metadata.backend.build_metadata(
        AttentionBatch(
            query_lens=np.full(count, length),
            seq_lens=(positions[:, -1] + 1).cpu().numpy(),
            block_tables=metadata.block_tables[rows].cpu().numpy(),
            slot_mapping=metadata.slot_mapping[part.tokens.flatten()].cpu().numpy(),
            num_decodes=count if length == 1 else 0,
        )
    )
    if adapters is not None:
        by_token = torch.zeros_like(metadata.slot_mapping)
        for adapter, tokens in adapters:
            by_token[tokens] = adapter
        own = by_token[part.tokens.flatten()]
        groups = ((adapter, torch.nonzero(own == adapter)[:, 0]) for adapter, _ in adapters)
        context.lora = tuple(LoRATokens(adapter, tokens) for adapter, tokens in groups if len(tokens)) or None
    try:
        yield
    finally:
        context.attn_metadata, context.context, context.lora = metadata, step, adapters
