"""Weights that stay quantised: from a module's tensors to `QuantizedRows`, and a model's weight filled with them.

Loaders slice a checkpoint's tensors by rows and columns and know nothing of what these hold; so a quantised weight is
a tensor to them, of the dense one's shape and type, whose slices are quantised as well.
"""

from typing import Any

import torch
from torch import nn

from models.ops.stored_weight import make_dense, stored_of
from models.ops.weight_formats import Codes
from models.quantization.config import LayerQuantConfig


class QuantizedRows(torch.Tensor):
    """A quantised weight as a tensor of its shape and type. What needs its numbers has the dense ones."""

    held: Codes

    @staticmethod
    def of(held: Codes, dtype: torch.dtype) -> "QuantizedRows":
        """# [rows, inputs]"""
        made: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            QuantizedRows, held.codes.shape, dtype=dtype, device=torch.device("cpu")
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slices are quantised; any other operator has dense tensors."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.slice.Tensor:
            of, dim, first, last, step = (*args, *(0, 0, None, 1)[len(args) - 1 :])[:5]
            size = of.shape[dim]
            first, last = first or 0, size if last is None else min(last, size)
            held = of.held.part(dim, first, last) if step == 1 else None
            if held is not None:
                return QuantizedRows.of(held, of.dtype)
        dense = [arg.held.dense() if isinstance(arg, QuantizedRows) else arg for arg in args]
        return func(*dense, **(kwargs or {}))


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, place: int | None = None) -> bool:
    """Fill rows of a weight that stays quantized, of a stack those of weight `place`; False if the weight is dense.

    A weight whose rows differ in layout, or are dense in part, becomes dense.
    """
    stored = stored_of(parameter)
    if stored is None:
        return False
    codes = rows.held if isinstance(rows, QuantizedRows) else stored.codes_of(rows)
    if codes is not None and stored.put(first, codes, place):
        return True
    make_dense(parameter)
    return False


def can_be_rounded_again(stack: nn.Parameter, layer: LayerQuantConfig) -> bool:
    """Whether a stack that the checkpoint has in one tensor of MXFP4 may stay so. A rank may have some inputs."""
    return layer.storage == "mxfp4-experts" and stack.shape[2] % 64 == 0
