"""Llama, and what shares its code."""

from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_LLAMA = Family(LlamaConfig, LlamaForCausalLM)
_MISTRAL = Family(MistralConfig, MistralForCausalLM)
_QWEN2 = Family(Qwen2Config, Qwen2ForCausalLM)
_QWEN3 = Family(Qwen3Config, Qwen3ForCausalLM)

_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS = [
    Variant("LlamaForCausalLM", "Llama 2: a KV head a query head", _LLAMA, {"num_key_value_heads": 4}),
    Variant("LlamaForCausalLM", "Llama 3.1: scaled rope", _LLAMA, {"rope_parameters": _LLAMA3_ROPE}),
    Variant(
        "LlamaForCausalLM",
        "seven query heads a KV head, tied, biases",
        _LLAMA,
        {
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "hidden_size": 56,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Variant("MistralForCausalLM", "sliding window", _MISTRAL, {"sliding_window": 24}),
    Variant("MistralForCausalLM", "window of one block", _MISTRAL, {"sliding_window": 16, "num_key_value_heads": 1}),
    Variant("MistralForCausalLM", "full attention", _MISTRAL, {"sliding_window": None, "head_dim": 24}),
    Variant("Qwen2ForCausalLM", "biases", _QWEN2, {}),
    Variant("Qwen2ForCausalLM", "tied, one KV head", _QWEN2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Variant(
        "Qwen2ForCausalLM",
        "upper layers windowed",
        _QWEN2,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    Variant("Qwen3ForCausalLM", "two query heads a KV head", _QWEN3, {}),
    Variant("Qwen3ForCausalLM", "tied, heads of 48", _QWEN3, {"tie_word_embeddings": True, "head_dim": 48}),
    Variant(
        "Qwen3ForCausalLM",
        "three query heads a KV head, bias",
        _QWEN3,
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "attention_bias": True},
    ),
]
