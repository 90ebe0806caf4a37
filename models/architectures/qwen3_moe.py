"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaMLP
from models.architectures.qwen3 import Qwen3ForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel


@architecture("Qwen3MoeForCausalLM", ConfigFacts(defaults={"max_window_layers": 0, "sliding_window": 4096}))
class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE with its language-model head."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts, or a dense network in some layers."""
        if not is_sparse(config.fields, layer):
            return LlamaMLP(config, parallel)
        return SparseMoE(*routed_experts(config, parallel))


def routed_experts(config: ModelConfig, parallel: TensorParallel) -> tuple[SoftmaxRouter, FusedMoE]:
    """Build a layer's router and experts."""
    fields = config.fields
    # transformers 5 writes the second name.
    num_experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts")
    gate = SoftmaxRouter(
        config.hidden_size,
        num_experts,
        experts_per_token(fields, num_experts),
        renormalize=fields.boolean("norm_topk_prob", False),
    )
    size = fields.integer("moe_intermediate_size")
    activation = gated_activation(config.activation)
    return gate, FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)


def is_sparse(fields: Fields, layer: int) -> bool:
    """Whether the layer has experts: each `decoder_sparse_step`-th one, except those in `mlp_only_layers`."""
    is_due = (layer + 1) % fields.integer("decoder_sparse_step", 1) == 0
    return is_due and layer not in fields.integers("mlp_only_layers")
