"""`jit`: `triton.jit`, with launches that skip Triton's binder wherever the same form was launched before.

To find the binary of a launch, Triton describes each argument and option in strings. Here a launch is looked up by its
form: everything that Triton compiles anew for, and at least as finely, so that launches of one form have one binary.
The first launch of a form takes Triton's own path, whose hook decides whether the specialisation was compared with
torch (`specializations`); every later launch of the form relies on that decision.

The function that finds a form is generated for each kernel, as Triton generates its binder: loops over arguments would
take twice as long. Of a kernel with a tensor `x`, an integer `n` and a constant `SIZE` it is

    def launch__(grid__, x, n, *, SIZE, num_warps=None, num_stages=None, **rest__):
        ...
        form__ = (device__, x.dtype, n.__class__, n & 15 and 2 - (n == 1), pointers, sizes, wide, SIZE, num_warps, ...)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelParam

_SOURCE = """\
def launch__(grid__, {names}, *, {constants}num_warps=None, num_stages=None, **rest__):
    active__ = driver__.active
    device__ = active__.get_current_device()
    try:
        form__ = (
            device__, {facts}
            ({pointers}) & 15 and ({unaligned},),
            ({sizes}) >> 31 and ({large},),
            {wide}
            {given}num_warps, num_stages, *rest__.items(),
        )
        found__ = launches__.get(form__)
    except (AttributeError, TypeError):  # An argument of another kind than in the first launch.
        form__ = found__ = None
    if found__ is None or is_watched__():
        options__ = {{{by_name}"num_warps": num_warps, "num_stages": num_stages, **rest__}}
        return bind__(form__, grid__, ({names},), options__)
    run__, function__, metadata__ = found__
    run__(
        grid__[0], grid__[1] if len(grid__) > 1 else 1, grid__[2] if len(grid__) > 2 else 1,
        active__.get_current_stream(device__), function__, metadata__, None, None, None, {names}, {given}
    )
"""
"""No parameter's name ends in `__`. `wide`: integers that are no natural numbers of 31 bits. On AMD's GPUs a pointer
to more than 2 GiB is of another form."""


class DirectKernel(JITFunction[Any]):  # type: ignore[misc]  # Triton has no types.
    """A kernel whose compile-time constants are its last parameters, and are given by name.

    Constants that are equal, such as 1 and true, must mean the same to the kernel.
    """

    def __init__(self, function: Callable[..., Any], **hints: Any) -> None:
        super().__init__(function, **hints)
        self._launches: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """By form: how Triton runs the binary, the binary, and what was recorded of it."""
        self._launch: Callable[..., Any] = self._first

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Launches the kernel on a grid. Raises what Triton raises, and `UncheckedKernel`."""
        return partial(self._launch, grid)

    def _first(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        source = _source_of(self.params, arguments, set(options))
        if source is not None:
            known = {
                "driver__": driver,
                "launches__": self._launches,
                "bind__": self._bind,
                "is_watched__": _is_watched,
                **{f"default_{each.name}__": each.default for each in self.params},
            }
            exec(compile(source, f"<launch of {self.__name__}>", "exec"), known)
            self._launch = known["launch__"]
            return self._launch(grid, *arguments, **options)
        return self._bind(None, grid, arguments, options)

    def _bind(
        self, form: tuple[Any, ...] | None, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Triton's own launch, which compiles what it does not know. The next one of the form, if any, is direct."""
        given = {name: value for name, value in options.items() if value is not None or name not in _OPTIONS}
        compiled = self.run(*arguments, grid=grid, warmup=False, **given)
        if form is not None and compiled is not None:
            self._launches[form] = compiled.run, compiled.function, compiled.packed_metadata
        return compiled


_OPTIONS = frozenset({"num_warps", "num_stages"})


def _source_of(parameters: Sequence[KernelParam], arguments: Sequence[Any], options: set[str]) -> str | None:
    """The function that launches a kernel with arguments of such types; None: all launches take Triton's own path."""
    plain = [each for each in parameters if not each.is_constexpr]
    if any(each.is_constexpr for each in parameters[: len(plain)]):
        return None
    constants = [each.name for each in parameters if each.is_constexpr]
    defaults = {each.name for each in parameters if each.is_constexpr and each.has_default}
    if len(arguments) != len(plain) or not options.issuperset({*constants} - defaults):
        return None
    facts, pointers, sizes, wide = [], [], [], []
    for each, value in zip(plain, arguments, strict=True):
        name = each.name
        if isinstance(value, torch.Tensor):
            facts.append(f"{name}.dtype")
            sizes.append(name)
            if not (each.do_not_specialize or each.do_not_specialize_on_alignment):
                pointers.append(name)
            continue
        if type(value) not in (int, float):
            return None
        if type(value) is float:
            # An integer would be specialised: without this attribute it takes Triton's own path.
            facts.append(f"{name}.__class__ is float or {name}.is_float")
            continue
        facts.append(f"{name}.__class__")
        wide.append(f"{name} >> 31")
        if not each.do_not_specialize:
            # 0 for multiples of 16, 1 for 1, and 2 for others: False would be equal to 0.
            facts.append(f"{name} & 15 and 2 - ({name} == 1)")
    if not pointers:
        return None
    return _SOURCE.format(
        names=", ".join(each.name for each in plain),
        constants="".join(f"{name}=default_{name}__, " if name in defaults else f"{name}, " for name in constants),
        given="".join(f"{name}, " for name in constants),
        by_name="".join(f'"{name}": {name}, ' for name in constants),
        facts="".join(f"{fact}, " for fact in facts),
        pointers=" | ".join(f"(p_{name}__ := {name}.data_ptr())" for name in pointers),
        unaligned=", ".join(f"p_{name}__ & 15 == 0" for name in pointers),
        sizes=" | ".join(f"(s_{name}__ := {name}.untyped_storage().size())" for name in sizes),
        large=", ".join(f"s_{name}__ >> 31 == 0" for name in sizes),
        wide=f"({' or '.join(wide)}) and ({', '.join(wide)},)," if wide else "",
    )


def _is_watched() -> bool:
    """Whether a profiler is to be called at each launch, as Triton's own path does."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def jit(function: Callable[..., Any] | None = None, /, **hints: Any) -> Any:
    """A decorator for kernels that are launched, as `triton.jit`; what kernels call takes `triton.jit` itself."""
    kind = triton.jit if knobs.runtime.interpret else DirectKernel
    return partial(kind, **hints) if function is None else kind(function, **hints)
