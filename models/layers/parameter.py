"""Parameters that know how a checkpoint's tensor goes into them. Used by the layers and the loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from models.ops.cpu.dense import PANEL, PackedWeight, QuantizedWeight, quantized_bytes
from models.ops.cpu.structures import MAX_IN_FEATURES
from models.quantization.config import WeightBits
from models.quantization.stored import fill_stored

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
    is_product: bool = False,
    fewest_bits: WeightBits = 4,
) -> nn.Parameter:
    """An uninitialised parameter on the default device, of the default dtype or its own, filled by `weight_loader`.

    `sources`: the spellings that checkpoints come in, of which each uses one; empty for a parameter that the
    checkpoint holds under its own name. `is_product`: the layer uses it by `models.layers.linear` alone, and fills
    it by `fill_rows`, so that it may lie as products read it. `fewest_bits`: that such a weight may be rounded to.
    """
    waits = is_product and _products_wait
    memory = torch.empty(1, dtype=dtype).expand(shape) if waits else torch.empty(shape, dtype=dtype)
    parameter = nn.Parameter(memory, requires_grad=False)
    # A subclass of Parameter would carry this by type, but torch dispatches every operator on it more slowly.
    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    parameter.sources = sources  # type: ignore[attr-defined]
    parameter.is_product = is_product  # type: ignore[attr-defined]
    parameter.fewest_bits = fewest_bits  # type: ignore[attr-defined]
    return parameter


_products_wait = False


@contextmanager
def products_without_memory() -> Iterator[None]:
    """Parameters of products made inside have memory only from `take_memory` on."""
    global _products_wait
    _products_wait = True
    try:
        yield
    finally:
        _products_wait = False


def take_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Give memory to those that have none and do not lie elsewhere: in the form that products read, or quantised."""
    for parameter in parameters:
        is_bare = parameter.dim() > 0 and not any(parameter.stride()) and parameter.numel() > 1
        if is_bare and not any(hasattr(parameter, place) for place in ("packed", "stored")):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def weight_loader_of(parameter: nn.Parameter) -> WeightLoader:
    """What `empty_parameter` was given."""
    loader: WeightLoader = parameter.weight_loader  # type: ignore[attr-defined]
    return loader


def sources_of(parameter: nn.Parameter) -> tuple[Spelling, ...]:
    """What `empty_parameter` was given."""
    spellings: tuple[Spelling, ...] = parameter.sources  # type: ignore[attr-defined]
    return spellings


def read_whole(parameter: nn.Parameter) -> None:
    """Say that a layer reads the weight itself, not by products alone."""
    parameter.is_product = False  # type: ignore[attr-defined]


def is_product(parameter: nn.Parameter) -> bool:
    """Whether products alone read the weight."""
    found: bool = parameter.is_product  # type: ignore[attr-defined]
    return found


def pack_products(model: nn.Module, weight_bits: WeightBits = 16) -> None:
    """Keep the weights of an unfilled model that are products' as the CPU's operators read them.

    `weight_bits`: what they are rounded to as they are filled, or more where a layer needs more.
    """
    for parameter in model.parameters():
        if _can_be_packed(parameter):
            # Weights of a stack follow each other.
            rows, inputs, bits = parameter.shape[:-1].numel(), parameter.shape[-1], _bits_of(parameter, weight_bits)
            packed = PackedWeight(rows, inputs) if bits == 16 else QuantizedWeight(rows, inputs, bits)
            parameter.packed = packed  # type: ignore[attr-defined]
            parameter.data = torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape)


def weight_bytes(parameter: nn.Parameter, weight_bits: WeightBits = 16) -> int:
    """Memory that a parameter takes in a model of such weights."""
    bits = _bits_of(parameter, weight_bits) if _can_be_packed(parameter) else 16
    if bits == 16:
        return parameter.nbytes
    return quantized_bytes(parameter.shape[:-1].numel(), parameter.shape[-1], bits)


def _can_be_packed(parameter: nn.Parameter) -> bool:
    if not parameter.is_product:  # type: ignore[attr-defined]
        return False
    is_one_weight = parameter.dim() == 2
    return parameter.shape[-1] <= MAX_IN_FEATURES and (is_one_weight or parameter.shape[-2] % PANEL == 0)


def _bits_of(parameter: nn.Parameter, weight_bits: WeightBits) -> WeightBits:
    fewest: WeightBits = parameter.fewest_bits  # type: ignore[attr-defined]
    return max(fewest, weight_bits)


def packed_of(parameter: nn.Parameter) -> PackedWeight | None:
    """The memory of a weight that lies as products read it."""
    return getattr(parameter, "packed", None)


def onednn_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """A weight as oneDNN reads it, where `models.layers.linear` packed it."""
    return getattr(parameter, "onednn", None)


def fill_rows(parameter: nn.Parameter, first: int, rows: torch.Tensor, place: int | None = None) -> None:
    """Put rows of a weight, or elements of a bias, into their places from `first` on; those of one of a stack."""
    packed = packed_of(parameter)
    if packed is not None:
        packed.put(first + (place or 0) * parameter.shape[-2], rows)
    elif not fill_stored(parameter, first, rows, place):
        whole = parameter.data if place is None else parameter.data[place]
        whole[first : first + len(rows)].copy_(rows)


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, _shard: Shard = None) -> None:
    """The loader of a parameter that every rank holds whole."""
    require_shape(loaded, tuple(parameter.shape))
    fill_rows(parameter, 0, loaded)


def require_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless `loaded` has the shape of the checkpoint's whole tensor."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)
