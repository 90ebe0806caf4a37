"""Kimi Linear: delta rule with a decay per key dimension, latent attention without positions, and experts."""

from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.deepseek_v2 import is_sparse, mla_shape
from models.architectures.hybrid import HybridDecoderLayer, HybridForCausalLM, HybridModel
from models.architectures.llama import DecoderBody, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.delta_rule import DeltaMixer, DeltaShape
from models.layers.linear import ColumnParallelLinear
from models.layers.mla import MLAAttention
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter, experts_per_token, groups_of_experts
from models.ops.activation import gate_heads, gated_activation
from models.parallel.tensor_parallel import TensorParallel

_NAMES = MappingProxyType({".block_sparse_moe.": ".mlp.", ".forget_gate.": "."})
"""Parts of module names in published checkpoints and in transformers' adapters -> the model's."""

_SECTION = (("head_dim", "head_dim"), ("num_heads", "num_heads"), ("short_conv_kernel_size", "conv_kernel_dim"))
"""Fields of `linear_attn_config`, and transformers' names of them without the prefix `linear_`."""

RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Fields of published configs -> the model's."""


class KimiLatentAttention(MLAAttention):
    """Latent attention of the sizes in a config."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(f"model.layers.{layer}.self_attn", mla_shape(config), parallel=parallel)


class KimiDeltaAttention(DeltaMixer):
    """The delta rule with a decay for each dimension of a key, and gates of low rank (Kimi Linear, 2025)."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        fields = config.fields
        heads, dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        taps, size = fields.integer("linear_conv_kernel_dim", minimum=2), config.hidden_size
        bound, activation = self.bound(fields), config.activation
        shape = DeltaShape(
            size, heads, heads, dim, dim, taps, decays=dim, most=1.0, bound=bound, activation=activation
        )
        super().__init__(f"model.layers.{layer}.self_attn", shape, parallel)
        self.f_a_proj, self.g_a_proj = ColumnParallelLinear(size, dim), ColumnParallelLinear(size, dim)
        self.f_b_proj = ColumnParallelLinear(dim, heads * dim, parallel=parallel)
        self.g_b_proj = ColumnParallelLinear(dim, heads * dim, parallel=parallel)
        self.b_proj = ColumnParallelLinear(size, heads, parallel=parallel)
        self.o_norm = RMSNorm(dim, config.rms_norm_eps)

    @staticmethod
    def bound(fields: Fields) -> float:
        """Return the bound of decays, see `DeltaShape`; 0 if they have none."""
        del fields
        return 0.0

    def gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DeltaMixer`."""
        decays, gate = self.f_b_proj(self.f_a_proj(hidden)), self.g_b_proj(self.g_a_proj(hidden))
        return decays, self.b_proj(hidden), gate

    def gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `DeltaMixer`."""
        by_head = len(read), self.heads, self.shape.value_dim
        return gate_heads(self.o_norm(read.view(by_head)), gate.view(by_head)).view(len(read), -1)


def _complete(fields: Fields) -> Fields:
    """Add kinds of layers and sizes of the delta rule, which published configs have in `linear_attn_config`."""
    values = dict(fields.values)
    section = fields.section("linear_attn_config")
    if section is not None:
        for old, new in _SECTION:
            if section.has(old):
                values[f"linear_{new}"] = section.values[old]
    if not fields.has("layer_types"):
        layers = range(fields.integer("num_hidden_layers"))
        attends = [layer > 0 and layer % 4 == 0 for layer in layers]
        if section is not None and section.has("full_attn_layers"):
            attending = section.integers("full_attn_layers", minimum=1)  # Layers are numbered from 1.
            attends = [layer + 1 in attending for layer in layers]
        values["layer_types"] = ["full_attention" if each else "linear_attention" for each in attends]
    # transformers' class ignores this field and never ties the head to the embedding.
    values["tie_word_embeddings"] = False
    return Fields(values, fields.where)


@architecture(
    "KimiLinearForCausalLM",
    ConfigFacts(
        defaults={
            "first_k_dense_replace": 1,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "n_group": 1,
            "n_shared_experts": 1,
            "rope_interleave": False,
            "rms_norm_eps": 1e-5,
            "topk_group": 1,
        },
        complete=_complete,
        renamed=RENAMED,
        head_dim_field="qk_rope_head_dim",
        layer_kinds=frozenset({"linear_attention"}),
        names=_NAMES,
    ),
)
class KimiLinearForCausalLM(HybridForCausalLM):
    """Kimi Linear with its language-model head."""

    renamed_parts: ClassVar[MappingProxyType[str, str]] = _NAMES
    checkpoint_modules: ClassVar[dict[str, str]] = {
        "recurrent": "self_attn",
        "feed_forward": "mlp",
        "final_norm": "norm",
    }
    caching: ClassVar[tuple[type[nn.Module], ...]] = (MLAAttention, KimiDeltaAttention)
    attention: ClassVar[type[nn.Module]] = KimiLatentAttention
    delta_attention: ClassVar[type[nn.Module]] = KimiDeltaAttention
    """The class of recurrent layers, called with config, layer and parallel."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        # Latent attention here has no positions: 0 turning pairs give frequencies of 0, which rotate nothing.
        config = replace(config, rope=replace(config.rope, rope_type="proportional", turning_pairs=0))
        return self.hybrid_body(config, parallel)

    def hybrid_body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body whose layers are latent or recurrent by `layer_types`."""
        kinds = config.fields.strings("layer_types")

        def decoder_layer(layer: int) -> nn.Module:
            feed_forward = self.feed_forward(config, layer, parallel)
            if kinds[layer] == "full_attention":
                return HybridDecoderLayer(config, feed_forward, self_attn=self.attention(config, layer, parallel))
            return HybridDecoderLayer(config, feed_forward, recurrent=self.delta_attention(config, layer, parallel))

        return HybridModel(config, decoder_layer, parallel)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed and shared experts in sparse layers, a dense network in the others."""
        fields = config.fields
        if not is_sparse(fields, layer):
            return LlamaMLP(config, parallel)
        if fields.string("moe_router_activation_func", "sigmoid") != "sigmoid":
            raise fields.invalid("moe_router_activation_func", '"sigmoid"')
        size, num_experts = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
        num_groups, top_groups = groups_of_experts(fields, num_experts, corrected=True)
        gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            experts_per_token(fields, num_experts // num_groups * top_groups),
            renormalize=fields.boolean("norm_topk_prob", True),
            num_groups=num_groups,
            top_groups=top_groups,
            scaling_factor=fields.number("routed_scaling_factor", 2.446),
        )
        shared = LlamaMLP(config, parallel, intermediate_size=size * fields.integer("n_shared_experts"), reduces=False)
        activation, names = gated_activation(config.activation), ExpertNames("w1", "w3", "w2")
        experts = FusedMoE(
            config.hidden_size, size, num_experts, activation=activation, names=names, parallel=parallel
        )
        return SparseMoE(gate, experts, shared)
