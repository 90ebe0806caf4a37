"""MiniMax-Text-01 and M1: lightning or softmax attention, experts, and residual connections from normalised inputs."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import HybridForCausalLM, HybridModel
from models.architectures.llama import DecoderBody, LlamaAttention
from models.architectures.mixtral import MixtralForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.attention.context import between_graphs, get_forward_context
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.base import StateCacheSpec
from models.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from models.layers.lora import OutputPart, Span
from models.layers.mamba2 import StateSpaceWeights, state_space
from models.layers.norm import HeadsRMSNorm, RMSNorm
from models.ops.activation import ACTIVATIONS, activate, gate_heads
from models.ops.types import Gating, StateCache
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_NORM_EPS = 1e-6
"""Epsilon of the norm of lightning attention's output; it does not follow `rms_norm_eps`."""


class LightningAttention(nn.Module):
    """Linear attention with a constant decay per head (Qin et al., 2024), a norm and a gate; sharded by head.

    It is computed as a Mamba-2 state space with one group per head, no skip connection, and time steps of 1.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{layer}.self_attn"
        heads, dim, size = config.num_attention_heads, config.head_dim, config.hidden_size
        local = parallel.share(heads, "num_attention_heads")
        first, wide = parallel.rank * local, heads * dim
        self.num_heads, self.head_dim = local, dim
        self.activation = ACTIVATIONS[config.activation]
        # The checkpoint groups q, k and v by head; the state space reads all values, then all keys, then all queries.
        spans = tuple(
            Span(((first + head) * 3 + kind) * dim, dim, (row * local + head) * dim)
            for row, kind in enumerate((2, 1, 0))
            for head in range(local)
        )
        self.qkv_proj = PackedLinear(size, {None: OutputPart(3 * wide, spans)})
        self.output_gate = ColumnParallelLinear(size, wide, parallel=parallel)
        self.norm = HeadsRMSNorm(dim, first, local, heads, _NORM_EPS, parallel)
        self.out_proj = RowParallelLinear(wide, size, parallel=parallel)
        a_log = _log_slopes(heads, layer, config.num_hidden_layers)[first : first + local]
        self.a_log: torch.Tensor
        self.zeros: torch.Tensor
        self.register_buffer("a_log", a_log, persistent=False)
        self.register_buffer("zeros", torch.zeros(local, dtype=torch.float32), persistent=False)
        self.cache_spec = StateCacheSpec(self.layer_name, ((local, dim, dim),), (torch.float32,))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        read = between_graphs(self._remember, activate(self.qkv_proj(hidden), self.activation))
        normed, gate = self.norm(read), self.output_gate(hidden)
        shape = len(hidden), self.num_heads, self.head_dim
        gated = gate_heads(normed.view(shape), gate.view(shape))
        return self.out_proj(gated.view(len(hidden), -1))  # type: ignore[no-any-return]

    def _remember(self, qkv: torch.Tensor) -> torch.Tensor:
        """# [tokens, values, keys and queries] -> [tokens, heads * head_dim]"""
        context = get_forward_context()
        cache = context.kv_cache_data[self.layer_name]
        assert isinstance(cache, StateCache)
        (states,) = cache.tensors
        weights = StateSpaceWeights(self.a_log, self.zeros, self.zeros)
        # Both limits are 1, so every time step is 1, and the input of time steps is irrelevant.
        steps, limits = qkv[:, : self.num_heads], (1.0, 1.0)
        metadata = context.attn_metadata
        return state_space(qkv, steps, weights, states, metadata, groups=self.num_heads, limits=limits)

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the check cases of the activation and of the state space."""
        from models.ops.triton.cases.elementwise import ActivationCase
        from models.ops.triton.cases.state_space import Mamba2Case

        del max_tokens
        heads, dim = self.num_heads, self.head_dim
        yield ActivationCase(3 * heads * dim, Gating(self.activation), dtype, is_gated=False)
        yield Mamba2Case(heads, dim, heads, dim, 0, False, False, "none", 0.0, (1.0, 1.0), dtype)


def _log_slopes(heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """Return the logarithms of the decay rates of a layer's heads. # [heads] float32"""
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))
    factor: float = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return slopes.log() + math.log(factor)


class MiniMaxDecoderLayer(nn.Module):
    """Attention and experts, each after a norm; the residual connection adds `alpha * normed input + beta * output`.

    An RMS norm is invariant to the scale of its input, except for its epsilon: the norm of `alpha * x + beta * y`
    equals that of `x + beta / alpha * y` with the epsilon divided by the square of `alpha`.
    """

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, *, is_linear: bool) -> None:
        super().__init__()
        mixer = LightningAttention if is_linear else LlamaAttention
        self.is_linear = is_linear
        self.self_attn: nn.Module = mixer(config, layer, parallel)
        self.mlp = MixtralForCausalLM.feed_forward(config, layer, parallel)
        alpha, self.attended = _factors(config.fields, "linear_attn" if is_linear else "full_attn")
        before, self.fed_forward = _factors(config.fields, "mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps / (before**2 if layer else 1.0))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps / alpha**2)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors; the next norm adds the first, times a factor, to the second.

        # 2 x [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> 2 x [tokens, hidden_size]
        """
        normed, _ = self.input_layernorm.add_norm(hidden, residual, self.fed_forward)
        attended = self.self_attn(normed) if self.is_linear else self.self_attn(normed, cos, sin)
        normed, _ = self.post_attention_layernorm.add_norm(attended, normed, self.attended)
        return self.mlp(normed), normed


def _factors(fields: Fields, part: str) -> tuple[float, float]:
    """Return `alpha`, the factor of the residual, and `beta / alpha`."""
    alpha, beta = (fields.number(f"{part}_{name}_factor", 1.0) for name in ("alpha", "beta"))
    return alpha, beta / alpha


def _complete(fields: Fields) -> Fields:
    """Add the kinds of layers with Kaon's names."""
    if not fields.boolean("postnorm", True):
        raise fields.invalid("postnorm", "true: residuals are of the normed inputs")
    if fields.integer("shared_intermediate_size", 0, minimum=0):
        raise fields.invalid("shared_intermediate_size", "0: shared experts are not implemented")
    kinds = fields.strings("layer_types")
    if not kinds and fields.has("attn_type_list"):
        attends = fields.integers("attn_type_list")
        if len(attends) != fields.integer("num_hidden_layers") or not set(attends) <= {0, 1}:
            raise fields.invalid("attn_type_list", "a list of 0 (lightning attention) or 1, one per layer")
        kinds = tuple("full_attention" if each else "linear_attention" for each in attends)
    if not kinds:
        layers = range(fields.integer("num_hidden_layers"))
        kinds = tuple("linear_attention" if layer % 2 else "full_attention" for layer in layers)
    if fields.has("sliding_window"):
        kinds = tuple("sliding_attention" if kind == "full_attention" else kind for kind in kinds)
    values = {**fields.values, "layer_types": list(kinds)}
    if not fields.has("attn_type_list"):
        # MiniMax's own code rotates `rotary_dim` dimensions, but transformers' class whole heads.
        values.pop("rotary_dim", None)
    return Fields(values, fields.where)


def _unread(fields: Fields) -> tuple[str, ...]:
    """Return prefixes of unused tensors: buffers that follow from the configuration."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    layers = range(fields.integer("num_hidden_layers"))
    return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in names)


@architecture(
    "MiniMaxForCausalLM",
    ConfigFacts(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        renamed={
            f"layernorm_{old}_{factor}": f"{new}_{factor}_factor"
            for old, new in (
                ("full_attention", "full_attn"),
                ("linear_attention", "linear_attn"),
                ("mlp", "mlp"),
            )
            for factor in ("alpha", "beta")
        },
        complete=_complete,
        has_rotary_dim=True,
        layer_kinds=frozenset({"linear_attention"}),
        unread=_unread,
    ),
)
class MiniMaxForCausalLM(HybridForCausalLM):
    """MiniMax-Text-01 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe", "final_norm": "norm"}
    caching: ClassVar[tuple[type[nn.Module], ...]] = (Attention, LightningAttention)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        kinds = config.fields.strings("layer_types")

        def decoder_layer(layer: int) -> nn.Module:
            return MiniMaxDecoderLayer(config, layer, parallel, is_linear=kinds[layer] == "linear_attention")

        alpha, beta = _factors(config.fields, "mlp")
        model = HybridModel(config, decoder_layer, parallel, residual_multiplier=beta)
        model.final_norm.eps /= alpha**2
        return model
