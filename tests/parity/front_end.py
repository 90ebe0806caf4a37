"""Triton's front end for an emulated GPU, in a process that interprets no kernels. Imports no transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton.compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget

from benchmarks.gpu import absent
from models.ops.triton.configs import Target
from tests.parity.idle_kernels import allocate_zeros


class FrontEnd:
    """A replacement of Triton's compiler, which stops after its intermediate form. It makes each form once."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str], str] = {}
        """Names of kernels, by their form and options."""

    def __call__(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        form = source.hash(), str(sorted(options.items()))
        if form in self.made:
            return absent.IDLE_KERNEL
        backend = triton.compiler.make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
        self.made[form] = source.name
        return absent.IDLE_KERNEL


@contextmanager
def on(target: Target) -> Iterator[FrontEnd]:
    """Kernels of tensors on a CPU are compiled for the GPU, and compute nothing."""
    front_end = FrontEnd()
    with pytest.MonkeyPatch.context() as patch, absent.on(target, front_end):
        allocate_zeros(patch)
        yield front_end
