"""The model class of each Hugging Face architecture name. Used by the loader."""

from importlib import import_module
from typing import TYPE_CHECKING, cast

from models.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

_MODULES = {
    "LlamaForCausalLM": "models.llama",
    "Qwen3ForCausalLM": "models.qwen3",
}
SUPPORTED_ARCHITECTURES = tuple(_MODULES)


def resolve_model_class(architecture: str) -> "type[nn.Module]":
    """The class of that name, its module imported. Raises `CheckpointError` for an architecture without one."""
    if architecture not in _MODULES:
        raise CheckpointError(
            f"architecture is {architecture!r}, which is not supported; it must be one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return cast("type[nn.Module]", getattr(import_module(_MODULES[architecture]), architecture))
