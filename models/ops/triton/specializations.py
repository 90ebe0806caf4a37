"""Which specialisations of kernels the self-test has compared with torch, and which others are launched.

Triton compiles a kernel anew for what it knows of its arguments: their types, integers that are 1, addresses and
integers that are multiples of 16, and on AMD's GPUs whether the memory behind a pointer is at most 2 GiB. Each of
these is another binary, so that a self-test proves nothing of those that it did not launch. Triton reports the first
launch of each to a hook, which costs later launches nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton import knobs

_OURS = "models.ops.triton."
"""Begins the names of the modules whose kernels are counted; aiter and torch compile kernels of their own."""


class Specialization(NamedTuple):
    """What a kernel was compiled for, apart from its tiles and other compile-time constants."""

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    """By name, the type of each argument, and what the compiler knows of it."""

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}: {kind}' for name, kind in self.arguments)})"


class UncheckedKernel(RuntimeError):
    """A kernel is about to run in a specialisation that was not compared with torch."""

    def __init__(self, specialization: Specialization, operator: str) -> None:
        self.specialization, self.refused_operator = specialization, operator
        super().__init__(f"a kernel for {operator} was not compared with torch in this form: {specialization}")


def in_one_form(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a size that 16 does not divide, at an address and a stride that follow from their size alone.

    Otherwise the form of a kernel's launch would depend on what the rows are a part of. # [rows, size]
    """
    size = rows.shape[1]
    if size % 16 == 0 or (rows.stride(0) == size and rows.data_ptr() % 16 == 0):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class CheckedKernels:
    """Records what is launched inside `checking`, and afterwards what is launched in another form.

    Before `refuse_others` such launches are only recorded: results of the steps of the start are not used.
    """

    def __init__(self) -> None:
        self.checked: dict[Specialization, set[str]] = {}
        """By specialisation, the compile-time constants with which the self-test launched it."""
        self.unchecked: dict[Specialization, str | None] = {}
        """Launched and not compared, and the operator of each; None for a kernel that no check launched."""
        self._operators: dict[str, str] = {}
        """By kernel, the operator whose check launched it last."""
        self._checking: str | None = None
        self._is_refusing = False
        self._hook_before = knobs.runtime.jit_cache_hook

    def watch(self) -> None:
        """Have Triton report to this object from now on."""
        self._hook_before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self._on_new_kernel

    def stop(self) -> None:
        """Have Triton report to whatever it reported to before."""
        knobs.runtime.jit_cache_hook = self._hook_before

    @contextmanager
    def checking(self, operator: str) -> Iterator[None]:
        """What is launched inside is compared with torch."""
        self._checking = operator
        try:
            yield
        finally:
            self._checking = None

    def refuse_others(self) -> None:
        """From now on, raise `UncheckedKernel` instead of launching what was neither compared nor launched before."""
        self._is_refusing = True

    def unchecked_of(self, operator: str) -> list[Specialization]:
        """What was launched of an operator and not compared."""
        return [each for each, of in self.unchecked.items() if of == operator]

    def _on_new_kernel(self, *, fn: Any, compile: dict[str, Any], **others: Any) -> bool | None:
        """Triton's `jit_cache_hook`; true has it neither compile nor launch the kernel."""
        before = self._hook_before
        if before is not None and before(fn=fn, compile=compile, **others):
            return True
        if fn.module.startswith(_OURS):
            self._note(*_form(fn, compile))
        return None

    def _note(self, specialization: Specialization, constants: str) -> None:
        kernel = specialization.kernel
        if self._checking is not None:
            self.checked.setdefault(specialization, set()).add(constants)
            self.unchecked.pop(specialization, None)
            self._operators[kernel] = self._checking
        elif specialization not in self.checked and specialization not in self.unchecked:
            operator = self._operators.get(kernel)
            # Refused once: where nothing else computes the operator, its steps go on.
            self.unchecked[specialization] = operator
            if self._is_refusing and operator is not None:
                raise UncheckedKernel(specialization, operator)


def _form(fn: Any, compile: dict[str, Any]) -> tuple[Specialization, str]:
    """The specialisation of a compilation, and its compile-time constants and options in words."""
    known = compile["configs"][0]
    arguments, constants = [], []
    for parameter in fn.jit_function.params:
        name, key = parameter.name, (parameter.num,)
        if parameter.is_constexpr:
            constants.append(f"{name}={compile['constants'].get(key)}")
            continue
        kind = compile["signature"][name]
        if kind == "constexpr":
            kind = f"{compile['constants'].get(key)}"
        for attribute, value in known.get(key, ()):
            kind += f" {attribute.removeprefix('tt.')}={value}"
        arguments.append((name, kind))
    constants.append(f"{compile['num_warps']} warps, {compile['num_stages']} stages")
    return Specialization(fn.name, tuple(arguments)), ", ".join(constants)
