"""`on`: a GPU that is not there. Kernels of tensors on a CPU are launched as for it, and compute nothing.

Triton's path of a launch is its own: arguments are bound and told apart, and the kernel that was made for such ones is
looked up. Only its last step, the driver's launch, is left out. For a process of its own, in which kernels are not
interpreted: the driver, the configurations and what is found by them are the process's.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.gpu.bench import Bench
from engine.worker import model_runner
from models.attention.triton import TritonAttentionBackend
from models.kernels import triton as kernels
from models.kernels.triton import configs, probe
from models.kernels.triton.compilation import gpu_of
from models.kernels.triton.configs import Target
from models.kernels.triton.configs_dense import launch_of

Compile: TypeAlias = Callable[[Any, GPUTarget, dict[str, Any]], Any]
"""Stands where `triton.compiler.compile` does, of a source, a target and options."""


def nothing(*_: object) -> None:
    """What an idle kernel does, whatever it is given."""


IDLE_KERNEL = SimpleNamespace(run=nothing, launch_metadata=nothing, function=None, packed_metadata=None)
"""What Triton takes for a compiled kernel."""


class AbsentBench(Bench):
    """What is measured of the host where kernels are launched for a GPU that is not there."""

    def __init__(self, *, is_dry: bool = False) -> None:
        self.is_quick, self.is_dry = False, is_dry
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        torch.manual_seed(0)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


@contextmanager
def on(target: Target, compile: Compile = lambda src, target, options: IDLE_KERNEL) -> Iterator[None]:
    """Inside, a CPU's tensors are taken for those of such a GPU. `compile` hears of each form of a kernel once."""
    gpu = gpu_of(target)
    idle = SimpleNamespace(
        get_current_target=lambda: gpu, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    driver.set_active(idle)
    with ExitStack() as stack:
        for place, name, stands_in in (
            (triton.compiler, "compile", compile),
            (configs, "INTERPRETER", target),
            (probe, "probe", nothing),
            (model_runner, "select_backend", TritonAttentionBackend),
        ):
            stack.enter_context(patch.object(place, name, stands_in))
        launch_of.cache_clear()
        kernels.start(torch.device("cpu"))
        yield
