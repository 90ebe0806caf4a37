"""LFM2 and LFM3: gated short convolutions and attention, each followed by a dense network or, in larger LFM2 models,
experts.
"""

from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import HybridDecoderLayer, HybridForCausalLM, HybridModel
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM, LlamaMLP, TwoRopesBody
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import parse_rope
from models.layers.linear import ColumnParallelLinear
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter, experts_per_token
from models.layers.short_conv import ShortConv
from models.ops.activation import gate_heads
from models.ops.norm import add_rows
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class Lfm2Attention(LlamaAttention):
    """Grouped-query attention with norms on queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def head_norms(self) -> HeadNorms | None:
        """Norms of queries and keys."""
        return HeadNorms(self.q_norm.operand, self.k_norm.operand)


def _complete(fields: Fields) -> Fields:
    """Add the kinds of layers, and fields under older names."""
    values = {**fields.values, "rms_norm_eps": fields.number("norm_eps", 1e-5)}
    # If a config has both names, transformers reads the old one.
    for old, new in (("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size")):
        if fields.has(old):
            values[new] = values[old]
    if not fields.has("layer_types"):
        layers = range(fields.integer("num_hidden_layers"))
        attending = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else layers
        values["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in layers]
    return Fields(values, fields.where)


def _complete_dense(fields: Fields) -> Fields:
    """Also add the adjusted size of the feed-forward layers, which differs from the size in config.json."""
    fields = _complete(fields)
    size = fields.integer("intermediate_size")
    if fields.boolean("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = fields.integer("block_multiple_of", 256)
            size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
            size = multiple * -(-size // multiple)
    return Fields({**fields.values, "intermediate_size": size}, fields.where)


_ALWAYS_SILU = MappingProxyType({"hidden_act": "silu"})
"""transformers' code does not read the field."""
_DEFAULTS = {
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def _facts(**fields: object) -> dict[str, object]:
    return {**_DEFAULTS, **fields}


@architecture(
    "Lfm2ForCausalLM",
    ConfigFacts(
        fixed=_ALWAYS_SILU,
        defaults=_facts(hidden_size=2560, intermediate_size=12288),
        complete=_complete_dense,
        layer_kinds=frozenset({"conv"}),
    ),
)
class Lfm2ForCausalLM(HybridForCausalLM):
    """LFM2 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "recurrent": "conv",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "final_norm": "embedding_norm",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "down_proj": "w2",
    }
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        **LlamaForCausalLM.packed_modules_mapping,
        "w1": ("gate_up_proj", 0),
        "w3": ("gate_up_proj", 1),
    }
    for _name in ("gate_proj", "up_proj"):
        packed_modules_mapping.pop(_name)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        kinds = fields.strings("layer_types")
        if "sliding_attention" in kinds:
            raise fields.invalid("layer_types", "a list without sliding_attention")
        kernel_size, bias = fields.integer("conv_L_cache", 3), fields.boolean("conv_bias", False)

        def decoder_layer(layer: int) -> nn.Module:
            feed_forward = self.feed_forward(config, layer, parallel)
            if kinds[layer] == "full_attention":
                return HybridDecoderLayer(config, feed_forward, self_attn=Lfm2Attention(config, layer, parallel))
            name = f"model.layers.{layer}.conv"
            conv = ShortConv(name, config.hidden_size, kernel_size, bias=bias, parallel=parallel)
            return HybridDecoderLayer(config, feed_forward, recurrent=conv)

        return HybridModel(config, decoder_layer, parallel)


@architecture(
    "Lfm2MoeForCausalLM",
    ConfigFacts(
        fixed=_ALWAYS_SILU,
        defaults=_facts(
            hidden_size=2048,
            intermediate_size=7168,
            moe_intermediate_size=1792,
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
        ),
        complete=_complete,
        layer_kinds=frozenset({"conv"}),
    ),
)
class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, with its language-model head."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layers, a mixture of experts in the others."""
        fields = config.fields
        if layer < fields.integer("num_dense_layers", minimum=0):
            return LlamaMLP(config, parallel)
        num_experts = fields.integer("num_experts")
        gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            experts_per_token(fields, num_experts),
            renormalize=fields.boolean("norm_topk_prob", True),
            has_correction_bias=fields.boolean("use_expert_bias", True),
            correction_name="expert_bias",
            scaling_factor=fields.number("routed_scaling_factor", 1.0),
        )
        size = fields.integer("moe_intermediate_size")
        names = ExpertNames("w1", "w3", "w2")
        return SparseMoE(gate, FusedMoE(config.hidden_size, size, num_experts, names=names, parallel=parallel))


class Lfm3Attention(Lfm2Attention):
    """LFM2's attention with a gate on the output of each head."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        has_gate = config.fields.boolean("use_attention_gate", True)
        heads = config.num_attention_heads
        self.g_proj = ColumnParallelLinear(config.hidden_size, heads, parallel=parallel) if has_gate else None

    def gated(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, heads, head_dim], [tokens, hidden_size] -> [tokens, heads, head_dim]"""
        return attended if self.g_proj is None else gate_heads(attended, self.g_proj(hidden))


class Lfm3DecoderLayer(nn.Module):
    """A short convolution or attention, then a dense network, each with a norm before and optionally after it."""

    def __init__(self, config: ModelConfig, layer: int, conv: ShortConv | None, parallel: TensorParallel) -> None:
        super().__init__()
        self.is_local = config.sliding_windows[layer] is not None
        self.conv = conv
        self.self_attn = Lfm3Attention(config, layer, parallel) if conv is None else None
        self.feed_forward = LlamaMLP(config, parallel)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.operator_norm, self.ffn_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        is_between = config.fields.boolean("use_sandwich_norm", True)
        self.post_operator_norm = RMSNorm(size, eps) if is_between else None
        self.post_ffn_norm = RMSNorm(size, eps) if is_between else None

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        normed = self.operator_norm(hidden)
        mixed: torch.Tensor
        if self.conv is not None:
            mixed = self.conv(normed)
        else:
            assert self.self_attn is not None, "a layer is a convolution or attends"
            mixed = self.self_attn(normed, cos, sin)
        hidden = _added(self.post_operator_norm, mixed, hidden)
        return _added(self.post_ffn_norm, self.feed_forward(self.ffn_norm(hidden)), hidden)


def _added(norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return `residual` plus `x`, normalised if there is a norm; may overwrite `residual`. # [tokens, hidden_size]
    each"""
    return add_rows(residual, x) if norm is None else norm.norm_add(x, residual)


_LFM3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def _complete_lfm3(fields: Fields) -> Fields:
    """Add the kinds of layers, and the epsilon under its common name."""
    values = {"rope_parameters": _LFM3_ROPES, **fields.values, "rms_norm_eps": fields.number("norm_eps", 1e-5)}
    if not fields.has("layer_types"):
        kinds = {0: "sliding_attention", 2: "full_attention"}
        layers = range(fields.integer("num_hidden_layers"))
        values["layer_types"] = [kinds.get(layer % 4, "conv") if layer else "conv" for layer in layers]
    return Fields(values, fields.where)


@architecture(
    "Lfm3ForCausalLM",
    ConfigFacts(
        fixed=_ALWAYS_SILU,
        defaults={
            **_DEFAULTS,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "sliding_window": 256,
        },
        complete=_complete_lfm3,
        layer_kinds=frozenset({"conv"}),
    ),
)
class Lfm3ForCausalLM(Lfm2ForCausalLM):
    """LFM3 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "norm": "embedding_norm",
        "q_norm": "q_norm",
        "down_proj": "w2",
        "g_proj": "gate_proj",
    }
    renamed_parts: ClassVar[dict[str, str]] = {"g_proj": "gate_proj"}
    """Module name of transformers' model, which adapters use -> its name in checkpoints."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        kinds = fields.strings("layer_types")
        kernel_size, bias = fields.integer("conv_L_cache", 7), fields.boolean("conv_bias", False)

        def make_layer(layer: int) -> nn.Module:
            name, size, conv = f"model.layers.{layer}.conv", config.hidden_size, None
            if kinds[layer] == "conv":
                conv = ShortConv(name, size, kernel_size, bias=bias, parallel=parallel)
            return Lfm3DecoderLayer(config, layer, conv, parallel)

        by_kind = fields.section("rope_parameters")
        local = None if by_kind is None else by_kind.section("sliding_attention")
        rope = None
        if local is not None:
            length = fields.integer("max_position_embeddings")
            rope = parse_rope(fields, head_dim=config.head_dim, max_position_embeddings=length, parameters=local)
        return TwoRopesBody(config, make_layer, parallel, local_rope=rope)
