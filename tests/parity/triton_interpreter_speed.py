"""Accelerates the interpreter of Triton 3.7, without changing its results.

At each call of a function, the interpreter searches all of `triton.language`; it makes a table of all types and a
shape for each value, computes exclusive ors, of which sorting consists, one by one, and checks for overflows, which it
never reports.
"""

import dataclasses
import functools
import inspect
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Apply the changes from now on. The interpreters of other versions are not changed."""
    if not triton.__version__.startswith("3.7."):
        return
    interpreter._patch_lang = _patch_lang
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _np_dtype
    interpreter.ReduceOps.apply_impl = _reduce
    tl.core.block_type.__init__ = _init_block_type
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
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: ModuleType | type, builder: Any, scope: Any) -> None:
    """The original; a launch restores the package."""
    for name, member in _builtins_of(package):
        interpreter._patch_attr(package, name, member, builder, scope)


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
    return block


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """The original, for a shape that is computed once."""
    like = _block_of(tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    self.element_ty = element_ty
    self.shape = like.shape
    self.numel = like.numel
    self.name = f"{like.name.rpartition(',')[0]}, {element_ty}>"


@functools.cache
def _extent_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """The original, with one shape for all values that have it."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _extent_of(tuple(type.shape) if type.is_block() else ())


def _has_same_values(self: Any, other: Any) -> Any:
    """The original, without a copy of the tuple."""
    other = other.value if isinstance(other, tl.constexpr) else other
    is_sequence = isinstance(other, (list, tuple, tl.core.tuple))
    return tl.constexpr(is_sequence and self.values == list(other))
