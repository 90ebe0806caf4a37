"""`Compilation`: one kernel with one configuration for one target, to be compiled ahead of time, without a GPU.

The other modules of this folder export theirs as `COMPILATIONS`, which `tools.kernel_report` compiles and records.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from models.ops.triton.configs import Config, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What `triton.compile` needs to know, and what its output must be."""

    kernel: Any
    """The `@triton.jit` function."""
    variant: str
    """Which of the kernel's forms: "bf16 d128 window"."""
    target: Target
    config: Config
    signature: Mapping[str, str]
    """Types of the arguments of a launch, by name: "*bf16" (an aligned pointer), "i32", "i64", "fp32"."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """The others; the tile sizes of `config` are added."""
    divisible: frozenset[str] = frozenset()
    """Integer arguments that are multiples of 16: loads that depend on others are scalar."""
    large: frozenset[str] = frozenset()
    """Pointers to what may be larger than 2 GiB: caches and weights."""
    has_dot: bool = False
    """Whether it must contain matrix instructions."""
    has_wide_loads: bool = True
    """Whether it must load 16 bytes at a time."""
    narrow_loads: int = 0
    """Load instructions of less than 4 bytes that it may have."""

    @property
    def name(self) -> str:
        """Of the kernel and its form."""
        return f"{self.kernel.__name__.removesuffix('_kernel')} {self.variant}".strip()

    @property
    def key(self) -> str:
        """A hash of all that decides the compiler's output: Triton's release, the source with the functions and
        constants that it uses, types and constants of the launch, target and options. Lines of a file, comments and
        docstrings are not part of it. Works under the interpreter too.
        """
        import triton

        signature, constexprs, attributes = self._arguments()
        launch = signature, sorted(constexprs.items()), sorted(attributes.items())
        parts = triton.__version__, source_of(self.kernel.fn), launch, self.target, sorted(self._options.items())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def compile(self) -> Any:
        """Triton's `CompiledKernel`. Raises what the compiler raises; not to be called under the interpreter."""
        import triton

        from models.ops.triton.absent import gpu_of

        return triton.compile(self._source(), target=gpu_of(self.target), options=self._options)

    @property
    def _options(self) -> dict[str, int | str]:
        return self.config.options(self.target)

    def _source(self) -> Any:
        from triton.compiler import ASTSource

        return ASTSource(self.kernel, *self._arguments())

    def _arguments(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """Types, constants and known properties of the kernel's arguments, as `ASTSource` takes them."""
        parameters = inspect.signature(self.kernel.fn).parameters
        defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
        constexprs = {**defaults, **self.config.blocks, **self.constexprs}
        signature = {name: "constexpr" if name in constexprs else self.signature[name] for name in parameters}
        attributes = {}
        for index, name in enumerate(parameters):
            is_pointer = signature[name].startswith("*")
            known: list[list[Any]] = []
            if is_pointer or name in self.divisible:
                known.append(["tt.divisibility", 16])
            if is_pointer and self.target.backend == "hip" and name not in self.large:
                known.append(["tt.pointer_range", 32])
            if known:
                attributes[(index,)] = known
        return signature, constexprs, attributes


@cache
def source_of(function: Any) -> str:
    """The code of a jit function, and of the jit functions and constants of its module that it names, transitively."""
    return "\n".join(_sources(function, {}).values())


def _sources(function: Any, found: dict[str, str]) -> dict[str, str]:
    """Adds to `found`, by qualified name, what is not in it yet."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name in found:
        return found
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list = []
    if ast.get_docstring(tree, clean=False) is not None:
        del tree.body[0]
    found[name] = ast.unparse(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id not in function.__globals__:
            continue
        value = function.__globals__[node.id]
        if hasattr(value, "arg_names") and hasattr(value, "fn"):
            _sources(value.fn, found)
        elif not callable(value) and not inspect.ismodule(value):
            found[f"{function.__module__}.{node.id}"] = f"{node.id} = {value!r}"
    return found
