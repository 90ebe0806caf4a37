"""Parameters that know how a checkpoint's tensor goes into them. Used by the layers and the loader."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from models.kernels.cpu.ops import PackedWeight

Shard: TypeAlias = str | int | tuple[int, str] | None
"""A part of a packed parameter, `(expert, part)` where it packs experts; None: the whole."""
WeightLoader: TypeAlias = Callable[[nn.Parameter, torch.Tensor, Shard], None]
"""`(parameter, tensor of the checkpoint, shard)`."""
Spelling: TypeAlias = Mapping[str, Shard]
"""The checkpoint's tensors that fill one parameter: names relative to the parent of the parameter's module."""


class WeightShapeError(ValueError):
    """A checkpoint's tensor has another shape than the model's."""

    def __init__(self, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(f"shape {list(found)}, where the model needs {list(expected)}")


def empty_parameter(
    *shape: int,
    weight_loader: WeightLoader,
    dtype: torch.dtype | None = None,
    sources: tuple[Spelling, ...] = (),
) -> nn.Parameter:
    """An uninitialised parameter on the default device, of the default dtype or its own, filled by `weight_loader`.

    `sources`: the spellings that checkpoints come in, of which each uses one; empty for a parameter that the
    checkpoint holds under its own name.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    # A subclass of Parameter would carry this by type, but torch dispatches every operator on it more slowly.
    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    parameter.sources = sources  # type: ignore[attr-defined]
    return parameter


def weight_loader_of(parameter: nn.Parameter) -> WeightLoader:
    """What `empty_parameter` was given."""
    loader: WeightLoader = parameter.weight_loader  # type: ignore[attr-defined]
    return loader


def sources_of(parameter: nn.Parameter) -> tuple[Spelling, ...]:
    """What `empty_parameter` was given."""
    spellings: tuple[Spelling, ...] = parameter.sources  # type: ignore[attr-defined]
    return spellings


def pack(parameter: nn.Parameter) -> None:
    """Keep a weight, not yet filled, as the CPU's products read it; its own memory goes."""
    parameter.packed = PackedWeight(*parameter.shape)  # type: ignore[attr-defined]
    parameter.data = torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape)


def packed_of(parameter: nn.Parameter) -> PackedWeight | None:
    """The memory of a weight that `pack` was called for."""
    return getattr(parameter, "packed", None)


def fill_rows(parameter: nn.Parameter, first: int, rows: torch.Tensor) -> None:
    """Put rows of a weight, or elements of a bias, into their places from `first` on."""
    packed = packed_of(parameter)
    if packed is None:
        parameter.data[first : first + len(rows)].copy_(rows)
    else:
        packed.put(first, rows)


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, _shard: Shard = None) -> None:
    """The loader of a parameter that every rank holds whole."""
    require_shape(loaded, tuple(parameter.shape))
    parameter.data.copy_(loaded)


def require_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless `loaded` has the shape of the checkpoint's whole tensor."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)
