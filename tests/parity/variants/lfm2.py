"""LFM2, dense and of experts, and LFM3."""

from typing import Any

from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "moe_intermediate_size": 40,
}
_DENSE = Family(Lfm2Config, Lfm2ForCausalLM, {**_SHAPE, "block_multiple_of": 16})
_MOE = Family(Lfm2MoeConfig, Lfm2MoeForCausalLM, {**_SHAPE, **_EXPERTS})
_LFM3 = Family(
    Lfm3Config,
    Lfm3ForCausalLM,
    {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "sliding_window": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
)

VARIANTS = [
    Variant("Lfm2ForCausalLM", "one layer in three attends, tied", _DENSE, {}),
    Variant(
        "Lfm2ForCausalLM",
        "biases, wide convolution, layers by number, untied",
        _DENSE,
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "layer_types": None,
            "full_attn_idxs": [0, 2],
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    Variant(
        "Lfm2ForCausalLM",
        "odd channels, narrow convolution, three query heads a KV head, wider networks",
        _DENSE,
        {
            "hidden_size": 66,
            "num_attention_heads": 6,
            "head_dim": 12,
            "conv_L_cache": 2,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    Variant("Lfm2MoeForCausalLM", "two of four experts, first layer dense", _MOE, {}),
    Variant(
        "Lfm2MoeForCausalLM",
        "no correction, weights scaled and not normalised, biases, untied",
        _MOE,
        {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    Variant(
        "Lfm2MoeForCausalLM",
        "every expert, no dense layer, wide convolution, one KV head",
        _MOE,
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "num_dense_layers": 0,
            "conv_L_cache": 4,
            "num_key_value_heads": 1,
        },
    ),
    Variant("Lfm3ForCausalLM", "one layer in four windowed, gates, norms on both sides", _LFM3, {}),
    Variant(
        "Lfm3ForCausalLM",
        "neither gates nor second norms, biases, narrow convolution, untied",
        _LFM3,
        {
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "conv_bias": True,
            "attention_bias": True,
            "conv_L_cache": 3,
            "tie_word_embeddings": False,
        },
    ),
    Variant(
        "Lfm3ForCausalLM",
        "odd channels, three query heads a KV head, layers and ropes by default",
        _LFM3,
        {
            "hidden_size": 54,
            "num_attention_heads": 6,
            "head_dim": 12,
            "num_hidden_layers": 5,
            "layer_types": None,
            "rope_parameters": None,
        },
    ),
]
