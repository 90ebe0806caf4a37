"""Qwen3.5, dense and of experts."""

from typing import Any

from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_DENSE = Family(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _SHAPE, norm_mean=0.0)
_MOE = Family(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_SHAPE, **_EXPERTS}, norm_mean=0.0)

VARIANTS = [
    Variant("Qwen3_5ForCausalLM", "one layer in four attends", _DENSE, {}),
    Variant(
        "Qwen3_5ForCausalLM",
        "a value head a key head, layers in turn, tied",
        _DENSE,
        {
            "linear_num_value_heads": 2,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Qwen3_5ForCausalLM",
        "three value heads a key head, wide convolution",
        _DENSE,
        {"linear_num_value_heads": 12, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 6, "num_hidden_layers": 5},
    ),
    Variant("Qwen3_5MoeForCausalLM", "two of six experts", _MOE, {}),
    Variant(
        "Qwen3_5MoeForCausalLM",
        "a value head a key head, every expert, tied",
        _MOE,
        {"linear_num_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    Variant(
        "Qwen3_5MoeForCausalLM",
        "three query heads a KV head, layers in turn",
        _MOE,
        {
            "num_attention_heads": 6,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_value_head_dim": 32,
        },
    ),
]
