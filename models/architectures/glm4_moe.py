"""GLM-4.5 and related models: partly rotated heads with optional norms, and grouped experts with shared ones."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter, experts_per_token, groups_of_experts
from models.ops.activation import gated_activation
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class Glm4MoeAttention(LlamaAttention):
    """Grouped-query attention with optional norms of queries and keys."""

    has_output_bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.has_norms = config.fields.boolean("use_qk_norm", False)
        if self.has_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def head_norms(self) -> HeadNorms | None:
        """Norms of queries and keys, where the config has them."""
        return HeadNorms(self.q_norm.operand, self.k_norm.operand) if self.has_norms else None


@architecture(
    "Glm4MoeForCausalLM",
    ConfigFacts(defaults={"n_group": 1, "partial_rotary_factor": 0.5, "topk_group": 1}, rotates_parts=True),
)
class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4.5 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Glm4MoeAttention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layers, experts in the others."""
        fields = config.fields
        if layer < fields.integer("first_k_dense_replace", 1, minimum=0):
            return LlamaMLP(config, parallel)
        num_experts = fields.integer("n_routed_experts")
        num_groups, top_groups = groups_of_experts(fields, num_experts, corrected=True)
        size = fields.integer("moe_intermediate_size")
        gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            experts_per_token(fields, num_experts // num_groups * top_groups),
            renormalize=fields.boolean("norm_topk_prob", True),
            num_groups=num_groups,
            top_groups=top_groups,
            scaling_factor=fields.number("routed_scaling_factor", 1.0),
        )
        num_shared = fields.integer("n_shared_experts", 1)
        shared = LlamaMLP(config, parallel, intermediate_size=size * num_shared, reduces=False)
        activation = gated_activation(config.activation)
        experts = FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)
        return SparseMoE(gate, experts, shared)
