"""The architectures that have a model here, by Hugging Face name. Used by the configuration and the loader."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from models.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


INDEXED_LAYERS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""In `layer_types`, layers whose queries choose the tokens that they attend to: by its present name, and by the one of
transformers 5.17."""


class Architecture(NamedTuple):
    """Where a model is written."""

    module: str
    name: str
    """Of its class."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Fields that its config.json may leave out."""
    head_dim_field: str = "head_dim"
    """The field that holds how many dimensions of a head may be rotated."""
    is_windowed: bool = False
    """Whether every layer has a sliding window where its config.json names just that."""
    layer_kinds: frozenset[str] = frozenset()
    """Names in `layer_types` beside those of full and windowed attention."""
    full_attention_every: int | None = None
    """Every so manieth layer attends to all, the others in a window, where its config.json has no `layer_types`."""
    prediction_modules: tuple[str, ...] = ()
    """What predicts further tokens in its checkpoints beside the layers proper, by how its tensors' names begin."""


ARCHITECTURES = {
    "GptOssForCausalLM": Architecture(
        "models.architectures.gpt_oss",
        "GptOssForCausalLM",
        {"attention_bias": True, "head_dim": 64, "rope_theta": 150000.0},
        full_attention_every=2,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "models.architectures.deepseek_v2", "DeepseekV2ForCausalLM", head_dim_field="qk_rope_head_dim"
    ),
    "DeepseekV32ForCausalLM": Architecture(
        "models.architectures.deepseek_v2",
        "DeepseekV2ForCausalLM",
        head_dim_field="qk_rope_head_dim",
        layer_kinds=INDEXED_LAYERS,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "models.architectures.deepseek_v2", "DeepseekV2ForCausalLM", head_dim_field="qk_rope_head_dim"
    ),
    "Gemma3ForCausalLM": Architecture(
        "models.architectures.gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "vocab_size": 262208,
        },
        full_attention_every=6,
    ),
    "Phi3ForCausalLM": Architecture("models.architectures.phi3", "Phi3ForCausalLM", is_windowed=True),
    "LlamaForCausalLM": Architecture("models.architectures.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": Architecture("models.architectures.llama", "LlamaForCausalLM", is_windowed=True),
    "Qwen2ForCausalLM": Architecture("models.architectures.qwen2", "Qwen2ForCausalLM", {"attention_bias": True}),
    "Qwen3ForCausalLM": Architecture("models.architectures.qwen3", "Qwen3ForCausalLM", {"head_dim": 128}),
    "Qwen3MoeForCausalLM": Architecture(
        "models.architectures.qwen3_moe", "Qwen3MoeForCausalLM", {"max_window_layers": 0, "sliding_window": 4096}
    ),
    "Qwen3NextForCausalLM": Architecture(
        "models.architectures.qwen3_next",
        "Qwen3NextForCausalLM",
        {"head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True},
        layer_kinds=frozenset({"linear_attention"}),
        prediction_modules=("mtp.",),
    ),
    "MixtralForCausalLM": Architecture("models.architectures.mixtral", "MixtralForCausalLM", is_windowed=True),
    "Glm4MoeForCausalLM": Architecture(
        "models.architectures.glm4_moe",
        "Glm4MoeForCausalLM",
        {"n_group": 1, "partial_rotary_factor": 0.5, "topk_group": 1},
    ),
}
SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)


def resolve_model_class(architecture: str) -> "type[nn.Module]":
    """The class of that name, its module imported. Raises `CheckpointError` for an architecture without one."""
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture is {architecture!r}, which is not supported; it must be one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    entry = ARCHITECTURES[architecture]
    return cast("type[nn.Module]", getattr(import_module(entry.module), entry.name))
