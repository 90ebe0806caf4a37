"""Models of attention alone that differ from Llama in norms, positions, biases or routers."""

from typing import Any

from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
_SEED = Family(SeedOssConfig, SeedOssForCausalLM)
_SMOL = Family(SmolLM3Config, SmolLM3ForCausalLM, {"num_hidden_layers": 4, "tie_word_embeddings": False})
_OLMO2 = Family(Olmo2Config, Olmo2ForCausalLM)
_OLMO3 = Family(Olmo3Config, Olmo3ForCausalLM, {"num_hidden_layers": 4, "sliding_window": 20})
_ERNIE = Family(Ernie4_5Config, Ernie4_5ForCausalLM)
_ERNIE_MOE = Family(
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_end_index": 1},
)
_MINISTRAL3 = Family(
    Ministral3Config, Ministral3ForCausalLM, {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}
)
_MINIMAX_M2 = Family(
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    {
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
)

VARIANTS = [
    Variant("SeedOssForCausalLM", "biases on queries, keys and values", _SEED, {}),
    Variant(
        "SeedOssForCausalLM",
        "biases on the output and the network, seven query heads a KV head",
        _SEED,
        {"attention_out_bias": True, "mlp_bias": True, "num_attention_heads": 14, "hidden_size": 56},
    ),
    Variant(
        "SeedOssForCausalLM",
        "no biases, tied, heads of 24",
        _SEED,
        {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 24},
    ),
    Variant("SmolLM3ForCausalLM", "one layer in four without positions", _SMOL, {}),
    Variant(
        "SmolLM3ForCausalLM",
        "layers without positions windowed, tied",
        _SMOL,
        {
            "no_rope_layers": [0, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "SmolLM3ForCausalLM",
        "biases, one KV head, stretched context",
        _SMOL,
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "rope_parameters": _YARN},
    ),
    Variant("Olmo2ForCausalLM", "two query heads a KV head", _OLMO2, {}),
    Variant(
        "Olmo2ForCausalLM",
        "biases, tied, one KV head",
        _OLMO2,
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Variant(
        "Olmo2ForCausalLM",
        "a KV head a query head, six of them",
        _OLMO2,
        {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 72, "head_dim": 12},
    ),
    Variant("Olmo3ForCausalLM", "three layers in four windowed", _OLMO3, {}),
    Variant(
        "Olmo3ForCausalLM",
        "full layers stretched",
        _OLMO3,
        {
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    Variant(
        "Olmo3ForCausalLM",
        "layers in turn, biases, a KV head a query head",
        _OLMO3,
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    Variant("Ernie4_5ForCausalLM", "two query heads a KV head, tied", _ERNIE, {}),
    Variant("Ernie4_5ForCausalLM", "biases, untied", _ERNIE, {"use_bias": True, "tie_word_embeddings": False}),
    Variant(
        "Ernie4_5ForCausalLM",
        "three query heads a KV head, heads of 20",
        _ERNIE,
        {"num_attention_heads": 6, "head_dim": 20},
    ),
    Variant("Ernie4_5_MoeForCausalLM", "first layer dense, two shared experts", _ERNIE_MOE, {}),
    Variant(
        "Ernie4_5_MoeForCausalLM",
        "experts in every other layer, untied",
        _ERNIE_MOE,
        {
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "tie_word_embeddings": False,
        },
    ),
    Variant(
        "Ernie4_5_MoeForCausalLM",
        "every expert, none shared, experts in all layers",
        _ERNIE_MOE,
        {"moe_layer_start_index": 0, "moe_num_experts": 3, "moe_k": 3, "moe_num_shared_experts": 0},
    ),
    Variant("Ministral3ForCausalLM", "stretched context, growing queries", _MINISTRAL3, {}),
    Variant(
        "Ministral3ForCausalLM",
        "queries that grow early, window, tied",
        _MINISTRAL3,
        {
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Ministral3ForCausalLM",
        "queries that do not grow, three query heads a KV head",
        _MINISTRAL3,
        {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.0}, "num_attention_heads": 6},
    ),
    Variant("MiniMaxM2ForCausalLM", "three of four experts, half of a head rotated", _MINIMAX_M2, {}),
    Variant(
        "MiniMaxM2ForCausalLM",
        "every expert, all of a head rotated, one KV head",
        _MINIMAX_M2,
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    Variant(
        "MiniMaxM2ForCausalLM",
        "two of six experts, three query heads a KV head, tied, heads of 24",
        _MINIMAX_M2,
        {
            "num_attention_heads": 6,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
]
