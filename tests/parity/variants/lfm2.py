"""LFM2, dense and of experts."""

from typing import Any

from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

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
]
