"""What models launch, as Triton's front end sees it: `python -m tests.parity.launched_kernels TARGET DTYPE PATH...`.

A process of its own, in which kernels are compiled and not interpreted, for a GPU that is not there. Each launch is
bound as it would be on that GPU, with the types of its very arguments, and made into Triton's intermediate form, which
finds what the interpreter allows: a variable that changes its type in a loop, or branches of two types. Nothing runs:
what kernels would have written is zeros. Prints the kernels that were made, of the checkpoints at those paths.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.compiler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget

from benchmarks.gpu import absent
from engine.runner.device_batch import DeviceBatch
from engine.sequence import Sequence
from models.ops.triton.configs import TARGETS, Target
from tests.parity.ahead import Ahead
from tests.parity.idle_kernels import EACH_CHOICE, allocate_zeros
from tests.parity.paged_model import prompt
from tests.parity.runners import rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, runner_for

_LIMITS = {"max_num_batched_tokens": 80, "max_num_seqs": 6, "max_model_len": 128}


class FrontEnd:
    """Stands where Triton's compiler does, and goes no further than its intermediate form."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        backend = triton.compiler.make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
        self.made.append(source.name)
        return absent.IDLE_KERNEL


@contextmanager
def on(target: Target) -> Iterator[FrontEnd]:
    """Kernels of tensors on a CPU are made for such a GPU, and compute nothing."""
    front_end = FrontEnd()
    with pytest.MonkeyPatch.context() as patch, absent.on(target, front_end):
        allocate_zeros(patch)
        yield front_end


def launch_all(path: Path, dtype: torch.dtype) -> None:
    """The warm-up's steps, and prompts and decodes whose tokens are chosen in every way."""
    sizes = {"cudagraph_capture_sizes": (2, 4)}
    runner = runner_for(path, dtype, compilation_config=sizes, cpu_operators=False, **_LIMITS)
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    runner.warm_up()
    assert runner.graphs is not None
    while runner.graphs.capture_next():
        pass
    assert runner.graphs.captured_sizes == [2, 4], "the log says what a capture failed with"
    ahead = Ahead(runner)
    ahead.device = device
    runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
    ahead.run(
        Sequence(prompt(3 + 20 * place, seed=place), 16, params, id=place) for place, params in enumerate(EACH_CHOICE)
    )


def main(arch: str, dtype: str, *paths: str) -> None:
    """See the file."""
    with on(TARGETS[arch]) as front_end:
        for path in paths:
            launch_all(Path(path), getattr(torch, dtype))
    sys.stdout.write("\n".join(sorted(set(front_end.made))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
