"""Models of 2025 and 2026 made of attention and experts that others have as well."""

from typing import Any

from transformers import (
    CwmConfig,
    CwmForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    HYV3Config,
    HYV3ForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_MIMO = Family(
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 20,
    },
)
_MINISTRAL = Family(MinistralConfig, MinistralForCausalLM, {"sliding_window": 20, "tie_word_embeddings": False})
_CWM = Family(CwmConfig, CwmForCausalLM, {"bos_token_id": 1, "num_hidden_layers": 4, "sliding_window": 20})
_SOLAR = Family(SolarOpenConfig, SolarOpenForCausalLM, {**_EXPERTS, "n_routed_experts": 4})
_EXAONE = Family(
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    {**_EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "sliding_window": 20},
)
_HY3 = Family(HYV3Config, HYV3ForCausalLM, {**_EXPERTS, "num_experts": 4})
_UNIFIED = Family(
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedForCausalLM,
    {
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
)
_SIX_HEADS: dict[str, Any] = {"num_attention_heads": 6, "hidden_size": 96}

VARIANTS = [
    Variant("MiMoV2FlashForCausalLM", "small values, two layers in three windowed with sinks", _MIMO, {}),
    Variant(
        "MiMoV2FlashForCausalLM",
        "values larger than keys, groups of experts, tied, biases, a rope for each kind",
        _MIMO,
        {
            "head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "attention_value_scale": None,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    Variant(
        "MiMoV2FlashForCausalLM",
        "three query heads a KV head, layers by name, every expert, weights not normalised",
        _MIMO,
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "v_head_dim": 20,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "norm_topk_prob": False,
            "num_experts_per_tok": 4,
            "sliding_window": 17,
        },
    ),
    Variant("MinistralForCausalLM", "every layer windowed", _MINISTRAL, {}),
    Variant(
        "MinistralForCausalLM",
        "layers in turn, tied, one KV head, stretched context",
        _MINISTRAL,
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": _YARN,
        },
    ),
    Variant(
        "MinistralForCausalLM",
        "no windows, heads of 24",
        _MINISTRAL,
        {"layer_types": ["full_attention"] * 2, "head_dim": 24},
    ),
    Variant("CwmForCausalLM", "one layer in four without a window", _CWM, {"rope_parameters": _YARN}),
    Variant(
        "CwmForCausalLM",
        "three query heads a KV head, tied, layers by name",
        _CWM,
        {**_SIX_HEADS, "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    Variant(
        "CwmForCausalLM",
        "one KV head, GELU, heads of 24",
        _CWM,
        {"num_key_value_heads": 1, "hidden_act": "gelu", "head_dim": 24},
    ),
    Variant("SolarOpenForCausalLM", "two of four experts and a shared one", _SOLAR, {}),
    Variant(
        "SolarOpenForCausalLM",
        "groups of experts, two shared, biases, tied, weights scaled",
        _SOLAR,
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    Variant(
        "SolarOpenForCausalLM",
        "stretched context, three query heads a KV head, weights not normalised",
        _SOLAR,
        {**_SIX_HEADS, "rope_parameters": _YARN, "norm_topk_prob": False},
    ),
    Variant("ExaoneMoeForCausalLM", "one layer in four without window and positions, first layer dense", _EXAONE, {}),
    Variant(
        "ExaoneMoeForCausalLM",
        "neither windows nor positions, every expert in all layers, two shared, tied",
        _EXAONE,
        {
            "num_experts_per_tok": 4,
            "layer_types": ["full_attention"] * 4,
            "first_k_dense_replace": 0,
            "num_shared_experts": 2,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "ExaoneMoeForCausalLM",
        "one layer in two windowed, groups of experts, one KV head",
        _EXAONE,
        {
            "sliding_window_pattern": 2,
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.0,
            "num_key_value_heads": 1,
        },
    ),
    Variant("HYV3ForCausalLM", "first layer dense, two of four experts and a shared one", _HY3, {}),
    Variant(
        "HYV3ForCausalLM",
        "experts in all layers, two shared, biases, tied",
        _HY3,
        {
            "mlp_layer_types": ["sparse"] * 2,
            "num_shared_experts": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "router_scaling_factor": 1.0,
        },
    ),
    Variant(
        "HYV3ForCausalLM",
        "every expert, stretched context, three query heads a KV head",
        _HY3,
        {**_SIX_HEADS, "num_experts": 3, "num_experts_per_tok": 3, "rope_parameters": _YARN},
    ),
    Variant("Gemma4UnifiedForCausalLM", "two layers in three windowed, tied", _UNIFIED, {}),
    Variant(
        "Gemma4UnifiedForCausalLM",
        "values that are keys, capped logits, one global KV head",
        _UNIFIED,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    ),
    Variant(
        "Gemma4UnifiedForCausalLM",
        "shared keys and values, wide shared layers, untied, biases",
        _UNIFIED,
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
]
