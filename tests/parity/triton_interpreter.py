"""Device of the Triton kernels in tests: Triton's interpreter, or the GPU of a machine that has one.

Importing this module corrects the interpreter of Triton 3.7: its `tl.dot` multiplies the bits of bfloat16 as if they
were integers, its conversion to FP8 loses the carry from a rounded mantissa to the exponent, and it has no pointers to
gfx942's FP8.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from models.ops import triton as kernels
from models.ops.triton import configs
from models.ops.triton.configs import launch_of
from tests.parity import triton_interpreter_speed

INTERPRETED: bool = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""Device of the tensors that tests pass to kernels."""

requires_interpreter = pytest.mark.skipif(not INTERPRETED, reason="compares on CPU tensors; set TRITON_INTERPRET=1")


@pytest.fixture
def triton_kernels() -> Iterator[torch.device]:
    """Within the test, kernels compute for layers too. Returns the device of their tensors."""
    reason = kernels.start(DEVICE)
    assert reason is None, reason
    yield DEVICE
    kernels.stop()


@pytest.fixture(params=configs.RDNA)
def rdna(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted kernels have the tiles of AMD's RDNA, where deep operands are multiplied in parts."""
    monkeypatch.setattr(configs, "INTERPRETER", configs.TARGETS[request.param])
    launch_of.cache_clear()
    yield
    launch_of.cache_clear()


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """The original product, of the operands' numbers whatever their type is.

    Summed in float64: the order of BLAS's sums depends on where a row lies among those of its tile, which on some
    processors changes bits of float32, and matrix units have no such order.
    """
    del self, input_precision, max_num_imprecise_acc
    if d.dtype.is_floating():
        product = np.matmul(_as_float32(a).astype(np.float64), _as_float32(b).astype(np.float64))
    else:
        product = _sum_of(a, b, d)
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _sum_of(a: Any, b: Any, d: Any) -> Any:
    """The product of integers, in the type of the sum: numpy would keep the operands' type."""
    return np.matmul(a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))


def _as_float32(operand: Any) -> Any:
    dtype = operand.dtype.scalar
    if dtype == tl.bfloat16 or (dtype.primitive_bitwidth == 8 and dtype.is_floating()):
        return interpreter._convert_float(operand.data, dtype, tl.float32, None).view(np.float32)
    return operand.data.astype(np.float32)


interpreter.InterpreterBuilder.create_dot = _create_dot


_TORCH_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}
_converted_as_it_was = interpreter.InterpreterBuilder.create_fp_to_fp


def _create_fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """The original conversion, and from float32 to FP8 as torch converts."""
    dtype = _TORCH_FP8.get(target.scalar.name)
    if dtype is None or source.dtype.scalar != tl.float32:
        return _converted_as_it_was(self, source, target, rounding_mode)
    codes = torch.from_numpy(np.ascontiguousarray(source.data)).to(dtype)
    return interpreter.TensorHandle(codes.view(torch.uint8).numpy().reshape(source.data.shape), target.scalar)


interpreter.InterpreterBuilder.create_fp_to_fp = _create_fp_to_fp
_patched_as_it_was = interpreter._patch_lang_core


def _patch_lang_core(lang: Any, scope: Any) -> None:
    """The original patch, and pointers to gfx942's FP8, which it lacks."""
    _patched_as_it_was(lang, scope)
    to_ir = lang.dtype.to_ir

    def with_fnuz(self: Any, builder: Any) -> Any:
        return builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else to_ir(self, builder)

    scope.set_attr(lang.dtype, "to_ir", with_fnuz)


interpreter._patch_lang_core = _patch_lang_core

if INTERPRETED:
    triton_interpreter_speed.quicken()
