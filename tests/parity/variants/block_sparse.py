"""MiniMax-M3, whose sparse layers attend to selected blocks of keys."""

from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_M3 = Family(
    MiniMaxM3VLTextConfig,
    MiniMaxM3VLForCausalLM,
    {
        "intermediate_size": 32,
        "dense_intermediate_size": 80,
        "shared_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "index_n_heads": 2,
        "index_head_dim": 24,
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    norm_mean=0.0,
)

VARIANTS = [
    Variant("MiniMaxM3VLForCausalLM", "three blocks of eight keys", _M3, {}),
    Variant(
        "MiniMaxM3VLForCausalLM",
        "five of blocks of five keys, two of them local, one KV head, all sparse",
        _M3,
        {
            "layer_types": ["minimax_m3_sparse"] * 3,
            "mlp_layer_types": ["sparse"] * 3,
            "index_n_heads": 1,
            "num_key_value_heads": 1,
            "index_head_dim": 8,
            "index_block_size": 5,
            "index_topk_blocks": 5,
            "index_local_blocks": 2,
        },
    ),
    Variant(
        "MiniMaxM3VLForCausalLM",
        "blocks larger than the cache's, no local ones, all heads rotated, six heads",
        _M3,
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "index_n_heads": 3,
            "index_block_size": 20,
            "index_topk_blocks": 2,
            "index_local_blocks": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
]
