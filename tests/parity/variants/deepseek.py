"""DeepSeek-V2, V3 and V3.2, and GLM's models of latents."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_V2 = Family(DeepseekV2Config, DeepseekV2ForCausalLM, _MLA)
_V3 = Family(DeepseekV3Config, DeepseekV3ForCausalLM, _MLA)
# With few heads, many tokens score exactly 0 in the indexer, and which of them are kept is anyone's choice.
_V32 = Family(
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    {**_MLA, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 16},
)
_LITE = Family(Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, _MLA)
# transformers maps its causal language model to images and text only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
_MISTRAL4 = Family(
    Mistral4Config,
    Mistral4ForCausalLM,
    {
        **_MLA,
        "first_k_dense_replace": 0,
        # transformers computes the number of rotated dimensions as a share of the head, which must be exact.
        "head_dim": 32,
        "qk_nope_head_dim": 24,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
)
_GLM5 = Family(
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    {
        **_MLA,
        "index_n_heads": 16,
        "index_head_dim": 24,
        "index_topk": 16,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
)

VARIANTS = [
    Variant("DeepseekV2ForCausalLM", "Lite: queries without a latent", _V2, {"q_lora_rank": None}),
    Variant(
        "DeepseekV2ForCausalLM",
        "groups of experts, stretched context",
        _V2,
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": _YARN,
        },
    ),
    Variant(
        "DeepseekV2ForCausalLM",
        "dense, biases, wide values",
        _V2,
        {"first_k_dense_replace": 2, "attention_bias": True, "v_head_dim": 40},
    ),
    Variant(
        "DeepseekV3ForCausalLM",
        "groups of experts, stretched context",
        _V3,
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 3,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    Variant(
        "DeepseekV3ForCausalLM",
        "six heads, queries without a latent, one group",
        _V3,
        {"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    Variant(
        "DeepseekV3ForCausalLM",
        "rope in halves, biases, two shared experts, scales that differ",
        _V3,
        {
            "rope_interleave": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "kv_lora_rank": 20,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    Variant("DeepseekV32ForCausalLM", "sixteen tokens selected", _V32, {}),
    Variant(
        "DeepseekV32ForCausalLM",
        "more selected than a prompt, stretched context, groups of experts",
        _V32,
        {"index_topk": 64, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN, "num_hidden_layers": 3},
    ),
    Variant(
        "DeepseekV32ForCausalLM",
        "five tokens selected, biases, keys all rotated",
        _V32,
        {
            "index_topk": 5,
            "index_head_dim": 8,
            "attention_bias": True,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    ),
    Variant(
        "DeepseekV32ForCausalLM",
        "every token selected, experts in one layer",
        _V32,
        {"index_topk": 2048, "mlp_layer_types": ["sparse", "dense"]},
    ),
    Variant("GlmMoeDsaForCausalLM", "sixteen tokens selected, one layer shares the selection", _GLM5, {}),
    Variant(
        "GlmMoeDsaForCausalLM",
        "every layer selects five, biases, keys all rotated",
        _GLM5,
        {
            "index_topk": 5,
            "index_head_dim": 8,
            "attention_bias": True,
            "indexer_types": ["full"] * 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    ),
    Variant(
        "GlmMoeDsaForCausalLM",
        "more selected than a prompt, two layers share, groups of experts",
        _GLM5,
        {"index_topk": 64, "indexer_types": ["full", "shared", "shared"], "n_group": 2, "topk_group": 1},
    ),
    Variant("Glm4MoeLiteForCausalLM", "first layer dense, three of eight experts", _LITE, {}),
    Variant(
        "Glm4MoeLiteForCausalLM",
        "two of four groups, biases, queries without a latent, wide values, tied",
        _LITE,
        {
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "q_lora_rank": None,
            "v_head_dim": 24,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Glm4MoeLiteForCausalLM",
        "experts in all layers, rope in halves, weights not normalised, six heads",
        _LITE,
        {
            "mlp_layer_types": ["sparse", "sparse"],
            "rope_interleave": False,
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
    Variant("Mistral4ForCausalLM", "stretched context, growing queries, experts in all layers", _MISTRAL4, {}),
    Variant(
        "Mistral4ForCausalLM",
        "queries that grow early and have no latent, first layer dense, two shared experts, tied",
        _MISTRAL4,
        {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **{name: value for name, value in _YARN.items() if "mscale" not in name},
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.2,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    Variant(
        "Mistral4ForCausalLM",
        "queries that do not grow, rope in halves, weights scaled and not normalised, biases",
        _MISTRAL4,
        {
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.0},
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "v_head_dim": 24,
        },
    ),
]
