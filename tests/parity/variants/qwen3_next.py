"""Qwen3-Next: recurrent layers next to attention."""

from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
_QWEN3_NEXT = Family(Qwen3NextConfig, Qwen3NextForCausalLM, _SHAPE, norm_mean=0.0)
_NAME = "Qwen3NextForCausalLM"

VARIANTS = [
    Variant(_NAME, "one layer in four attends", _QWEN3_NEXT, {}),
    Variant(
        _NAME,
        "a value head a key head, layers in turn, tied",
        _QWEN3_NEXT,
        {
            "linear_num_value_heads": 2,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        _NAME,
        "dense layers between, wide convolution",
        _QWEN3_NEXT,
        {"mlp_only_layers": [1], "linear_conv_kernel_dim": 6, "norm_topk_prob": False},
    ),
]
