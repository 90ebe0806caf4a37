"""Parameters that know how they are filled from a checkpoint's tensors. Used by the layers and the loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from models.ops.cpu.dense import PANEL, CodedWeight, PackedWeight, QuantizedWeight, weight_of
from models.ops.cpu.structures import MAX_IN_FEATURES
from models.ops.stored_weight import stored_of
from models.ops.weight_formats import RUN
from models.quantization.config import ROUNDINGS, Rounding, WeightBits
from models.quantization.stored import codes_of, fill_stored

WeightPart: TypeAlias = str | int | tuple[int, str] | None
"""A part of a packed parameter, `(expert, part)` for experts; None: all of it."""
WeightLoader: TypeAlias = Callable[[nn.Parameter, torch.Tensor, WeightPart], None]
"""Called with the parameter, a tensor of the checkpoint, and the part that it fills."""
SourceNames: TypeAlias = Mapping[str, WeightPart]
"""The checkpoint's tensors that fill one parameter: the part that each fills, by its name after the module's
parent."""


@dataclass(slots=True)
class _Weight:
    """What a parameter of `empty_parameter` carries as its attribute `weight`.

    An attribute, because torch dispatches every operator on a subclass of Parameter more slowly.
    """

    weight_loader: WeightLoader
    sources: tuple[SourceNames, ...]
    is_product: bool
    min_bits: WeightBits
    packed: PackedWeight | None = None
    """The weight as the CPU operators read it, in place of the parameter's own memory."""
    onednn: torch.Tensor | None = None
    """The weight as oneDNN reads it."""


class WeightShapeError(ValueError):
    """A checkpoint's tensor has another shape than the model's."""

    def __init__(self, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        super().__init__(f"shape {list(found)}, where the model needs {list(expected)}")


def empty_parameter(
    *shape: int,
    weight_loader: WeightLoader,
    dtype: torch.dtype | None = None,
    sources: tuple[SourceNames, ...] = (),
    is_product: bool = False,
    min_bits: WeightBits = 4,
) -> nn.Parameter:
    """An uninitialised parameter on the default device, of the default dtype or its own, filled by `weight_loader`.

    `sources`: the namings of its tensors, of which a checkpoint uses one; empty for a parameter that the checkpoint
    holds under its own name. `is_product`: the layer reads it through `models.layers.linear` only, and fills it
    through `fill_rows`, so that it may be kept in another form. `min_bits`: the fewest bits that it may be rounded to.
    """
    waits = is_product and _products_wait
    memory = torch.empty(1, dtype=dtype).expand(shape) if waits else torch.empty(shape, dtype=dtype)
    parameter = nn.Parameter(memory, requires_grad=False)
    parameter.weight = _Weight(weight_loader, sources, is_product, min_bits)  # type: ignore[attr-defined]
    return parameter


def _weight_of(parameter: nn.Parameter) -> _Weight | None:
    """None for a parameter that `empty_parameter` did not make."""
    return getattr(parameter, "weight", None)


def _own_weight(parameter: nn.Parameter) -> _Weight:
    weight: _Weight = parameter.weight  # type: ignore[attr-defined]
    return weight


_products_wait = False


@contextmanager
def products_without_memory() -> Iterator[None]:
    """Inside, parameters of products are made without memory, which `take_memory` allocates."""
    global _products_wait
    _products_wait = True
    try:
        yield
    finally:
        _products_wait = False


def take_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Allocate the parameters that have no memory and no other form, packed or quantised."""
    for parameter in parameters:
        has_no_memory = parameter.dim() > 0 and not any(parameter.stride()) and parameter.numel() > 1
        if has_no_memory and packed_of(parameter) is None and stored_of(parameter) is None:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def weight_loader_of(parameter: nn.Parameter) -> WeightLoader:
    """The `weight_loader` of `empty_parameter`."""
    return _own_weight(parameter).weight_loader


def sources_of(parameter: nn.Parameter) -> tuple[SourceNames, ...]:
    """The `sources` of `empty_parameter`."""
    return _own_weight(parameter).sources


def packed_parts(model: nn.Module) -> dict[str, list[tuple[str, str | int]]]:
    """By module that packs several of the checkpoint's: the name of each, and the part that it fills."""
    parts: dict[str, list[tuple[str, str | int]]] = {}
    for source, (packed, part) in cast("dict[str, tuple[str, str | int]]", model.packed_modules_mapping).items():
        parts.setdefault(packed, []).append((source, part))
    return parts


def checkpoint_name(name: str, model: nn.Module) -> str:
    """The name in checkpoints of one of the model's modules or parameters."""
    renamed: Mapping[str, str] = getattr(model, "checkpoint_modules", {})
    return ".".join(renamed.get(part, part) for part in name.split("."))


def mark_read_directly(parameter: nn.Parameter) -> None:
    """Declare that a layer reads the weight directly, so that it stays dense."""
    _own_weight(parameter).is_product = False


def is_product(parameter: nn.Parameter) -> bool:
    """Whether the weight is read through `models.layers.linear` only."""
    weight = _weight_of(parameter)
    return weight is not None and weight.is_product


def pack_products(model: nn.Module, rounding: Rounding | None = None) -> None:
    """Have an unfilled model keep the weights of products in the form that the CPU operators read.

    They are rounded as they are filled, at least to a layer's fewest bits.
    """
    for parameter in model.parameters():
        if can_be_packed(parameter):
            # Weights of a stack follow each other.
            rows, inputs, form = parameter.shape[:-1].numel(), parameter.shape[-1], rounding_of(parameter, rounding)
            if form is None:
                packed = PackedWeight(rows, inputs)
            elif form == "mxfp4":
                packed = CodedWeight(rows, inputs, bits=ROUNDINGS[form], rounds=True)
            else:
                packed = QuantizedWeight(rows, inputs, 8 if form == "int8" else 4)
            _own_weight(parameter).packed = packed
            parameter.data = torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape)


def keep_codes(parameter: nn.Parameter, bits: int) -> None:
    """Have an unfilled packed weight, or stack of them, hold a quantised checkpoint's codes as `CodedWeight` does."""
    rows, inputs = parameter.shape[:-1].numel(), parameter.shape[-1]
    _own_weight(parameter).packed = CodedWeight(rows, inputs, bits=bits)


def weight_bytes(parameter: nn.Parameter) -> int:
    """The memory of a parameter in its form."""
    packed = packed_of(parameter)
    return parameter.nbytes if packed is None else packed.expected_bytes


def rounding_of(parameter: nn.Parameter, rounding: Rounding | None) -> Rounding | None:
    """How a weight `can_be_packed` is rounded in a model of that rounding; None: not at all."""
    fewest = _own_weight(parameter).min_bits
    if rounding == "mxfp4":
        # Where 4 bits are too few, MXFP4 checkpoints have bfloat16.
        return rounding if fewest == ROUNDINGS[rounding] and parameter.shape[-1] % (2 * RUN) == 0 else None
    if rounding is None or fewest == 16:
        return None
    return "int8" if fewest == 8 else rounding


def can_be_packed(parameter: nn.Parameter) -> bool:
    """Whether the CPU operators have a form for the weight."""
    if not is_product(parameter):
        return False
    is_one_weight = parameter.dim() == 2
    return parameter.shape[-1] <= MAX_IN_FEATURES and (is_one_weight or parameter.shape[-2] % PANEL == 0)


def packed_of(parameter: nn.Parameter) -> PackedWeight | None:
    """The weight as the CPU operators read it; None where it is in another form."""
    weight = _weight_of(parameter)
    return None if weight is None else weight.packed


def restore_packed(parameter: nn.Parameter, form: list[Any], memory: torch.Tensor) -> None:
    """Give a weight the packed form and the memory that it had in another process. Raises `ValueError`."""
    _own_weight(parameter).packed = weight_of(form, parameter.shape[:-1].numel(), parameter.shape[-1], memory)


def onednn_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The weight as oneDNN reads it; None where it is in another form."""
    weight = _weight_of(parameter)
    return None if weight is None else weight.onednn


def keep_for_onednn(parameter: nn.Parameter, reordered: torch.Tensor) -> None:
    """Keep the weight as oneDNN reads it."""
    _own_weight(parameter).onednn = reordered


def fill_rows(parameter: nn.Parameter, first: int, rows: torch.Tensor, expert_index: int | None = None) -> None:
    """Fill rows of a weight, or elements of a bias, from `first` on; of a stack of experts, those of one expert."""
    packed = packed_of(parameter)
    if packed is not None:
        first += (expert_index or 0) * parameter.shape[-2]
        codes = codes_of(rows)
        if codes is not None and packed.takes(codes):
            packed.put_codes(first, codes)
            return
        if isinstance(packed, CodedWeight) and not packed.rounds:
            packed = _own_weight(parameter).packed = packed.dense()
        packed.put(first, rows if codes is None else codes.dense())
    elif not fill_stored(parameter, first, rows, expert_index):
        whole = parameter.data if expert_index is None else parameter.data[expert_index]
        whole[first : first + len(rows)].copy_(rows)


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, _shard: WeightPart = None) -> None:
    """The weight loader of a parameter that every rank holds whole."""
    require_shape(loaded, tuple(parameter.shape))
    fill_rows(parameter, 0, loaded)


def require_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless `loaded` has the shape of the checkpoint's whole tensor."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)
