"""`QuantizedRows`: a quantised weight on its way from the checkpoint to the model.

Weight loaders slice tensors by rows and columns, whatever these contain. So a quantised weight is a tensor of the
dense
weight's shape and dtype, whose slices are quantised too.
"""

from typing import Any

import torch
from torch import nn

from models.ops.stored_weight import make_dense, stored_of
from models.ops.weight_formats import Codes
from models.quantization.config import LayerQuantConfig


class QuantizedRows(torch.Tensor):
    """A quantised weight as a tensor of its shape and dtype. Operators other than slices dequantise it."""

    codes: Codes

    @staticmethod
    def of(codes: Codes, dtype: torch.dtype) -> "QuantizedRows":
        """# [rows, inputs]"""
        made: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            QuantizedRows, codes.codes.shape, dtype=dtype, device=torch.device("cpu")
        )
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slice the codes; give any other operator dense tensors."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.slice.Tensor:
            of, dim, first, last, step = (*args, *(0, 0, None, 1)[len(args) - 1 :])[:5]
            size = of.shape[dim]
            first, last = first or 0, size if last is None else min(last, size)
            codes = of.codes.part(dim, first, last) if step == 1 else None
            if codes is not None:
                return QuantizedRows.of(codes, of.dtype)
        dense = [arg.codes.dense() if isinstance(arg, QuantizedRows) else arg for arg in args]
        return func(*dense, **(kwargs or {}))


def codes_of(rows: torch.Tensor) -> Codes | None:
    """The codes of rows that are quantised; None of dense ones."""
    return rows.codes if isinstance(rows, QuantizedRows) else None


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, expert_index: int | None = None) -> bool:
    """Fill rows of a weight that stays quantised, of a stack those of one expert; False if the weight is dense.

    A weight whose rows differ in layout, or are dense in part, becomes dense.
    """
    stored = stored_of(parameter)
    if stored is None:
        return False
    codes = rows.codes if isinstance(rows, QuantizedRows) else stored.codes_of(rows)
    if codes is not None and stored.put(first, codes, expert_index):
        return True
    make_dense(parameter)
    return False


def can_requantize(stack: nn.Parameter, layer: LayerQuantConfig) -> bool:
    """Whether a stack that the checkpoint stores as one MXFP4 tensor may be rounded to it again after it is
    sharded.
    """
    return layer.storage == "mxfp4-experts" and stack.shape[2] % 64 == 0
