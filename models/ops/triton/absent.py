"""`stand_in`: makes Triton compile kernels for an emulated GPU, and keep them in its cache; no kernel runs.

Triton asks a driver for what it needs of a GPU: its name, its stream, how a binary is loaded and launched. With
`AbsentDriver` a launch takes Triton's own path, to the same key of its cache as on the GPU itself, and ends there.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models.ops.triton.configs import Target, take_cpu_for

_MOST_THREADS = 1024
"""Threads of a workgroup that both makers' GPUs can run."""


def gpu_of(target: Target) -> GPUTarget:
    """Triton's own description of a target."""
    arch: str | int = target.arch if target.backend == "hip" else int(target.arch.removeprefix("sm_"))
    return GPUTarget(target.backend, arch, target.warp_size)


class AbsentDriver:
    """The methods that Triton calls on a driver. Binaries are not loaded, and launches do nothing."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._gpu = gpu_of(target)
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return self._gpu

    def get_current_device(self) -> int:
        """The GPU's number."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The GPU's default stream."""
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """The limits that Triton compares a binary with."""
        return {"max_shared_mem": self._target.lds_bytes}

    def load_binary(self, *_: object) -> tuple[object, None, int, int, int]:
        """A module, a function, registers, spills and the most threads, of which only the last is used."""
        return self, None, 0, 0, _MOST_THREADS

    def launcher_cls(self, *_: object) -> Any:
        """A launcher that does nothing."""
        return lambda *_: None


def stand_in(target: Target) -> None:
    """From now on, treat the CPU's tensors as those of such a GPU, and compile their kernels without running them."""
    driver.set_active(AbsentDriver(target))
    take_cpu_for(target)
