"""Models of recurrent layers of other kinds than those of families with a module of their own."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OlmoHybridConfig,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_MAMBA2 = Family(Mamba2Config, Mamba2ForCausalLM, {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16})
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MINIMAX = Family(
    MiniMaxConfig,
    MiniMaxForCausalLM,
    {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
)
_MAMBA = {"state_size": 8, "time_step_rank": 6}
_MAMBA_ODD = {
    "hidden_size": 45,
    "state_size": 5,
    "time_step_rank": 3,
    "conv_kernel": 2,
    "use_conv_bias": False,
    "num_hidden_layers": 3,
}
_MAMBA_WIDE = {"conv_kernel": 6, "use_bias": True, "time_step_rank": "auto", "tie_word_embeddings": False}
_MAMBA1 = Family(MambaConfig, MambaForCausalLM, _MAMBA)
_FALCON_MAMBA = Family(FalconMambaConfig, FalconMambaForCausalLM, _MAMBA)
_JAMBA = Family(
    JambaConfig,
    JambaForCausalLM,
    {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
    },
)
_KIMI = Family(
    KimiLinearConfig,
    KimiLinearForCausalLM,
    {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 48,
        "bos_token_id": 1,
    },
)


_BAILING = Family(
    BailingHybridConfig,
    BailingHybridForCausalLM,
    {
        "num_hidden_layers": 4,
        "layer_group_size": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
    },
)


class OlmoHybridForCausalLM(transformers.OlmoHybridForCausalLM):
    """Saved as it is published: transformers cuts its convolutions into three equal parts instead."""

    def save_pretrained(self, directory: Path, **options: Any) -> None:  # type: ignore[override]
        """Convolutions as wide as the projections that they follow."""
        super().save_pretrained(directory, **options)
        for file in Path(directory).glob("*.safetensors"):
            tensors = load_file(file)
            ends = [name for name in tensors if name.endswith(".q_conv1d.weight")]
            for name in ends:
                names = [name.replace(".q_conv1d.", f".{kind}_conv1d.") for kind in "qkv"]
                config = self.config
                keys = config.linear_num_key_heads * config.linear_key_head_dim
                sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
                whole = torch.cat([tensors[each] for each in names])
                parts = zip(names, torch.split(whole, sizes), strict=True)
                tensors |= {each: part.clone() for each, part in parts}
            save_file(tensors, file, metadata={"format": "pt"})


_OLMO = Family(
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    {"num_hidden_layers": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 32},
)

VARIANTS = [
    Variant("Mamba2ForCausalLM", "two groups", _MAMBA2, {}),
    Variant(
        "Mamba2ForCausalLM",
        "one group, biases, wide convolution, tied",
        _MAMBA2,
        {"n_groups": 1, "use_bias": True, "conv_kernel": 5, "tie_word_embeddings": True},
    ),
    Variant(
        "Mamba2ForCausalLM",
        "odd heads and states, narrow convolution without biases, time steps limited, three layers",
        _MAMBA2,
        {
            "hidden_size": 45,
            "num_heads": 6,
            "head_dim": 15,
            "n_groups": 3,
            "state_size": 11,
            "conv_kernel": 2,
            "use_conv_bias": False,
            "time_step_limit": (0.1, 0.9),
            "num_hidden_layers": 3,
        },
    ),
    Variant("MiniMaxForCausalLM", "two layers in three of lightning attention, two of four experts", _MINIMAX, {}),
    Variant(
        "MiniMaxForCausalLM",
        "factors of residuals and of what is added, every expert, tied",
        _MINIMAX,
        {
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
            "linear_attn_alpha_factor": 3.5,
            "linear_attn_beta_factor": 1.25,
            "full_attn_alpha_factor": 2.5,
            "full_attn_beta_factor": 0.5,
            "mlp_alpha_factor": 1.5,
            "mlp_beta_factor": 0.75,
        },
    ),
    Variant(
        "MiniMaxForCausalLM",
        "six heads of 12, layers by their order",
        _MINIMAX,
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "layer_types": None,
            "num_hidden_layers": 4,
        },
    ),
    Variant("MambaForCausalLM", "tied", _MAMBA1, {}),
    Variant("MambaForCausalLM", "biases, wide convolution, untied, rank by default", _MAMBA1, _MAMBA_WIDE),
    Variant("MambaForCausalLM", "odd channels and states, narrow convolution without biases", _MAMBA1, _MAMBA_ODD),
    Variant("FalconMambaForCausalLM", "norms of time steps, keys and queries", _FALCON_MAMBA, {}),
    Variant("FalconMambaForCausalLM", "biases, wide convolution, untied", _FALCON_MAMBA, _MAMBA_WIDE),
    Variant(
        "FalconMambaForCausalLM",
        "odd channels and states, large epsilon",
        _FALCON_MAMBA,
        {**_MAMBA_ODD, "mixer_rms_eps": 0.1},
    ),
    Variant("JambaForCausalLM", "one layer in three attends, experts in every other layer", _JAMBA, {}),
    Variant(
        "JambaForCausalLM",
        "every layer of experts, biases, wide convolution, tied",
        _JAMBA,
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 4,
            "mamba_proj_bias": True,
            "mamba_d_conv": 6,
            "mamba_dt_rank": "auto",
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "JambaForCausalLM",
        "dense, odd channels and states, one KV head",
        _JAMBA,
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "mamba_expand": 1,
            "mamba_d_state": 5,
            "mamba_conv_bias": False,
            "attn_layer_offset": 0,
        },
    ),
    Variant("BailingHybridForCausalLM", "one layer in three of latents, two of four experts", _BAILING, {}),
    Variant(
        "BailingHybridForCausalLM",
        "groups of experts, wide heads and convolution, decays without a bound",
        _BAILING,
        {
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "head_dim": 32,
            "short_conv_kernel_size": 6,
            "kda_safe_gate": False,
        },
    ),
    Variant(
        "BailingHybridForCausalLM",
        "six heads of 12, a tight bound, wide values, weights not normalised",
        _BAILING,
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": 12,
            "v_head_dim": 24,
            "kda_lower_bound": -1.5,
            "norm_topk_prob": False,
        },
    ),
    Variant("KimiLinearForCausalLM", "one layer in four of latents, two of four experts", _KIMI, {}),
    Variant(
        "KimiLinearForCausalLM",
        "groups of experts, queries with a latent, wide heads and convolution",
        _KIMI,
        {
            "q_lora_rank": 24,
            "num_experts": 8,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "linear_head_dim": 32,
            "linear_conv_kernel_dim": 6,
            "routed_scaling_factor": 1.5,
        },
    ),
    Variant(
        "KimiLinearForCausalLM",
        "six heads of 48, layers by number, weights not normalised",
        _KIMI,
        {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 48,
                "num_heads": 6,
                "short_conv_kernel_size": 3,
            },
            "layer_types": None,
            "num_hidden_layers": 3,
            "moe_renormalize": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
    Variant("OlmoHybridForCausalLM", "one layer in four attends, states move past values", _OLMO, {}),
    Variant(
        "OlmoHybridForCausalLM",
        "without positions, two value heads a key head, wide convolution, tied",
        _OLMO,
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_num_key_heads": 2,
            "linear_conv_kernel_dim": 6,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "OlmoHybridForCausalLM",
        "shares below one, layers in turn, odd heads, biases",
        # Convolutions in three equal parts, as transformers saves them.
        _OLMO._replace(model_class=transformers.OlmoHybridForCausalLM),
        {
            "linear_allow_neg_eigval": False,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_value_head_dim": 20,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "attention_bias": True,
        },
    ),
]
