"""gpt-oss."""

from typing import Any

from transformers import GptOssConfig, GptOssForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_GPT_OSS = Family(
    GptOssConfig,
    GptOssForCausalLM,
    {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 24},
)
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

VARIANTS = [
    Variant("GptOssForCausalLM", "every other layer windowed, yarn", _GPT_OSS, {"rope_parameters": _YARN}),
    Variant(
        "GptOssForCausalLM",
        "eight query heads a KV head, all five experts a token, window of a block",
        _GPT_OSS,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_local_experts": 5,
            "num_experts_per_tok": 5,
            "sliding_window": 16,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    Variant(
        "GptOssForCausalLM",
        "tied, no attention biases, tight clamps, every layer windowed",
        _GPT_OSS,
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "swiglu_limit": 0.75,
            "swiglu_alpha": 2.5,
            "layer_types": ["sliding_attention"] * 2,
            "rope_parameters": {**_YARN, "truncate": True},
        },
    ),
]
