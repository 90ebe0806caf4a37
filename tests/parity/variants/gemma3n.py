"""Gemma 3n's text models."""

from typing import Any

from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.5],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA3N = Family(Gemma3nTextConfig, Gemma3nForCausalLM, _SHAPE)
_NAME = "Gemma3nForCausalLM"

VARIANTS = [
    Variant(_NAME, "two of four layers sparse, two share keys and values", _GEMMA3N, {}),
    Variant(
        _NAME,
        "three streams of which the second is active, no shared keys, sizes by layer, untied, biases",
        _GEMMA3N,
        {
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "activation_sparsity_pattern": [0.0, 0.9, 0.0],
            "intermediate_size": [96, 64, 128],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": 307,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    Variant(
        _NAME,
        "one KV head, odd heads, layers and sparsity by default, five streams",
        _GEMMA3N,
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 1,
            "layer_types": None,
            "activation_sparsity_pattern": None,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "hidden_size": 72,
            "altup_num_inputs": 5,
            "final_logit_softcapping": 7.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0},
            },
        },
    ),
]
