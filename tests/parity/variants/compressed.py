"""DeepSeek-V4, whose layers attend to a window of tokens and to entries that stand for several tokens each."""

from typing import Any

from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# With few heads, many entries score exactly 0 in the indexer, and which of them are taken is anyone's choice.
_V4 = Family(
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "intermediate_size": 40,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "layer_types": [_WINDOW, _SPARSE, _HEAVY],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {_SPARSE: 4, _HEAVY: 32},
        "partial_rotary_factor": 0.25,
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 24,
        "index_topk": 5,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 3.0,
    },
)
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

VARIANTS = [
    Variant("DeepseekV4ForCausalLM", "a layer of each kind, five entries of four tokens", _V4, {}),
    Variant(
        "DeepseekV4ForCausalLM",
        "entries of five and of three tokens, three streams, six heads in three groups, stretched context",
        _V4,
        {
            "layer_types": [_SPARSE, _HEAVY, _SPARSE],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
            "compress_rates": {_SPARSE: 5, _HEAVY: 3},
            "num_attention_heads": 6,
            "o_groups": 3,
            "hc_mult": 3,
            "index_topk": 3,
            "index_head_dim": 8,
            "sliding_window": 20,
            "rope_parameters": _YARN,
        },
    ),
    Variant(
        "DeepseekV4ForCausalLM",
        "all entries selected, every expert, a window of two tokens",
        _V4,
        {
            "layer_types": [_HEAVY, _HEAVY, _SPARSE, _SPARSE],
            "mlp_layer_types": ["moe"] * 4,
            "num_hidden_layers": 4,
            "compress_rates": {_SPARSE: 8, _HEAVY: 20},
            "num_experts_per_tok": 6,
            "index_topk": 512,
            "sliding_window": 2,
            "partial_rotary_factor": 1.0,
            "index_head_dim": 40,
            "o_groups": 1,
        },
    ),
]
