"""Phi-3, Phi-4 and Phi-3.5-MoE."""

from typing import Any

from transformers import Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_PHI3 = Family(Phi3Config, Phi3ForCausalLM, {"original_max_position_embeddings": 512})
_PHIMOE = Family(
    PhimoeConfig, PhimoeForCausalLM, {"num_local_experts": 4, "intermediate_size": 48, "router_jitter_noise": 0.1}
)
_SHORT = [1.0, 1.1, 1.3, 1.7, 2.2, 3.0, 4.1, 5.0]
_LONG = [1.0, 1.5, 2.5, 4.0, 9.0, 16.0, 30.0, 60.0]


def _longrope(**fields: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": _SHORT,
        "long_factor": _LONG,
        **fields,
    }


VARIANTS = [
    Variant(
        "Phi3ForCausalLM", "window, a KV head a query head", _PHI3, {"num_key_value_heads": 4, "sliding_window": 20}
    ),
    Variant(
        "Phi3ForCausalLM",
        "Phi-4-mini: three query heads a KV head, tied, three quarters of a head rotated, short longrope",
        _PHI3,
        {
            "num_attention_heads": 6,
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "rope_parameters": _longrope(
                partial_rotary_factor=0.75,
                short_factor=_SHORT[:6],
                long_factor=_LONG[:6],
                original_max_position_embeddings=512,
            ),
        },
    ),
    # transformers chooses the factors by the length of the sequence, Kaon by the longest it serves: these agree.
    Variant(
        "Phi3ForCausalLM",
        "longrope beyond the original context",
        _PHI3,
        {
            "original_max_position_embeddings": 2,
            "rope_parameters": _longrope(original_max_position_embeddings=2, attention_factor=1.2),
        },
    ),
    Variant("PhimoeForCausalLM", "two of four experts, a bias of the logits", _PHIMOE, {"lm_head_bias": True}),
    Variant(
        "PhimoeForCausalLM",
        "longrope, biases, windowed, a KV head a query head",
        _PHIMOE,
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 20,
            "rope_parameters": _longrope(
                original_max_position_embeddings=512, short_mscale=1.2, long_mscale=1.2, rope_theta=10000.0
            ),
        },
    ),
    Variant(
        "PhimoeForCausalLM",
        "one expert nearly always alone, tied, one KV head",
        _PHIMOE,
        {"num_local_experts": 5, "router_jitter_noise": 0.01, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
]
