"""`Compilation`: one kernel with one configuration for one target, to be compiled ahead of time, without a GPU.

Each file of kernels exports its own as `COMPILATIONS`, which the test of the compiler's output and docs/kernels.md
read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.ops.triton.configs import Config, Target


def gpu_of(target: Target) -> Any:
    """Triton's `GPUTarget` for it."""
    from triton.backends.compiler import GPUTarget

    arch: str | int = target.arch if target.backend == "hip" else int(target.arch.removeprefix("sm_"))
    return GPUTarget(target.backend, arch, target.warp_size)


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
        """Of all that the compiler's output depends on: Triton's version, the source and what it calls, options."""
        import triton

        parts = (triton.__version__, self._source().hash(), self.target, sorted(self._options.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def compile(self) -> Any:
        """Triton's `CompiledKernel`. Raises what the compiler raises; not to be called under the interpreter."""
        import triton

        return triton.compile(self._source(), target=gpu_of(self.target), options=self._options)

    @property
    def _options(self) -> dict[str, int]:
        return self.config.options(self.target)

    def _source(self) -> Any:
        from triton.compiler import ASTSource

        defaults = {one.name: one.default for one in self.kernel.params if one.has_default}
        constexprs = {**defaults, **self.config.blocks, **self.constexprs}
        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in constexprs else self.signature[name] for name in names}
        attributes = {}
        for index, name in enumerate(names):
            is_pointer = signature[name].startswith("*")
            known: list[list[Any]] = []
            if is_pointer or name in self.divisible:
                known.append(["tt.divisibility", 16])
            if is_pointer and self.target.backend == "hip" and name not in self.large:
                known.append(["tt.pointer_range", 32])
            if known:
                attributes[(index,)] = known
        return ASTSource(self.kernel, signature, constexprs, attributes)
