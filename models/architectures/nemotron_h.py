"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, a dense network, or
experts."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig, activation_of
from models.architectures.hybrid import (
    HybridForCausalLM,
    HybridModel,
    OnePartDecoderLayer,
    require_divisor,
    with_kv_heads,
)
from models.architectures.llama import DecoderBody, LlamaAttention, PlainMLP
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.linear import ColumnParallelLinear
from models.layers.mamba2 import Mamba2Mixer, Mamba2Options, Mamba2Shape
from models.layers.moe import ExpertNames, FusedMoE
from models.layers.parameter import WeightPart
from models.layers.routing import GroupedRouter, experts_per_token, groups_of_experts
from models.ops.activation import ACTIVATIONS, activate
from models.ops.scale import scale
from models.parallel.tensor_parallel import TensorParallel

_KINDS = {
    "M": "linear_attention",
    "E": "moe",
    "*": "full_attention",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""transformers' current names of kinds of layers, by the letter in `hybrid_override_pattern` or the earlier name."""
_PREFIX = "backbone."
_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


class NemotronHAttention(LlamaAttention):
    """Grouped-query attention without positions."""

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions: no layer does."""
        del config, layer
        return False


class _PartialProjection(ColumnParallelLinear):
    """A whole projection of each rank's partial sum, whose results are summed over the ranks with one bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self._is_first = parallel.rank == 0

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        if parameter is self.bias and not self._is_first:
            loaded = torch.zeros_like(loaded)
        super()._load(parameter, loaded, part)


class NemotronHExperts(nn.Module):
    """Routed experts, which may read and write a smaller latent vector, and a shared expert."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        fields = config.fields
        num_experts = fields.integer("n_routed_experts")
        num_groups, top_groups = groups_of_experts(fields, num_experts, corrected=True)
        self.gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            experts_per_token(fields, num_experts // num_groups * top_groups),
            renormalize=fields.boolean("norm_topk_prob", True),
            num_groups=num_groups,
            top_groups=top_groups,
            scaling_factor=fields.number("routed_scaling_factor", 1.0),
        )
        latent = fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None
        size = config.hidden_size if latent is None else latent
        self.experts = FusedMoE(
            size,
            fields.integer("moe_intermediate_size"),
            num_experts,
            activation=partial(activate, activation=ACTIVATIONS[config.activation]),
            names=ExpertNames(gate=None, stacked_gate_up="experts.up_proj"),
            parallel=parallel,
        )
        self.shared_experts = PlainMLP(
            config,
            parallel,
            intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
            reduces=False,
        )
        self.parallel = parallel
        self.fc1_latent_proj: ColumnParallelLinear | None = None
        self.fc2_latent_proj: _PartialProjection | None = None
        if latent is not None:  # Replicated, since each rank's shard of an expert reads the whole latent vector.
            self.fc1_latent_proj = ColumnParallelLinear(config.hidden_size, latent, bias=config.mlp_bias)
            self.fc2_latent_proj = _PartialProjection(
                latent, config.hidden_size, bias=config.mlp_bias, parallel=parallel
            )
            # The projection is linear, so the ranks' sum comes after it, once for routed and shared experts.
            self.experts.reduces = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        weights, ids = self.gate(hidden)
        shared: torch.Tensor = self.shared_experts(hidden)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return self.experts(hidden, weights, ids, shared)  # type: ignore[no-any-return]
        routed = self.experts(self.fc1_latent_proj(hidden), weights, ids)
        return self.parallel.all_reduce(scale(self.fc2_latent_proj(routed), 1.0, shared))


def _complete(fields: Fields) -> Fields:
    """Add the kinds of layers by their current names, and the number of layers, which is the length of that list."""
    values = dict(fields.values)
    # If a config has both names, transformers reads the old one.
    values |= {new: values[old] for old, new in _OLD_NAMES.items() if fields.has(old)}
    kinds = list(fields.strings("layers_block_type") or fields.strings("layer_types"))
    if not kinds:
        pattern = fields.string("hybrid_override_pattern", "ME*-")
        if not pattern or not set(pattern) <= set("ME*-"):
            raise fields.invalid("hybrid_override_pattern", "a string of the letters M, E, * and -")
        kinds = list(pattern)
    values["layer_types"] = [_KINDS.get(kind, kind) for kind in kinds]
    values["num_hidden_layers"] = len(kinds)
    # Published configs also have `rms_norm_eps`, which transformers does not read.
    values["rms_norm_eps"] = fields.number("layer_norm_epsilon", 1e-5)
    # transformers' class ignores this field and never ties the head to the embedding.
    values["tie_word_embeddings"] = False
    return with_kv_heads(Fields(values, fields.where))


@architecture(
    "NemotronHForCausalLM",
    ConfigFacts(
        defaults={
            "conv_kernel": 4,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "mamba_head_dim": 64,
            "mamba_num_heads": 128,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "n_groups": 8,
            "n_routed_experts": 8,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "ssm_state_size": 128,
            "topk_group": 1,
            "vocab_size": 131072,
        },
        complete=_complete,
        renamed={"num_local_experts": "n_routed_experts"},
        activation=("mlp_hidden_act", "relu2"),
        has_mlp_bias=True,
        layer_kinds=frozenset({"linear_attention", "moe", "mlp"}),
        body_prefix=_PREFIX,
    ),
)
class NemotronHForCausalLM(HybridForCausalLM):
    """Nemotron-H with its language-model head."""

    body_prefix: ClassVar[str] = _PREFIX
    """Prefix of module names in published checkpoints and adapters."""
    checkpoint_modules: ClassVar[dict[str, str]] = {"embed_tokens": "embeddings", "final_norm": "norm_f"}
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
    }

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        config = replace(config, attention_bias=False)  # transformers does not read this field.
        kinds = fields.strings("layer_types")
        if "sliding_attention" in kinds:
            raise fields.invalid("layer_types", "a list without sliding_attention")

        def decoder_layer(layer: int) -> nn.Module:
            kind = kinds[layer]
            if kind == "linear_attention":
                return OnePartDecoderLayer(config, _mamba_mixer(config, layer, parallel))
            if kind == "full_attention":
                return OnePartDecoderLayer(config, NemotronHAttention(config, layer, parallel))
            mixer = NemotronHExperts(config, parallel) if kind == "moe" else PlainMLP(config, parallel)
            return OnePartDecoderLayer(config, mixer)

        return HybridModel(config, decoder_layer, parallel)


def _mamba_mixer(config: ModelConfig, layer: int, parallel: TensorParallel) -> Mamba2Mixer:
    fields = config.fields
    heads, groups = fields.integer("mamba_num_heads"), fields.integer("n_groups")
    require_divisor(fields, "n_groups", groups, "mamba_num_heads", heads)
    has_bias = fields.boolean("use_bias", False)
    least = fields.values.get("time_step_min")
    shape = Mamba2Shape(
        config.hidden_size,
        heads,
        fields.integer("mamba_head_dim"),
        groups,
        fields.integer("ssm_state_size"),
        fields.integer("conv_kernel"),
    )
    options = Mamba2Options(
        in_bias=has_bias,
        out_bias=has_bias,
        conv_bias=fields.boolean("use_conv_bias", True),
        eps=config.rms_norm_eps,
        # transformers reads no other limit of time steps either.
        dt_limits=(0.0 if least == 0 else fields.number("time_step_min", 1e-3), float("inf")),
        activation=activation_of(fields, "mamba_hidden_act", "silu"),
    )
    return Mamba2Mixer(f"model.layers.{layer}.mixer", shape, options, parallel)
