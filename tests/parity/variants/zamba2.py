"""Zamba2."""

from typing import Any

from transformers import Zamba2Config, Zamba2ForCausalLM

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "adapter_rank": 6,
    "num_key_value_heads": 4,
    "time_step_min": 1e-9,
}
_ZAMBA2 = Family(Zamba2Config, Zamba2ForCausalLM, _SHAPE)
_NAME = "Zamba2ForCausalLM"

VARIANTS = [
    Variant(
        _NAME,
        "one block that two layers share, positions, adapters of attention, biases, tied",
        _ZAMBA2,
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "tie_word_embeddings": True,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "head_dim": 32,
            "add_bias_linear": True,
            "mamba_d_conv": 3,
        },
    ),
    Variant(
        _NAME,
        "two shared blocks, small heads, two groups, tied",
        _ZAMBA2,
        {"tie_word_embeddings": True, "mamba_ngroups": 2},
    ),
    Variant(
        _NAME,
        "untied, so blocks are not shared, one KV head, odd heads and states, SiLU",
        _ZAMBA2,
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "n_mamba_heads": 6,
            "mamba_ngroups": 2,
            "mamba_d_state": 11,
            "hidden_act": "silu",
            "use_mem_rope": True,
        },
    ),
]
