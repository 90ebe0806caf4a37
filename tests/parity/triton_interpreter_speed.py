"""Accelerates the interpreter of Triton 3.7, without changing its results.

At each call of a function, the interpreter searches all of `triton.language`; it makes a table of all types and a
shape for each value, computes exclusive ors, of which sorting consists, one by one, and checks for overflows, which it
never reports. Each operation decides again which type and shape its operands have in common, although most operands
are alike. The functions here handle these cases, and call the originals for all others.
"""

import dataclasses
import functools
import inspect
import math
from types import ModuleType, NoneType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Apply the changes from now on. The interpreters of other versions are not changed."""
    if not triton.__version__.startswith("3.7."):
        return
    interpreter._patch_lang = _patch_lang
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _np_dtype
    interpreter.ReduceOps.apply_impl = _reduce
    interpreter._validate_np_data_size = _fits
    interpreter.InterpreterBuilder.create_splat = _create_splat
    TritonSemantic.binary_op_type_checking_impl = _with_common_type
    TritonSemantic.broadcast_impl_value = _with_common_shape
    TritonSemantic.computation_type_impl = _common_type
    tl.core._unwrap_if_constexpr = _unwrapped
    tl.core.dtype.extent = _extent_of(())  # Of scalars and pointers; each type of a block has its own.
    tl.core.block_type.__init__ = _init_block_type
    tl.core.block_type.name = property(_name_of_block, lambda self, name: None)
    tl.core.tensor.__init__ = _init_tensor
    tl.core.tuple.__eq__ = _has_same_values
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_SEES_ALL = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""A replacement of a kernel, whose globals show which of the two modules must be patched."""
_patched_as_it_was = interpreter._patch_lang


class _Launch:
    """The names that are patched from a launch to its end."""

    running: "_Launch | None" = None

    def __init__(self) -> None:
        self._patched = _patched_as_it_was(_SEES_ALL)

    def restore(self) -> None:
        self._patched.restore()
        _Launch.running = None


def _patch_lang(fn: Any) -> _Launch:
    """The original, once per launch: a function that a kernel calls finds it patched, and never restores it."""
    del fn
    if _Launch.running is None:
        _Launch.running = _Launch()
    return _Launch.running


@functools.cache
def _builtins_of(package: ModuleType | type) -> list[tuple[str, Any]]:
    """The names of a package's builtins, and what replaces them: as `interpreter._patch_attr` makes it.

    The outer wrapper checks for `_semantic`, which is always passed. Those within it check types.
    """
    return [
        (name, _interpreted(getattr(member, "__wrapped__", member)))
        for name, member in inspect.getmembers(package)
        if tl.core.is_builtin(member)
    ]


def _interpreted(function: Any) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **named)

    return call


def _patch_builtin(package: ModuleType | type, builder: Any, scope: Any) -> None:
    """The original; a launch restores the package."""
    del builder
    for name, call in _builtins_of(package):
        scope.set_attr(package, name, call)


_scalar_np_dtype = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: Any) -> Any:
    """The original, without a new table of all types at each call."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _scalar_np_dtype(element)


_reduced_as_it_was = interpreter.ReduceOps.apply_impl


def _reduce(self: Any, operands: Any) -> Any:
    """The original, with exclusive ors, of which sorting consists, in one operation."""
    if self.combine_fn is not tl.standard._xor_combine:
        return _reduced_as_it_was(self, operands)
    data = np.bitwise_xor.reduce(operands[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, operands[0].dtype)


_init_block_type_as_it_was = tl.core.block_type.__init__


@functools.cache
def _block_of(shape: tuple[int, ...]) -> Any:
    """A representative type of that shape with other elements. Raises Triton's error for a wrong one."""
    block = object.__new__(tl.core.block_type)
    _init_block_type_as_it_was(block, tl.int8, list(shape))
    block.extent = _extent_of(block.shape)
    return block


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """The original, for a shape that is computed once, and without a name until it is used."""
    like = _block_of(tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape]))
    self.element_ty = element_ty
    self.shape = like.shape
    self.numel = like.numel
    self.extent = like.extent


def _name_of_block(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


@functools.cache
def _extent_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """The original, with one shape for all values that have it."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = type.extent


def _has_same_values(self: Any, other: Any) -> Any:
    """The original, without a copy of the tuple."""
    other = other.value if isinstance(other, tl.constexpr) else other
    is_sequence = isinstance(other, (list, tuple, tl.core.tuple))
    return tl.constexpr(is_sequence and self.values == list(other))


_is_fitting = interpreter._validate_np_data_size
_fitting: dict[tuple[int, str], bool] = {}


def _fits(array: Any, dtype: Any) -> bool:
    """The original, once for each size of elements and type."""
    key = array.itemsize, dtype.name
    found = _fitting.get(key)
    if found is None:
        found = _fitting[key] = _is_fitting(array, dtype)
    return found


_unwrapped_as_it_was = tl.core._unwrap_if_constexpr
_PLAIN = frozenset({tl.core.tensor, tl.core.dtype, tl.core.pointer_type, int, float, bool, str, NoneType})


def _unwrapped(value: Any) -> Any:
    """The original, at once for what is neither a constant nor holds any."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    return value.value if kind is tl.constexpr else _unwrapped_as_it_was(value)


_typed_as_they_were = TritonSemantic.binary_op_type_checking_impl


def _with_common_type(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """The original, without conversions of two tensors of one type that is the result's too."""
    are_alike = type(lhs) is type(rhs) is tl.core.tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
    if are_alike and not div_or_mod:
        return _with_common_shape(self, lhs, rhs)
    return _typed_as_they_were(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


_common_type_as_it_was = TritonSemantic.computation_type_impl
_common_types: dict[tuple[str, bool, str, bool, bool], Any] = {}


def _common_type(self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, divides: bool) -> Any:
    """The original, once for each pair of types."""
    key = left.name, left_is_scalar, right.name, right_is_scalar, divides
    found = _common_types.get(key)
    if found is None:
        found = _common_types[key] = _common_type_as_it_was(
            self, left, left_is_scalar, right, right_is_scalar, divides
        )
    return found


_broadcast_as_it_was = TritonSemantic.broadcast_impl_value


@functools.cache
def _shape_of_both(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to which both are broadcast; None where the original adds axes or raises."""
    try:
        shape = np.broadcast_shapes(left, right)
    except ValueError:
        return None
    return shape if len(left) == len(right) else None


def _with_common_shape(self: Any, lhs: Any, rhs: Any) -> Any:
    """The original, with the shape of each pair of shapes computed once."""
    left, right = lhs.type, rhs.type
    if not (left.is_block() and right.is_block()):
        return _broadcast_as_it_was(self, lhs, rhs) if left.is_block() or right.is_block() else (lhs, rhs)
    if left.shape is right.shape:
        return lhs, rhs
    shapes = tuple(left.shape.values), tuple(right.shape.values)
    shape = _shape_of_both(*shapes)
    if shape is None:
        return _broadcast_as_it_was(self, lhs, rhs)
    if shapes[0] != shape:
        lhs = self.tensor(self.builder.create_broadcast(lhs.handle, shape), tl.block_type(left.scalar, shape))
    if shapes[1] != shape:
        rhs = self.tensor(self.builder.create_broadcast(rhs.handle, shape), tl.block_type(right.scalar, shape))
    return lhs, rhs


def _create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """The original, without numpy's walk over a tuple of Triton."""
    del self
    data = np.empty(tuple(ret_ty.shape.values), dtype=_np_dtype(arg.dtype))
    data[...] = arg.data[0] if isinstance(arg.dtype, tl.block_type) else arg.data
    return interpreter.TensorHandle(data, arg.dtype.scalar)
