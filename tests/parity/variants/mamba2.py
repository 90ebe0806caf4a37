"""Models with Mamba-2 layers, in turn with attention or next to it."""

from typing import Any

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_SIZES: dict[str, Any] = {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 16}
_ODD: dict[str, Any] = {"hidden_size": 60, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 11}
_SIX_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12}
_BAMBA = Family(BambaConfig, BambaForCausalLM, {**_SIZES, "attn_layer_indices": [1]})
_GRANITE = Family(
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    {
        **_SIZES,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
)
_FALCON = Family(FalconH1Config, FalconH1ForCausalLM, {**_SIZES, "mamba_d_ssm": 96})
_NEMOTRON = Family(
    NemotronHConfig,
    NemotronHForCausalLM,
    {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
    },
)

VARIANTS = [
    Variant("BambaForCausalLM", "one layer in three attends, one group", _BAMBA, {}),
    Variant(
        "BambaForCausalLM",
        "two groups, biases, wide convolution, tied",
        _BAMBA,
        {
            "mamba_n_groups": 2,
            "mamba_d_conv": 5,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attn_layer_indices": [0],
        },
    ),
    Variant(
        "BambaForCausalLM",
        "odd heads and states, narrow convolution without biases, time steps limited",
        _BAMBA,
        {
            **_ODD,
            **_SIX_HEADS,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "time_step_limit": (0.1, 0.9),
            "attn_layer_indices": [2],
        },
    ),
    Variant("GraniteMoeHybridForCausalLM", "two of four experts, no positions, factors", _GRANITE, {}),
    Variant(
        "GraniteMoeHybridForCausalLM",
        "no experts, rotary positions, biases, tied",
        _GRANITE,
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "GraniteMoeHybridForCausalLM",
        "every expert, odd heads and states, three groups",
        _GRANITE,
        {
            **_ODD,
            **_SIX_HEADS,
            "hidden_size": 72,
            "num_experts_per_tok": 4,
            "mamba_conv_bias": False,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
        },
    ),
    Variant("FalconH1ForCausalLM", "no norm of what is read", _FALCON, {}),
    Variant(
        "FalconH1ForCausalLM",
        "gates after the norm, factors on every branch, biases",
        _FALCON,
        {
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.6,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.4,
            "mlp_multipliers": [0.9, 0.3],
            "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9],
        },
    ),
    Variant(
        "FalconH1ForCausalLM",
        "gates before the norm, width from the hidden size, odd heads and states, tied",
        _FALCON,
        {
            **_ODD,
            **_SIX_HEADS,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    Variant("NemotronHForCausalLM", "each kind of layer once", _NEMOTRON, {}),
    Variant(
        "NemotronHForCausalLM",
        "experts behind a smaller vector, two of four groups, biases",
        _NEMOTRON,
        {
            "moe_latent_size": 64,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "mlp_bias": True,
            "use_bias": True,
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "linear_attention"],
        },
    ),
    Variant(
        "NemotronHForCausalLM",
        "odd heads and states, weights not normalised, wide convolution without biases",
        _NEMOTRON,
        {
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 9,
            "conv_kernel": 5,
            "use_conv_bias": False,
            "norm_topk_prob": False,
            "time_step_min": 0.2,
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "moe"],
        },
    ),
]
