"""Tencent's Hunyuan: norms of queries and keys after the rotation; dense, or with routed and shared experts."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.glm4_moe import corrected_experts
from models.architectures.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.layers.routing import GroupedRouter
from models.ops.activation import gated_activation
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class HunYuanAttention(LlamaAttention):
    """Grouped-query attention with norms of queries and keys after the rotation."""

    is_rotated_first: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def head_norms(self) -> HeadNorms:
        """Norms of queries and keys."""
        return HeadNorms(self.query_layernorm.operand, self.key_layernorm.operand)


class HunYuanMoE(nn.Module):
    """Routed experts and a shared expert."""

    def __init__(self, config: ModelConfig, num_experts: int, top_k: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.gate = GroupedRouter(
            config.hidden_size, num_experts, top_k, renormalize=True, scoring="softmax", has_correction_bias=False
        )
        self.experts = FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            parallel=parallel,
        )
        self.shared_mlp = LlamaMLP(config, parallel, reduces=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        return self.experts(hidden, *self.gate(hidden), self.shared_mlp(hidden))  # type: ignore[no-any-return]


_FACTS = ConfigFacts(
    defaults={"rms_norm_eps": 1e-5},
    renamed={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    has_ntk_alpha=True,
)


@architecture("HunYuanDenseV1ForCausalLM", _FACTS)
class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Hunyuan with its language-model head."""

    attention: ClassVar[type[nn.Module]] = HunYuanAttention


@architecture("HunYuanMoEV1ForCausalLM", _FACTS)
class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """Hunyuan-A13B with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"gate": "gate.wg"}
    """Module of the model -> its name in checkpoints."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        fields = config.fields
        num_experts = _of_layer(fields, "num_experts", layer)
        top_k = _of_layer(fields, "moe_topk", layer)
        if top_k > num_experts:
            raise fields.invalid("moe_topk", f"at most num_experts, {num_experts}")
        return HunYuanMoE(config, num_experts, top_k, parallel)


def _of_layer(fields: Fields, name: str, layer: int) -> int:
    """Read a field that is one number for all layers, or a list with one per layer."""
    if not isinstance(fields.values.get(name), list):
        return fields.integer(name, 1)
    values = fields.integers(name, minimum=1)
    if layer >= len(values):
        raise fields.invalid(name, "a number, or one for each layer")
    return values[layer]


_HY3 = ConfigFacts(
    defaults={
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "routed_scaling_factor": 2.826,
    },
    fixed={"n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None, "topk_group": 1},
    renamed={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    has_mlp_bias=True,
    # Published name -> name in checkpoints that transformers saves.
    names={
        "mlp.router.gate.": "mlp.gate.",
        "mlp.expert_bias": "mlp.e_score_correction_bias",
        ".shared_mlp.": ".shared_experts.",
    },
)


@architecture("HYV3ForCausalLM", _HY3)
class HYV3ForCausalLM(LlamaForCausalLM):
    """Hunyuan 3 with its language-model head."""

    renamed_parts: ClassVar[dict[str, str]] = {".shared_mlp.": ".shared_experts."}
    """Adapters may have the names of published checkpoints, too."""
    attention: ClassVar[type[nn.Module]] = Qwen3Attention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layers, routed and shared experts in the others."""
        return corrected_experts(config, layer, parallel, correction_name="e_score_correction_bias")
