"""Mixtures of experts on Llama's attention: Qwen3-MoE, Mixtral, GLM-4.5."""

from typing import Any

from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_FEW: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_QWEN3_MOE = Family(Qwen3MoeConfig, Qwen3MoeForCausalLM, {"num_experts": 8, **_FEW})
_MIXTRAL = Family(MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "intermediate_size": 48})
_GLM4_MOE = Family(
    Glm4MoeConfig, Glm4MoeForCausalLM, {"n_routed_experts": 8, "num_nextn_predict_layers": 0, "head_dim": 16, **_FEW}
)

VARIANTS = [
    Variant("Qwen3MoeForCausalLM", "weights as the router gives them", _QWEN3_MOE, {}),
    Variant(
        "Qwen3MoeForCausalLM",
        "three of nine experts, weights normalised, tied",
        _QWEN3_MOE,
        {"num_experts": 9, "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    Variant(
        "Qwen3MoeForCausalLM",
        "every other layer dense, one more by name, biases",
        _QWEN3_MOE,
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    Variant(
        "Qwen3MoeForCausalLM",
        "sliding window, three query heads a KV head",
        _QWEN3_MOE,
        {"use_sliding_window": True, "sliding_window": 20, "num_attention_heads": 6, "norm_topk_prob": True},
    ),
    Variant("MixtralForCausalLM", "two of four experts", _MIXTRAL, {}),
    Variant("MixtralForCausalLM", "sliding window", _MIXTRAL, {"sliding_window": 24, "num_key_value_heads": 1}),
    Variant(
        "MixtralForCausalLM",
        "every expert, tied, heads of 24",
        _MIXTRAL,
        {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 24, "tie_word_embeddings": True},
    ),
    Variant("Glm4MoeForCausalLM", "half of a head rotated, first layer dense", _GLM4_MOE, {}),
    Variant(
        "Glm4MoeForCausalLM",
        "norms on heads, biases, weights scaled",
        _GLM4_MOE,
        {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5, "num_attention_heads": 6},
    ),
    Variant(
        "Glm4MoeForCausalLM",
        "two of four groups, two shared experts, no dense layer, tied",
        _GLM4_MOE,
        {
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Glm4MoeForCausalLM",
        "a quarter of a head rotated, weights not normalised",
        _GLM4_MOE,
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 3,
        },
    ),
]
