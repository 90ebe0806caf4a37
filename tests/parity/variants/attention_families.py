"""Models of attention alone whose layers, norms, activations or routers have forms of their own."""

from typing import Any

from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    NemotronConfig,
    NemotronForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
_HALF: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_COHERE = Family(CohereConfig, CohereForCausalLM, {"tie_word_embeddings": False})
_COHERE2 = Family(Cohere2Config, Cohere2ForCausalLM, {"num_hidden_layers": 4, "sliding_window": 20})
_FACTORS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 4.0,
}
_GRANITE = Family(GraniteConfig, GraniteForCausalLM, _FACTORS)
_HYPERCLOVA = Family(HyperCLOVAXConfig, HyperCLOVAXForCausalLM, {"embedding_multiplier": 10.0, "logits_scaling": 0.5})
_GRANITE_MOE = Family(
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    {**_FACTORS, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40},
)
_GLM = Family(GlmConfig, GlmForCausalLM)
_GLM4 = Family(Glm4Config, Glm4ForCausalLM)
_EXAONE4 = Family(Exaone4Config, Exaone4ForCausalLM, {"num_hidden_layers": 4, "sliding_window": 20})
_ARCEE = Family(ArceeConfig, ArceeForCausalLM)
_NEMOTRON = Family(NemotronConfig, NemotronForCausalLM, norm_mean=0.0)
_STARCODER2 = Family(Starcoder2Config, Starcoder2ForCausalLM)
_STABLELM = Family(StableLmConfig, StableLmForCausalLM, {"rope_parameters": _HALF})
_HUNYUAN = Family(HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM)
_HUNYUAN_MOE = Family(
    HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM, {"num_experts": 4, "moe_topk": 2, "intermediate_size": 40}
)
_QWEN2_MOE = Family(
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
)
_LLAMA4 = Family(
    Llama4TextConfig,
    Llama4ForCausalLM,
    {
        "num_hidden_layers": 4,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "intermediate_size": 40,
        "intermediate_size_mlp": 72,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
)

_GEMMA = Family(GemmaConfig, GemmaForCausalLM, norm_mean=0.0)
_GEMMA2 = Family(
    Gemma2Config,
    Gemma2ForCausalLM,
    {"num_hidden_layers": 3, "query_pre_attn_scalar": 16, "sliding_window": 24, "tie_word_embeddings": False},
    norm_mean=0.0,
)
_DOTS1 = Family(
    Dots1Config,
    Dots1ForCausalLM,
    {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
)
_OLMOE = Family(OlmoeConfig, OlmoeForCausalLM, {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40})

VARIANTS = [
    Variant("CohereForCausalLM", "norms of each head's own, scaled logits", _COHERE, {"use_qk_norm": True}),
    Variant(
        "CohereForCausalLM",
        "no norms, tied, one KV head",
        _COHERE,
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Variant(
        "CohereForCausalLM",
        "biases, norms, six heads of 12, a KV head a query head",
        _COHERE,
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": 12,
            "logit_scale": 0.5,
        },
    ),
    Variant("Cohere2ForCausalLM", "one layer in four without window and positions", _COHERE2, {}),
    Variant(
        "Cohere2ForCausalLM",
        "layers in turn, untied, biases, one KV head",
        _COHERE2,
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    Variant(
        "Cohere2ForCausalLM",
        "all windowed, three query heads a KV head, logits as they are",
        _COHERE2,
        {
            "layer_types": ["sliding_attention"] * 4,
            "num_attention_heads": 6,
            "hidden_size": 96,
            "logit_scale": 1.0,
        },
    ),
    Variant("GraniteForCausalLM", "factors of embeddings, scores, residuals and logits", _GRANITE, {}),
    Variant(
        "GraniteForCausalLM",
        "tied, biases, one KV head",
        _GRANITE,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    Variant(
        "GraniteForCausalLM",
        "stretched context, GELU, three query heads a KV head",
        _GRANITE,
        {"rope_parameters": _YARN, "hidden_act": "gelu", "num_attention_heads": 6, "hidden_size": 96},
    ),
    Variant("HyperCLOVAXForCausalLM", "norms before and after, factors of embeddings and logits", _HYPERCLOVA, {}),
    Variant(
        "HyperCLOVAXForCausalLM",
        "factors of scores and residuals, tied, biases, one KV head",
        _HYPERCLOVA,
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    Variant(
        "HyperCLOVAXForCausalLM",
        "norms before only, stretched context, six heads of 16",
        _HYPERCLOVA,
        {"use_post_norm": False, "rope_parameters": _YARN, "num_attention_heads": 6, "hidden_size": 96},
    ),
    Variant("GraniteMoeForCausalLM", "two of five experts", _GRANITE_MOE, {}),
    Variant(
        "GraniteMoeForCausalLM",
        "every expert, tied, biases",
        _GRANITE_MOE,
        {"num_local_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": True, "attention_bias": True},
    ),
    Variant(
        "GraniteMoeForCausalLM",
        "one of six experts, gated by a tanh GELU, one KV head",
        _GRANITE_MOE,
        {"num_local_experts": 6, "num_experts_per_tok": 1, "hidden_act": "gelu_new", "num_key_value_heads": 1},
    ),
    Variant("GlmForCausalLM", "biases, half of a head rotated", _GLM, {}),
    Variant(
        "GlmForCausalLM",
        "no biases, all of a head rotated, tied",
        _GLM,
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "GlmForCausalLM", "three query heads a KV head, heads of 24", _GLM, {"num_attention_heads": 6, "head_dim": 24}
    ),
    Variant("Glm4ForCausalLM", "biases, half of a head rotated", _GLM4, {}),
    Variant(
        "Glm4ForCausalLM",
        "no biases, tied, one KV head",
        _GLM4,
        {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Variant(
        "Glm4ForCausalLM",
        "three query heads a KV head, heads of 24",
        _GLM4,
        {"num_attention_heads": 6, "head_dim": 24},
    ),
    Variant("Exaone4ForCausalLM", "three layers in four windowed, the other without positions", _EXAONE4, {}),
    Variant(
        "Exaone4ForCausalLM",
        "no windows, tied, stretched context",
        _EXAONE4,
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
    ),
    Variant(
        "Exaone4ForCausalLM",
        "a pattern of letters, one KV head",
        _EXAONE4,
        {
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_key_value_heads": 1,
        },
    ),
    Variant("ArceeForCausalLM", "squared ReLU", _ARCEE, {}),
    Variant(
        "ArceeForCausalLM",
        "biases, tied, stretched context",
        _ARCEE,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    Variant(
        "ArceeForCausalLM",
        "GELU, four query heads a KV head, heads of 24",
        _ARCEE,
        {"hidden_act": "gelu", "num_attention_heads": 8, "head_dim": 24},
    ),
    Variant("NemotronForCausalLM", "squared ReLU, half of a head rotated", _NEMOTRON, {}),
    Variant(
        "NemotronForCausalLM",
        "biases, all of a head rotated, tied",
        _NEMOTRON,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "NemotronForCausalLM",
        "SiLU, one KV head, heads of 24",
        _NEMOTRON,
        {"hidden_act": "silu", "num_key_value_heads": 1, "head_dim": 24},
    ),
    Variant(
        "Starcoder2ForCausalLM",
        "biases, untied, windowed",
        _STARCODER2,
        {"sliding_window": 20, "tie_word_embeddings": False},
    ),
    Variant("Starcoder2ForCausalLM", "no biases, tied", _STARCODER2, {"use_bias": False}),
    Variant(
        "Starcoder2ForCausalLM",
        "ReLU, one KV head, six heads",
        _STARCODER2,
        {"hidden_act": "relu", "num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 1},
    ),
    Variant("StableLmForCausalLM", "half of a head rotated, biases", _STABLELM, {"use_qkv_bias": True}),
    Variant(
        "StableLmForCausalLM",
        "attention and network in parallel, norms of each head's own",
        _STABLELM,
        {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 4},
    ),
    Variant(
        "StableLmForCausalLM",
        "norms of each head's own, tied, one KV head",
        _STABLELM,
        {"qk_layernorm": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Variant("HunYuanDenseV1ForCausalLM", "norms after the rotation", _HUNYUAN, {}),
    Variant(
        "HunYuanDenseV1ForCausalLM",
        "a stretched base, tied, biases",
        _HUNYUAN,
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    Variant(
        "HunYuanDenseV1ForCausalLM",
        "one KV head, heads of 24",
        _HUNYUAN,
        {"num_key_value_heads": 1, "head_dim": 24},
    ),
    Variant("HunYuanMoEV1ForCausalLM", "two of four experts and a shared one", _HUNYUAN_MOE, {}),
    Variant(
        "HunYuanMoEV1ForCausalLM",
        "every expert, tied, a stretched base",
        _HUNYUAN_MOE,
        {
            "num_experts": 3,
            "moe_topk": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    Variant(
        "HunYuanMoEV1ForCausalLM",
        "one of six experts, three query heads a KV head",
        _HUNYUAN_MOE,
        {"num_experts": 6, "moe_topk": 1, "num_attention_heads": 6},
    ),
    Variant("Qwen2MoeForCausalLM", "two of five experts and a shared one", _QWEN2_MOE, {}),
    Variant(
        "Qwen2MoeForCausalLM",
        "every other layer dense, no biases, tied",
        _QWEN2_MOE,
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    Variant(
        "Qwen2MoeForCausalLM",
        "weights that add up to 1, upper layers windowed",
        _QWEN2_MOE,
        {
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    Variant("GemmaForCausalLM", "tied, one KV head", _GEMMA, {"num_key_value_heads": 1}),
    Variant(
        "GemmaForCausalLM",
        "untied, a GELU by name, heads of 24",
        _GEMMA,
        {"tie_word_embeddings": False, "hidden_act": "gelu", "head_dim": 24},
    ),
    Variant(
        "GemmaForCausalLM",
        "biases, a KV head a query head",
        _GEMMA,
        {"attention_bias": True, "num_key_value_heads": 4},
    ),
    Variant(
        "Gemma2ForCausalLM",
        "capped scores and logits, layers in turn windowed",
        _GEMMA2,
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    Variant(
        "Gemma2ForCausalLM",
        "no caps, tied, a scale of its own",
        _GEMMA2,
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 40,
        },
    ),
    Variant(
        "Gemma2ForCausalLM",
        "all windowed, one KV head, biases",
        _GEMMA2,
        {
            "layer_types": ["sliding_attention"] * 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "sliding_window": 16,
        },
    ),
    Variant("Dots1ForCausalLM", "first layer dense, two of four experts, two shared", _DOTS1, {}),
    Variant(
        "Dots1ForCausalLM",
        "groups of experts, weights that add up to 1, tied",
        _DOTS1,
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Dots1ForCausalLM",
        "upper layers windowed, biases, one KV head",
        _DOTS1,
        {"sliding_window": 20, "max_window_layers": 1, "attention_bias": True, "num_key_value_heads": 1},
    ),
    Variant("OlmoeForCausalLM", "two of five experts", _OLMOE, {}),
    Variant(
        "OlmoeForCausalLM",
        "weights that add up to 1, tied, one KV head",
        _OLMOE,
        {"norm_topk_prob": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    Variant(
        "OlmoeForCausalLM",
        "every expert, biases, six heads",
        _OLMOE,
        {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "num_attention_heads": 6,
            "hidden_size": 96,
        },
    ),
    Variant("Llama4ForCausalLM", "chunks, one layer in four without positions, every other of experts", _LLAMA4, {}),
    Variant(
        "Llama4ForCausalLM",
        "experts in all layers, no norms, no growing queries, tied",
        _LLAMA4,
        {
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
        },
    ),
    Variant(
        "Llama4ForCausalLM",
        "layers by name, biases, one KV head, chunks of 17",
        _LLAMA4,
        {
            "no_rope_layers": [0, 1, 1, 0],
            "moe_layers": [2],
            "attention_bias": True,
            "num_key_value_heads": 1,
            "attention_chunk_size": 17,
            "attn_scale": 0.5,
        },
    ),
]
