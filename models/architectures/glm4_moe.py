"""GLM-4.5 and related models: partial rotation, optional norms of queries and keys, grouped routed and shared
experts."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.deepseek_v2 import is_sparse
from models.architectures.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter, experts_per_token, groups_of_experts
from models.ops.activation import gated_activation
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class NoOutputBiasAttention(LlamaAttention):
    """Grouped-query attention whose output projection has no bias."""

    has_output_bias: ClassVar[bool] = False


class Glm4MoeAttention(NoOutputBiasAttention):
    """Grouped-query attention with optional norms of queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.has_norms = config.fields.boolean("use_qk_norm", False)
        if self.has_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys, if the config has them."""
        return HeadNorms(self.q_norm.operand, self.k_norm.operand) if self.has_norms else None


_EXPERTS = {"num_local_experts": "n_routed_experts"}


@architecture(
    "Glm4MoeForCausalLM",
    ConfigFacts(
        defaults={"first_k_dense_replace": 1, "n_group": 1, "partial_rotary_factor": 0.5, "topk_group": 1},
        renamed=_EXPERTS,
        rotates_parts=True,
    ),
)
class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4.5 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Glm4MoeAttention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layers, a mixture of experts in the others."""
        return corrected_experts(config, layer, parallel)


def corrected_experts(
    config: ModelConfig, layer: int, parallel: TensorParallel, *, correction_name: str | None = None
) -> nn.Module:
    """Routed experts selected by scores with a correction bias, optional shared experts; a dense network in some
    layers.

    `correction_name`: see `GroupedRouter`.
    """
    fields = config.fields
    if not is_sparse(fields, layer):
        return LlamaMLP(config, parallel)
    num_experts = fields.integer("n_routed_experts")
    num_groups, top_groups = groups_of_experts(fields, num_experts, corrected=True)
    size = fields.integer("moe_intermediate_size")
    gate = GroupedRouter(
        config.hidden_size,
        num_experts,
        experts_per_token(fields, num_experts // num_groups * top_groups),
        renormalize=fields.boolean("norm_topk_prob", True),
        correction_name=correction_name,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    num_shared, shared = fields.integer("n_shared_experts", 1, minimum=0), None
    if num_shared:
        shared = LlamaMLP(config, parallel, intermediate_size=size * num_shared, reduces=False)
    activation = gated_activation(config.activation)
    experts = FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)
    return SparseMoE(gate, experts, shared)


_SOLAR = {
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "intermediate_size": 1,  # Unused: no layer is dense, and config.json lacks the field.
    "n_group": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "topk_group": 1,
}


@architecture("SolarOpenForCausalLM", ConfigFacts(defaults=_SOLAR, renamed=_EXPERTS, rotates_parts=True))
class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Solar Open with its language-model head."""

    attention: ClassVar[type[nn.Module]] = NoOutputBiasAttention
