"""Gemma 4's text models."""

from typing import Any

from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_GEMMA4 = Family(Gemma4TextConfig, Gemma4ForCausalLM, _SHAPE)
_NAME = "Gemma4ForCausalLM"

VARIANTS = [
    Variant(
        _NAME,
        "inputs of single layers, shared keys and values, wide shared layers",
        _GEMMA4,
        {
            "num_hidden_layers": 5,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 307,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
            "num_key_value_heads": 1,
        },
    ),
    Variant(
        _NAME,
        "experts, values that are keys, capped logits",
        _GEMMA4,
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    Variant(
        _NAME,
        "dense, values that are keys, untied, biases, larger local heads",
        _GEMMA4,
        {
            "attention_k_eq_v": True,
            "global_head_dim": 24,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_attention_heads": 6,
            "hidden_size": 48,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
            },
        },
    ),
]
