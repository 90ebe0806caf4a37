"""Parameters that know how a checkpoint's tensor goes into them. Used by the layers and the loader."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

WeightLoader: TypeAlias = Callable[[nn.Parameter, torch.Tensor, str | int | None], None]
"""`(parameter, tensor of the checkpoint, shard)`: the shard names a part of a packed parameter, None the whole."""


class WeightShapeError(ValueError):
    """A checkpoint's tensor has another shape than the model's."""

    def __init__(self, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(f"shape {list(found)}, where the model needs {list(expected)}")


def empty_parameter(*shape: int, weight_loader: WeightLoader) -> nn.Parameter:
    """An uninitialised parameter of the default dtype and device, filled by `weight_loader`."""
    parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
    # A subclass of Parameter would carry this by type, but torch dispatches every operator on it more slowly.
    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    return parameter


def weight_loader_of(parameter: nn.Parameter) -> WeightLoader:
    """What `empty_parameter` was given."""
    loader: WeightLoader = parameter.weight_loader  # type: ignore[attr-defined]
    return loader


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, _shard: str | int | None = None) -> None:
    """The loader of a parameter that every rank holds whole."""
    require_shape(loaded, tuple(parameter.shape))
    parameter.data.copy_(loaded)


def require_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless `loaded` has the shape of the checkpoint's whole tensor."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)
