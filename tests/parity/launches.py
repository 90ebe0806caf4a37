"""`Launches`: Triton's specialisation of each launch of a kernel. No kernel runs, so the host may not read results.

A kernel is compiled once for each set of constexprs and each specialisation of its other arguments: integers that are
1 or multiples of 16, and tensors that begin at multiples of 16 bytes. Arguments that vary from step to step must not
be specialised.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelParam, native_specialize_impl

Key = tuple[tuple[str, Any], ...]
"""Specialisation by argument."""


class Launches:
    """Launches of the steps that were run inside `step`."""

    def __init__(self) -> None:
        self.steps: list[dict[tuple[str, Key], set[Key]]] = []
        """For each step, by kernel and its constexprs, the specialisations of its launches."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """The launches inside are one step."""
        launched: dict[tuple[str, Key], set[Key]] = defaultdict(set)

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> None:
            constexprs, key = _specialized(kernel, args, kwargs)
            launched[kernel.__name__, constexprs].add(key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "run", recorded)
            yield
        self.steps.append(launched)

    def recompiled(self) -> list[str]:
        """Kernels that a later step compiled again, in words: the same constexprs, and arguments of another
        specialisation."""
        known: dict[tuple[str, Key], set[Key]] = {}
        found = []
        for number, launched in enumerate(self.steps):
            for (kernel, constexprs), keys in launched.items():
                before = known.setdefault((kernel, constexprs), keys)
                for key in sorted(keys - before, key=str):
                    nearest = min(before, key=lambda other: len(set(other) ^ set(key)))
                    differing = ", ".join(f"{name} is {kind}" for name, kind in set(key) - set(nearest))
                    found.append(f"{kernel} in step {number}: {differing}")
        return found


def _specialized(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, Key]:
    parameters = _parameters(kernel)
    names = {parameter.name for parameter in parameters}
    given = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    given.apply_defaults()
    constexprs, key = [], []
    for parameter in parameters:
        value = given.arguments[parameter.name]
        if parameter.is_constexpr:
            constexprs.append((parameter.name, value))
            continue
        specialize, align = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
        kind = native_specialize_impl(_backend(), value, False, specialize, align)
        key.append((parameter.name, kind))
    return tuple(constexprs), tuple(key)


@cache
def _parameters(kernel: Any) -> list[KernelParam]:
    """The interface of `JITFunction`."""
    unspecialized = kernel.kwargs.get("do_not_specialize") or []
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or []
    return [
        KernelParam(number, parameter, name in unspecialized, name in unaligned)
        for number, (name, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items())
    ]


@cache
def _backend() -> Any:
    return make_backend(GPUTarget("hip", "gfx942", 64))
