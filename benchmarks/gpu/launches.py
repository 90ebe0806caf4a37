"""`Launches`: hears of every launch of a kernel while it is entered, by the compiler or by the interpreter.

For the benchmark, which makes launches again, and for the test that serving needs no kernel that warm-up did not
compile.
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, create_function_from_signature

from benchmarks.gpu.empty_kernel import empty_kernel

Signature: TypeAlias = tuple[str, ...]
"""What Triton compiles anew for: a kernel's name, and each argument's type or constant with what is known of it."""

_KIND: Any = type(empty_kernel)
"""`JITFunction`, or `InterpretedFunction` where kernels are interpreted."""
_HOW = frozenset({"grid", "warmup"})
"""Of what `run` is given, what is no argument or option of the kernel."""


class Launches:
    """What was launched, in order. Not for two threads at a time."""

    def __init__(self) -> None:
        self.made: list[Callable[[], object]] = []
        """Each launch, to be made again."""
        self.signatures: dict[Signature, int] = {}
        """How often each was launched."""

    def __enter__(self) -> Self:
        self._run = run = _KIND.run

        def heard(kernel: Any, /, *arguments: Any, **options: Any) -> Any:
            given = {name: value for name, value in options.items() if name not in _HOW}
            self.made.append(functools.partial(_launch, kernel, options["grid"], arguments, given))
            signature = signature_of(kernel, arguments, options)
            self.signatures[signature] = self.signatures.get(signature, 0) + 1
            return run(kernel, *arguments, **options)

        _KIND.run = heard
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _KIND.run = self._run


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """As one writes it."""
    kernel[grid](*arguments, **options)


def signature_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Signature:
    """By Triton's own rules for AMD's GPUs, which know more of pointers than NVIDIA's."""
    options = {name: value for name, value in options.items() if name not in _HOW}
    _, specialization, rest = _binder(kernel.fn, *_hints(kernel))(*arguments, **options)
    return (kernel.fn.__name__, *map(str, specialization), str(sorted(rest.items())))


@functools.cache
def _binder(function: Any, plain: tuple[Any, ...], unaligned: tuple[Any, ...]) -> Any:
    """Triton's own, of a kernel that may be interpreted here."""
    compiled = JITFunction(function, do_not_specialize=list(plain), do_not_specialize_on_alignment=list(unaligned))
    backend = HIPBackend(GPUTarget("hip", "gfx942", 64))
    return create_function_from_signature(compiled.signature, compiled.params, backend)


def _hints(kernel: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `@triton.jit` was told not to specialise on; the interpreter keeps it beside."""
    kept = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    plain, unaligned = (kept.get(name) or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
    return tuple(plain), tuple(unaligned)
