"""Granite 4: Mamba-2 or attention layers, each followed by a shared network and, in most sizes, experts."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.granite import ABSENT, DEFAULTS, GraniteAttention
from models.architectures.hybrid import (
    LAYER_KINDS,
    MAMBA_DEFAULTS,
    RECURRENT_KINDS,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridModel,
    mamba_mixer,
    mamba_options,
)
from models.architectures.llama import DecoderBody, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.linear import PackedLinear
from models.layers.mamba2 import Mamba2Options, sections_of
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class GraniteHybridAttention(GraniteAttention):
    """Grouped-query attention with the scale of the config, with or without rotary positions."""

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions: all layers do, or none."""
        del layer
        return config.fields.string("position_embedding_type", "nope") == "rope"


class GraniteSharedMLP(LlamaMLP):
    """A gated network without biases, whose gate and up projections are one tensor in checkpoints."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, size: int, *, reduces: bool) -> None:
        super().__init__(replace(config, mlp_bias=False), parallel, intermediate_size=size, reduces=reduces)
        local = parallel.share(size, "shared_intermediate_size")
        section = (size, parallel.rank * local, local)
        self.gate_up_proj = PackedLinear(config.hidden_size, sections_of([section] * 2))


class GraniteDecoderLayer(HybridDecoderLayer):
    """A Mamba-2 mixer or attention, then a shared network and, if the model has them, experts."""

    def __init__(self, config: ModelConfig, layer: int, options: Mamba2Options, parallel: TensorParallel) -> None:
        fields = config.fields
        kinds = fields.strings("layer_types")
        is_recurrent = not kinds or kinds[layer] in RECURRENT_KINDS
        super().__init__(
            config,
            None,
            self_attn=None if is_recurrent else GraniteHybridAttention(config, layer, parallel),
            recurrent=mamba_mixer(config, layer, parallel, options) if is_recurrent else None,
            residual_multiplier=fields.number("residual_multiplier", 1.0),
        )
        num_experts = fields.integer("num_local_experts", 8, minimum=0)
        # If there are experts, their all-reduce also reduces the shared network's partial sums.
        size = fields.integer("shared_intermediate_size", 1024)
        self.shared_mlp = GraniteSharedMLP(config, parallel, size, reduces=not num_experts)
        self.block_sparse_moe = _experts(config, num_experts, parallel) if num_experts else None

    def feed(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        shared: torch.Tensor = self.shared_mlp(hidden)
        moe = self.block_sparse_moe
        return shared if moe is None else moe.experts(hidden, *moe.gate(hidden), shared)


def _experts(config: ModelConfig, num_experts: int, parallel: TensorParallel) -> SparseMoE:
    fields = config.fields.with_defaults({"num_experts_per_tok": 2})
    gate = SoftmaxRouter(config.hidden_size, num_experts, experts_per_token(fields, num_experts), renormalize=True)
    names = ExpertNames(stacked_gate_up="input_linear.weight", stacked_down="output_linear.weight")
    experts = FusedMoE(
        config.hidden_size,
        config.intermediate_size,
        num_experts,
        activation=gated_activation(config.activation),
        names=names,
        parallel=parallel,
    )
    return SparseMoE(gate, experts)


@architecture(
    "GraniteMoeHybridForCausalLM",
    ConfigFacts(
        defaults={
            **MAMBA_DEFAULTS,
            **DEFAULTS,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        absent=ABSENT,
        renamed={"layers_block_type": "layer_types"},
        layer_kinds=LAYER_KINDS,
    ),
)
class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    """Granite 4 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "recurrent": "mamba",
        "final_norm": "norm",
        "gate": "router.layer",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    }

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        self.logit_scale = 1.0 / config.fields.number("logits_scaling", 1.0)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        options = mamba_options(config)

        def decoder_layer(layer: int) -> nn.Module:
            return GraniteDecoderLayer(config, layer, options, parallel)

        return HybridModel(
            config,
            decoder_layer,
            parallel,
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            residual_multiplier=fields.number("residual_multiplier", 1.0),
        )
