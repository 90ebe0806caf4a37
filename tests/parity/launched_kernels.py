"""Launches of models in Triton's front end: `python -m tests.parity.launched_kernels TARGET DTYPE PATH...`. With
`--large-pool` before these, over a cache of more than 2 GiB, like most caches that serve.

A process of its own, in which kernels are compiled and not interpreted, for an emulated GPU. Each launch is bound as
on that GPU, with the types of its arguments, and converted to Triton's intermediate form, which finds errors that the
interpreter allows: a variable that changes its type in a loop, or branches of two types. Nothing runs: the outputs of
kernels are zeros. Prints the compiled kernels of the checkpoints at those paths, and after "unchecked:" each
checkpoint's specialisations that the self-test of its own start did not compare, and kernels that it never launched.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import _triton_jit_function_registry

from engine.runner import kernel_checks
from engine.runner.device_batch import DeviceBatch
from engine.sequence import Sequence
from models.ops import self_test
from models.ops.triton.configs import TARGETS
from models.ops.triton.launcher import DirectKernel
from models.ops.triton.specializations import CheckedKernels
from tests.parity.ahead import Ahead, waiting
from tests.parity.front_end import on
from tests.parity.idle_kernels import EACH_CHOICE
from tests.parity.paged_model import prompt
from tests.parity.runners import rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, runner_for

_MORE_THAN_2_GIB = 2**31 + 2**28
DRAFTING = "drafting.json"
"""File in a checkpoint's directory: fields of the config by which a model drafts for it."""
_LIMITS = {"max_num_batched_tokens": 80, "max_num_seqs": 6, "max_model_len": 128}


@contextmanager
def started_anew() -> Iterator[CheckedKernels]:
    """What a new process checks and launches: no form of a kernel was launched before."""
    for kernel in _triton_jit_function_registry.values():
        kernel.device_caches.clear()
        if isinstance(kernel, DirectKernel):
            kernel._launches.clear()
    checked = CheckedKernels()
    checked.watch()
    try:
        yield checked
    finally:
        checked.stop()


def launch_all(path: Path, dtype: torch.dtype, checked: CheckedKernels, *, is_pool_large: bool) -> None:
    """The self-test's launches; the warm-up's steps; prompts and decodes with every way of sampling."""
    sizes = {"cudagraph_capture_sizes": (2, 4)}
    drafting = path / DRAFTING
    fields = json.loads(drafting.read_text()) if drafting.exists() else {}
    runner = runner_for(path, dtype, compilation_config=sizes, cpu_operators=False, **_LIMITS, **fields)
    for operator, cases in kernel_checks._cases_of(runner.loaded).items():
        with checked.checking(operator), pytest.MonkeyPatch.context() as patch:
            # Kernels that compute nothing are all wrong: continue to the last comparison.
            patch.setattr(self_test, "failure_among", lambda findings: [*findings] and None)
            self_test.first_failure(cases, runner.device)
    device = GraphDevice()
    num_blocks = NUM_BLOCKS
    if is_pool_large and runner.caches.block_bytes:
        num_blocks = _MORE_THAN_2_GIB // runner.caches.block_bytes + 1
    runner = rebuilt(runner, device, num_blocks)
    runner.warm_up()
    assert runner.graphs is not None
    while runner.graphs.capture_next():
        pass
    assert runner.graphs.captured_sizes == [2, 4], "the log says what a capture failed with"
    seqs = [
        Sequence(prompt(3 + 20 * index, seed=index), 16, params, id=index) for index, params in enumerate(EACH_CHOICE)
    ]
    if runner.drafts is not None:
        runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
        waiting(runner, seqs)
        return
    ahead = Ahead(runner)
    ahead.device = device
    runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
    ahead.run(seqs)


def main(*arguments: str) -> None:
    """Run as the process: see the module's docstring."""
    is_pool_large = arguments[0] == "--large-pool"
    arch, dtype, *paths = arguments[is_pool_large:]
    unchecked: list[str] = []
    with on(TARGETS[arch]) as front_end:
        for path in paths:
            with started_anew() as checked:
                launch_all(Path(path), getattr(torch, dtype), checked, is_pool_large=is_pool_large)
            for form, operator in checked.unchecked.items():
                is_known = operator is not None
                unchecked.append(f"unchecked: {form if is_known else f'{form.kernel}, by no check'} of {path}\n")
    sys.stdout.write("\n".join(sorted(set(front_end.made.values()))) + "\n")
    sys.stdout.writelines(unchecked)


if __name__ == "__main__":
    main(*sys.argv[1:])
