"""OLMo Hybrid: pre-norm layers of gated delta nets, and OLMo 3's post-norm attention layers."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import HybridForCausalLM
from models.architectures.llama import DecoderBody, LlamaMLP, PostNormDecoderLayer, TwoRopesBody
from models.architectures.olmo import HeadsNormAttention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.delta_rule import DeltaMixer, DeltaShape
from models.layers.linear import ColumnParallelLinear
from models.layers.mamba2 import gated_norm
from models.layers.norm import RMSNorm
from models.layers.parameter import WeightPart, empty_parameter, require_shape
from models.ops.norm import add_rows
from models.parallel.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_NORM_EPS = 1e-5
"""Epsilon of the norm of the delta rule's output; it does not follow `rms_norm_eps`."""
_NAMES = MappingProxyType(
    {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
)


class OlmoHybridAttention(HeadsNormAttention):
    """OLMo 3's attention, with or without rotary positions."""

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions: all layers do, unless `rope_theta` is null."""
        del layer
        rope = config.fields.section("rope_parameters") or config.fields.section("rope_scaling")
        fields = rope if rope is not None and "rope_theta" in rope.values else config.fields
        return "rope_theta" not in fields.values or fields.has("rope_theta")


class OlmoHybridDeltaNet(DeltaMixer):
    """A gated delta net whose beta may exceed 1."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        fields, size = config.fields, config.hidden_size
        key_heads = fields.integer("linear_num_key_heads", config.num_attention_heads)
        heads = fields.integer("linear_num_value_heads", config.num_attention_heads)
        if heads % key_heads:
            raise fields.invalid("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
        key_dim = fields.integer("linear_key_head_dim", 3 * size // (4 * key_heads))
        value_dim = fields.integer("linear_value_head_dim", 2 * key_dim)
        taps = fields.integer("linear_conv_kernel_dim", 4, minimum=2)
        most = 2.0 if fields.boolean("linear_allow_neg_eigval", True) else 1.0
        shape = DeltaShape(
            size, key_heads, heads, key_dim, value_dim, taps, decays=1, most=most, activation=config.activation
        )
        super().__init__(f"model.layers.{layer}.linear_attn", shape, parallel)
        self.a_proj = ColumnParallelLinear(size, heads, parallel=parallel)
        self.b_proj = ColumnParallelLinear(size, heads, parallel=parallel)
        self.g_proj = ColumnParallelLinear(size, heads * value_dim, parallel=parallel)
        self.norm_weight = empty_parameter(
            self.heads * value_dim, weight_loader=self._load_norm, sources=({"linear_attn.o_norm.weight": None},)
        )

    def gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DeltaMixer`."""
        return self.a_proj(hidden), self.b_proj(hidden), self.g_proj(hidden)

    def gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `DeltaMixer`."""
        return gated_norm(read, gate, self.norm_weight, self.heads, _NORM_EPS, "after the norm")

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """See `DeltaMixer`; the gated norm too."""
        from models.ops.triton.cases.state_space import GatedNormCase

        yield from super().kernel_cases(dtype, max_tokens)
        features = len(self.norm_weight)
        yield GatedNormCase(features, self.heads, "after the norm", _NORM_EPS, dtype, row=features)

    def _load_norm(self, parameter: nn.Parameter, loaded: torch.Tensor, _part: WeightPart) -> None:
        """Repeat the weight for all heads, which share it."""
        require_shape(loaded, (self.shape.value_dim,))
        parameter.data.copy_(loaded.repeat(self.heads))


class OlmoHybridDecoderLayer(nn.Module):
    """A delta net and a dense network, each with a norm before it and a residual connection."""

    is_local: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.linear_attn = OlmoHybridDeltaNet(config, layer, parallel)
        self.mlp = LlamaMLP(config, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        del cos, sin
        mixed = self.linear_attn(self.input_layernorm(hidden))
        normed, hidden = self.post_attention_layernorm.add_norm(mixed, hidden)
        return add_rows(hidden, self.mlp(normed))


def _complete(fields: Fields) -> Fields:
    """Add the default kinds of layers: one in four has attention, or at least the last one."""
    if fields.has("layer_types"):
        return fields
    count = fields.integer("num_hidden_layers")
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    return Fields({**fields.values, "layer_types": kinds}, fields.where)


@architecture(
    "OlmoHybridForCausalLM",
    ConfigFacts(
        defaults={"rms_norm_eps": 1e-6},
        complete=_complete,
        layer_kinds=frozenset({"linear_attention"}),
        names=_NAMES,
    ),
)
class OlmoHybridForCausalLM(HybridForCausalLM):
    """OLMo Hybrid with its language-model head."""

    renamed_parts: ClassVar[MappingProxyType[str, str]] = _NAMES
    checkpoint_modules: ClassVar[dict[str, str]] = {}
    caching: ClassVar[tuple[type[nn.Module], ...]] = (Attention, OlmoHybridDeltaNet)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        kinds = config.fields.strings("layer_types")
        if "sliding_attention" in kinds:
            raise config.fields.invalid("layer_types", "a list without sliding_attention")

        def make_layer(layer: int) -> nn.Module:
            if kinds[layer] == "linear_attention":
                return OlmoHybridDecoderLayer(config, layer, parallel)
            return PostNormDecoderLayer(config, layer, OlmoHybridAttention, self.feed_forward, parallel)

        return TwoRopesBody(config, make_layer, parallel)
