"""The architectures that have a model here, by Hugging Face name. Used by the configuration and the loader."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from models.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


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


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": Architecture("models.llama", "LlamaForCausalLM", is_windowed=True),
    "Qwen2ForCausalLM": Architecture("models.qwen2", "Qwen2ForCausalLM", {"attention_bias": True}),
    "Qwen3ForCausalLM": Architecture("models.qwen3", "Qwen3ForCausalLM", {"head_dim": 128}),
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
