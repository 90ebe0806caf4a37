"""Models of 2021 to 2023 whose attention transformers computes by code of their own, most with ALiBi."""

from typing import Any, cast

from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedConfig,
)

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant

_BLOOM = Family(BloomConfig, BloomForCausalLM)
_MPT = Family(MptConfig, MptForCausalLM, {"max_seq_len": 512})


def _falcon_config(**fields: Any) -> FalconConfig:
    """The size of a head follows from others, and cannot be set."""
    fields.pop("head_dim", None)
    return FalconConfig(**fields)


_FALCON = Family(cast("type[PreTrainedConfig]", _falcon_config), FalconForCausalLM)
_SEQUENTIAL = {"multi_query": False, "parallel_attn": False, "bias": True}
_GPTJ = Family(GPTJConfig, GPTJForCausalLM, {"rotary_dim": 8})

VARIANTS = [
    Variant("BloomForCausalLM", "four heads, tied", _BLOOM, {}),
    Variant(
        "BloomForCausalLM",
        "six heads of 12, untied",
        _BLOOM,
        {"num_attention_heads": 6, "hidden_size": 72, "tie_word_embeddings": False},
    ),
    Variant(
        "BloomForCausalLM",
        "five heads of 8, three layers",
        _BLOOM,
        {"num_attention_heads": 5, "hidden_size": 40, "num_hidden_layers": 3},
    ),
    Variant("MptForCausalLM", "four heads, tied", _MPT, {}),
    Variant(
        "MptForCausalLM",
        "six heads of 12, untied, a scale of its own",
        _MPT,
        {
            "num_attention_heads": 6,
            "hidden_size": 72,
            "tie_word_embeddings": False,
            "attn_config": {"softmax_scale": 0.4},
        },
    ),
    Variant(
        "MptForCausalLM",
        "three heads, clamped, three layers",
        _MPT,
        {
            "num_attention_heads": 3,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "attn_config": {"clip_qkv": 1.5},
        },
    ),
    Variant("FalconForCausalLM", "one KV head", _FALCON, {}),
    Variant(
        "FalconForCausalLM",
        "three query heads a KV head, a norm for each branch, untied",
        _FALCON,
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "hidden_size": 72,
            "tie_word_embeddings": False,
        },
    ),
    Variant("FalconForCausalLM", "ALiBi, one branch after the other, biases", _FALCON, {**_SEQUENTIAL, "alibi": True}),
    Variant(
        "FalconForCausalLM",
        "one norm for both branches, stretched context",
        _FALCON,
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    Variant("GPTJForCausalLM", "half of a head rotated", _GPTJ, {}),
    Variant(
        "GPTJForCausalLM",
        "all of a head rotated, six heads of 12, GELU",
        _GPTJ,
        {"num_attention_heads": 6, "hidden_size": 72, "rotary_dim": 12, "activation_function": "gelu"},
    ),
    Variant(
        "GPTJForCausalLM",
        "narrow networks, tied, three layers",
        _GPTJ,
        {
            "n_inner": 48,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
        },
    ),
]
