"""Gemma 3's text models."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_GEMMA3 = Family(
    Gemma3TextConfig, Gemma3ForCausalLM, {"num_hidden_layers": 3, "query_pre_attn_scalar": 16, "sliding_window": 24}
)
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}

VARIANTS = [
    Variant(
        "Gemma3ForCausalLM",
        "two layers in three windowed, global rope stretched",
        _GEMMA3,
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": _LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    Variant(
        "Gemma3ForCausalLM",
        "every layer windowed, one KV head, a scale of its own",
        _GEMMA3,
        {"num_key_value_heads": 1, "query_pre_attn_scalar": 50, "sliding_window": 16},
    ),
    Variant(
        "Gemma3ForCausalLM",
        "untied, biases, capped logits, three query heads a KV head",
        _GEMMA3,
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "num_attention_heads": 6,
            "hidden_size": 48,
            "head_dim": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "default", "rope_theta": 30000.0},
            },
        },
    ),
]
