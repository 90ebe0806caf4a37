"""`QuantizedRows` and `QuantizedStack`: quantised weights that weight loaders can slice like dense tensors.

Weight loaders slice checkpoint tensors by rows and columns to take this rank's shard. A quantised weight is therefore
passed to them as a tensor subclass with the shape and dtype of the dense weight, whose slices are quantised too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from models.ops.stored_weight import stored_of
from models.ops.weight_formats import Codes

_aten = torch.ops.aten
_ALL = slice(None)


class QuantizedRows(torch.Tensor):
    """A quantised weight as a tensor of the dense shape and dtype. Operators other than slicing and reordering of rows
    dequantise it."""

    codes: Codes

    @staticmethod
    def of(codes: Codes, dtype: torch.dtype) -> "QuantizedRows":
        """# [rows, inputs]"""
        made: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            QuantizedRows, (len(codes.codes), codes.inputs), dtype=dtype, device=torch.device("cpu")
        )
        made.codes = codes
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slice the codes here, because the first call of torch's dispatcher imports modules for seconds."""
        found = None
        if func is torch.Tensor.__getitem__ and not kwargs:
            found = args[0]._sliced(args[1])
        elif func is torch.Tensor.narrow and not kwargs:
            of, dim, first, length = args
            some = slice(int(first), int(first) + length)
            found = of._sliced((some, _ALL) if dim % 2 == 0 else (_ALL, some))
        if found is not None:
            return found
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    def _sliced(self, index: Any) -> "QuantizedRows | None":
        """Return the rows and columns of an index of slices, or the rows of a tensor of indices; None if the codes
        cannot be sliced there."""
        codes: Codes | None = self.codes
        if isinstance(index, torch.Tensor):
            return QuantizedRows.of(self.codes.rows(index), self.dtype) if index.dim() == 1 else None
        for dim, some in enumerate(index if isinstance(index, tuple) else (index,)):
            if codes is None or not isinstance(some, slice):
                return None
            first, last, step = some.indices((len(codes.codes), codes.inputs)[dim])
            if dim == 0 or some != _ALL:
                codes = codes.part(dim, first, last, step)
        return None if codes is None else QuantizedRows.of(codes, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Slice the codes; for any other operator, pass dense tensors."""
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]
        if func is _aten.slice.Tensor:
            of, dim, first, last, step = (*args, *(0, 0, None, 1)[len(args) - 1 :])[:5]
            size = of.shape[dim]
            codes = of.codes.part(dim, first or 0, size if last is None else min(last, size), step)
            if codes is not None:
                return QuantizedRows.of(codes, of.dtype)
        dense = [arg.codes.dense() if isinstance(arg, QuantizedRows) else arg for arg in args]
        return func(*dense, **(kwargs or {}))


class QuantizedStack(torch.Tensor):
    """The quantised weights of a layer's experts as one tensor, whose elements are `QuantizedRows`, made on access.

    Supported operations: slicing experts, transposing the last two dimensions, and, with `has_outputs_first`, indexing
    by expert.
    """

    experts: Sequence[Callable[[], Codes]]
    has_outputs_first: bool

    @staticmethod
    def of(
        experts: Sequence[Callable[[], Codes]], shape: torch.Size, dtype: torch.dtype, *, has_outputs_first: bool
    ) -> "QuantizedStack":
        """`experts`: for each, the function that makes its codes.

        # [experts, outputs, inputs], or without `has_outputs_first` [experts, inputs, outputs]
        """
        made: QuantizedStack = torch.Tensor._make_wrapper_subclass(
            QuantizedStack, shape, dtype=dtype, device=torch.device("cpu")
        )
        made.experts, made.has_outputs_first = experts, has_outputs_first
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement the supported operations."""
        stack = args[0]
        if func is torch.Tensor.transpose and {dim % 3 for dim in args[1:]} == {1, 2}:
            first, second, third = stack.shape
            shape, is_first = torch.Size((first, third, second)), not stack.has_outputs_first
            return QuantizedStack.of(stack.experts, shape, stack.dtype, has_outputs_first=is_first)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            some = stack.experts[args[1]]
            shape = torch.Size((len(some), *stack.shape[1:]))
            return QuantizedStack.of(some, shape, stack.dtype, has_outputs_first=stack.has_outputs_first)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], int) and stack.has_outputs_first:
            return QuantizedRows.of(stack.experts[args[1]](), stack.dtype)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise `NotImplementedError` for all other operations."""
        raise NotImplementedError(f"{func} of a stack of quantised experts")


def codes_of(rows: torch.Tensor) -> Codes | None:
    """Return the codes of quantised rows, or None if the rows are dense."""
    return rows.codes if isinstance(rows, QuantizedRows) else None


def fill_stored(parameter: nn.Parameter, first: int, rows: torch.Tensor, expert_index: int | None = None) -> bool:
    """Write rows into a weight that stays quantised, or into one expert of a stack. Return False if it is dense."""
    stored = stored_of(parameter)
    if stored is None:
        return False
    stored.put(first, rows, codes_of(rows), expert_index)
    return True
