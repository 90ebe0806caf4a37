"""Model parameters that carry their own weight loader, and the forms in which a weight may be kept.

A layer creates each parameter with `empty_parameter`. The loader reads a checkpoint tensor, finds the parameter that
it fills (`sources_of`, or the tensor's own name), and calls `weight_loader_of(parameter)`. A weight that is only
multiplied (`is_product`) may replace its dense memory by the packed layout of the CPU operators, the layout of oneDNN,
or a quantised checkpoint's stored codes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from models.ops.cpu.dense import dequantized
from models.ops.cpu.packed_weight import CodedWeight, PackedWeight, QuantizedWeight, padded, weight_of
from models.ops.cpu.structures import MAX_IN_FEATURES
from models.ops.stored_weight import stored_of
from models.ops.weight_formats import RUN
from models.quantization.config import ROUNDINGS, Rounding, WeightBits
from models.quantization.stored import codes_of, fill_stored

WeightPart: TypeAlias = str | int | tuple[int, str] | None
"""A part of a parameter that several checkpoint tensors fill, `(expert, part)` for experts; None: all of it."""
WeightLoader: TypeAlias = Callable[[nn.Parameter, torch.Tensor, WeightPart], None]
"""Called with the parameter, a checkpoint tensor, and the part of the parameter that it fills."""
SourceNames: TypeAlias = Mapping[str, WeightPart]
"""The checkpoint tensors that fill one parameter: maps the tensor's name, relative to the module's parent, to the part
that it fills."""


@dataclass(slots=True)
class _Weight:
    """Loader data of a parameter made by `empty_parameter`, kept in the parameter's attribute `weight`.

    It is an attribute and not a subclass of Parameter because torch dispatches operators on subclasses more slowly.
    """

    weight_loader: WeightLoader
    sources: tuple[SourceNames, ...]
    is_product: bool
    min_bits: WeightBits
    packed: PackedWeight | None = None
    """The weight in the layout of the CPU operators, which replaces the parameter's own memory."""
    onednn: torch.Tensor | None = None
    """The weight in the layout of oneDNN."""


class WeightShapeError(ValueError):
    """A checkpoint tensor's shape differs from the shape that the model needs."""

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
    """Create an uninitialised parameter on the default device, of `dtype` or the default dtype.

    `sources`: alternative namings of its checkpoint tensors, of which a checkpoint uses one; empty if the checkpoint
    names the tensor as the model does. `is_product`: the layer reads the weight only through `models.layers.linear`
    and fills it through `fill_rows`, so that it may be kept in another form. `min_bits`: the fewest bits to which the
    weight may be rounded.
    """
    waits = is_product and _products_wait
    memory = torch.empty(1, dtype=dtype).expand(shape) if waits else torch.empty(shape, dtype=dtype)
    parameter = nn.Parameter(memory, requires_grad=False)
    parameter.weight = _Weight(weight_loader, sources, is_product, min_bits)  # type: ignore[attr-defined]
    return parameter


def _weight_of(parameter: nn.Parameter) -> _Weight | None:
    """Return the loader data, or None if `empty_parameter` did not make the parameter."""
    return getattr(parameter, "weight", None)


def _own_weight(parameter: nn.Parameter) -> _Weight:
    weight: _Weight = parameter.weight  # type: ignore[attr-defined]
    return weight


_products_wait = False


@contextmanager
def products_without_memory() -> Iterator[None]:
    """Within the context, `is_product` parameters are created without memory; `take_memory` allocates it later."""
    global _products_wait
    _products_wait = True
    try:
        yield
    finally:
        _products_wait = False


def take_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Allocate dense memory for those parameters that have none and are in no packed or quantised form."""
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
    """Map each module that packs several checkpoint modules to their names and the parts that they fill."""
    parts: dict[str, list[tuple[str, str | int]]] = {}
    for source, (packed, part) in cast("dict[str, tuple[str, str | int]]", model.packed_modules_mapping).items():
        parts.setdefault(packed, []).append((source, part))
    return parts


def checkpoint_name(name: str, model: nn.Module) -> str:
    """Return the checkpoint's name of a module or parameter of the model."""
    renamed: Mapping[str, str] = getattr(model, "checkpoint_modules", {})
    return ".".join(renamed.get(part, part) for part in name.split("."))


def mark_read_directly(parameter: nn.Parameter) -> None:
    """Declare that a layer reads the weight other than by `models.layers.linear`, so that it must stay dense."""
    _own_weight(parameter).is_product = False


def is_product(parameter: nn.Parameter) -> bool:
    """Whether the weight is read only through `models.layers.linear`."""
    weight = _weight_of(parameter)
    return weight is not None and weight.is_product


def pack_products(model: nn.Module, rounding: Rounding | None = None) -> None:
    """Have an unfilled model keep its `is_product` weights in the layout of the CPU operators.

    With `rounding`, weights are rounded when they are filled, but to no fewer bits than a layer's `min_bits`.
    """
    for parameter in model.parameters():
        if can_be_packed(parameter):
            rows, inputs, form = _packed_rows(parameter), parameter.shape[-1], rounding_of(parameter, rounding)
            if form is None:
                packed = PackedWeight(rows, inputs)
            elif form == "mxfp4":
                packed = CodedWeight(rows, inputs, bits=ROUNDINGS[form], rounds=True)
            else:
                packed = QuantizedWeight(rows, inputs, 8 if form == "int8" else 4)
            _own_weight(parameter).packed = packed
            parameter.data = torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape)


def keep_codes(parameter: nn.Parameter, bits: int) -> None:
    """Have an unfilled packed weight, or a stack of them, hold the codes of a quantised checkpoint unchanged."""
    _own_weight(parameter).packed = CodedWeight(_packed_rows(parameter), parameter.shape[-1], bits=bits)


def weight_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of memory that the parameter takes in the form in which it is kept."""
    packed = packed_of(parameter)
    return parameter.nbytes if packed is None else packed.expected_bytes


def rounding_of(parameter: nn.Parameter, rounding: Rounding | None) -> Rounding | None:
    """Return the rounding of a packable weight in a model with `rounding`, or None if the weight is not rounded."""
    fewest = _own_weight(parameter).min_bits
    if rounding == "mxfp4":
        # MXFP4 has only a 4-bit form, so weights that need more bits stay bfloat16, as in MXFP4 checkpoints.
        return rounding if fewest == ROUNDINGS[rounding] and parameter.shape[-1] % (2 * RUN) == 0 else None
    if rounding is None or fewest == 16:
        return None
    return "int8" if fewest == 8 else rounding


def can_be_packed(parameter: nn.Parameter) -> bool:
    """Whether the CPU operators have a layout for the weight."""
    return is_product(parameter) and parameter.shape[-1] <= MAX_IN_FEATURES


def _packed_rows(parameter: nn.Parameter) -> int:
    """Rows of the packed weight. A stack of experts is packed as one matrix, each expert padded to whole panels."""
    *stack, rows, _ = parameter.shape
    return math.prod(stack) * padded(rows) if stack else rows


def packed_of(parameter: nn.Parameter) -> PackedWeight | None:
    """Return the weight in the layout of the CPU operators, or None if it is in another form."""
    weight = _weight_of(parameter)
    return None if weight is None else weight.packed


def restore_packed(parameter: nn.Parameter, form: list[Any], memory: torch.Tensor) -> None:
    """Restore the packed layout and memory that the weight had in another process.

    Raises `ValueError` if `form` or the size of `memory` does not fit the parameter.
    """
    _own_weight(parameter).packed = weight_of(form, _packed_rows(parameter), parameter.shape[-1], memory)


def onednn_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the weight in the layout of oneDNN, or None if it is in another form."""
    weight = _weight_of(parameter)
    return None if weight is None else weight.onednn


def keep_for_onednn(parameter: nn.Parameter, reordered: torch.Tensor) -> None:
    """Store the weight in the layout of oneDNN."""
    _own_weight(parameter).onednn = reordered


def fill_rows(parameter: nn.Parameter, first: int, rows: torch.Tensor, expert_index: int | None = None) -> None:
    """Write `rows` into a weight, or elements into a bias, starting at `first`; in a stack, into `expert_index`."""
    packed = packed_of(parameter)
    if packed is not None:
        first += (expert_index or 0) * padded(parameter.shape[-2])
        codes = codes_of(rows)
        if codes is not None and packed.accepts(codes):
            packed.put_codes(first, codes)
            return
        if isinstance(packed, CodedWeight) and not packed.rounds:
            packed = _own_weight(parameter).packed = dequantized(packed)
        packed.put(first, rows if codes is None else codes.dense())
    elif not fill_stored(parameter, first, rows, expert_index):
        whole = parameter.data if expert_index is None else parameter.data[expert_index]
        whole[first : first + len(rows)].copy_(rows)


def load_whole(parameter: nn.Parameter, loaded: torch.Tensor, _shard: WeightPart = None) -> None:
    """Weight loader of a parameter that is not sharded."""
    require_shape(loaded, tuple(parameter.shape))
    fill_rows(parameter, 0, loaded)


def rows_loader(first: int, whole: int) -> WeightLoader:
    """Weight loader of a parameter that holds the rows from `first` on of a checkpoint tensor of `whole` rows."""

    def load(parameter: nn.Parameter, loaded: torch.Tensor, _shard: WeightPart) -> None:
        require_shape(loaded, (whole, *parameter.shape[1:]))
        parameter.data.copy_(loaded[first : first + len(parameter)])

    return load


def require_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `WeightShapeError` unless the checkpoint tensor `loaded` has the shape `expected`."""
    if tuple(loaded.shape) != expected:
        raise WeightShapeError(tuple(loaded.shape), expected)
