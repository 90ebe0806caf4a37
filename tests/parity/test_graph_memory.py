"""Memory that graphs leave free on a GPU: a size that would take memory from steps is not captured on any rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config.config import Config
from engine.runner import graphs as graph_runner
from engine.runner.device import Graph
from engine.runner.graphs import GraphMemory
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import StepSizes, compile_kernels
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from tests.parity.ahead import answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.runners import load
from tests.parity.test_deferred_output import sequences
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, prompts, runner_for
from tests.parity.thread_ranks import at_once, thread_ranks

__all__ = ["checkpoint", "prompts"]

MIB = 1 << 20
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"


class FakeMemory:
    """1024 MiB, of which the model and its cache take 600."""

    def __init__(self) -> None:
        self.used, self.top, self.graphs = 600 * MIB, 900 * MIB, 0
        self.times_given_back = 0

    def run(self, num_bytes: int) -> None:
        """Allocate `num_bytes` for a while."""
        self.top = max(self.top, self.used + num_bytes)

    def total(self) -> int:
        return 1024 * MIB

    def free(self) -> int:
        return self.total() - self.used - self.graphs

    def held(self) -> int:
        return self.used + self.graphs

    def in_use(self) -> int:
        return self.used

    def peak(self) -> int:
        return self.top

    def give_back(self) -> None:
        self.times_given_back += 1

    def reset_peak(self) -> None:
        self.top = self.used


@pytest.mark.parametrize(
    ("graphs", "reported"),
    [
        # The memory of each pass, and then of its graph, in MiB. 424 are free, of which steps need 356.
        ([(69, 0), (68, 60), (60, 1), (50, 1), (40, 2)], [False, True, True, True, True]),
        # The second finds all its memory in the pool; the third may need as much as the second did after all.
        ([(30, 30), (29, 20), (28, 10), (27, 9)], [True, True, False, False]),
        ([(68, 69), (1, 0)], [True, False]),
    ],
)
def test_a_graph_is_captured_where_it_leaves_steps_their_memory(
    graphs: list[tuple[int, int]], reported: list[bool]
) -> None:
    memory = FakeMemory()
    room = GraphMemory(memory)
    memory.run(100 * MIB)  # The largest step of the start.
    found = []
    for of_pass, taken in graphs:
        room.begin()
        memory.run(of_pass * MIB)
        shortage = room.shortage()
        found.append(shortage is None)
        if shortage is None:
            with room.capturing():
                memory.graphs += taken * MIB
    assert found == reported
    # Steps that run between captures lose no memory.
    assert memory.times_given_back == 1


def test_a_larger_graph_than_all_before_is_judged_by_its_own_pass() -> None:
    memory = FakeMemory()
    room = GraphMemory(memory)
    memory.run(100 * MIB)
    for of_pass, shortage in ((10, None), (20, None), (69, "it may take 0.07 GiB"), (15, None)):
        room.begin()
        memory.run(of_pass * MIB)
        found = room.shortage()
        assert (found is None) == (shortage is None)
        assert (found or "").startswith(shortage or "")
        if found is None:
            with room.capturing():
                pass


def test_a_shortage_is_reported_with_its_figures() -> None:
    memory = FakeMemory()
    room = GraphMemory(memory)
    memory.run(100 * MIB)
    room.begin()
    memory.run(69 * MIB)
    assert room.shortage() == "it may take 0.07 GiB, and steps need 0.35 GiB of the 0.41 GiB that are free"


def test_sizes_that_would_take_from_steps_run_eagerly(
    checkpoint: Path, prompts: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1)
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:12])))
    device = GraphDevice()
    memory = device.memory = FakeMemory()
    runner = rank_of(checkpoint, SINGLE_RANK, device)
    forward = runner.model.forward  # type: ignore[attr-defined]

    def measured(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        memory.run(40 * MIB * len(input_ids))
        return forward(input_ids, positions)

    runner.model.forward = measured  # type: ignore[attr-defined]
    assert runner.graphs is not None
    assert runner.graphs.capture_next()
    assert runner.graphs.captured_sizes == []
    assert answers(waiting(runner, sequences(prompts[:12]))) == expected
    # Of 424 MiB 256 stay free, and 4 rows take 160.
    assert runner.graphs.captured_sizes == [1, 2, 4]
    assert device.num_replayed > 0
    reported = [record.message for record in caplog.records if "memory does not suffice" in record.message]
    assert len(reported) == 1
    assert reported[0].startswith("Decodes of 8 rows run eagerly")
    assert "lower gpu_memory_utilization" in reported[0]


def rank_of(path: Path, parallel: TensorParallel, device: GraphDevice) -> ModelRunner:
    """A rank, alone or of several, whose graphs may have 8, 4, 2 and 1 rows."""
    sizes = {"cudagraph_capture_sizes": (1, 2, 4, 8)}
    config = Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=64, compilation_config=sizes)
    loaded = load(path, config, parallel=parallel, backend=CapturingBackend(), device_api=device)
    return ModelRunner(loaded, NUM_BLOCKS)


def break_pass(runner: ModelRunner, rows: int, error: RuntimeError) -> None:
    """Let a pass of `num_tokens` tokens fail after its first sum."""
    forward = runner.model.forward  # type: ignore[attr-defined]

    def broken(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if len(input_ids) == rows:
            runner.parallel.all_reduce(torch.zeros(1, 4))
            raise error
        return forward(input_ids, positions)

    runner.model.forward = broken  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "rows", "left"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), 8, [1, 2, 4]),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), 4, [1, 2, 8]),
        (RuntimeError("division by cucumber"), 4, [8]),
    ],
)
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_pass_that_fails_on_one_rank_leaves_no_other_waiting(
    checkpoint: Path, guilty: int, error: RuntimeError, rows: int, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def captured(parallel: TensorParallel) -> list[int]:
        runner = rank_of(checkpoint, parallel, GraphDevice())
        if parallel.rank == guilty:
            break_pass(runner, rows, error)
        assert runner.graphs is not None
        while runner.graphs.capture_next():
            pass
        return runner.graphs.captured_sizes

    assert at_once([partial(captured, parallel) for parallel in thread_ranks(2)[0]]) == [left, left]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_capture_that_fails_on_one_rank_is_dropped_by_all(checkpoint: Path) -> None:
    class Broken(GraphDevice):
        def capture(self, run: Callable[[], None]) -> Graph:
            if self.num_captured == 2:
                raise RuntimeError("division by cucumber")
            return super().capture(run)

    def captured(parallel: TensorParallel) -> list[int]:
        runner = rank_of(checkpoint, parallel, Broken() if parallel.rank else GraphDevice())
        assert runner.graphs is not None
        while runner.graphs.capture_next():
            pass
        return runner.graphs.captured_sizes

    assert at_once([partial(captured, parallel) for parallel in thread_ranks(2)[0]]) == [[4, 8], [4, 8]]


def test_a_warm_up_step_that_one_rank_has_no_memory_for_leaves_no_other_waiting(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warmed(parallel: TensorParallel) -> int:
        runner = rank_of(checkpoint, parallel, GraphDevice())
        if parallel.rank:
            break_pass(runner, 8, torch.OutOfMemoryError(OUT_OF_MEMORY))
        compile_kernels(StepSizes(16, 4, 64), runner.run_dummy_step, parallel)
        # They are still synchronised.
        return int(parallel.all_reduce(torch.ones(1, 1)).item())

    assert at_once([partial(warmed, parallel) for parallel in thread_ranks(2)[0]]) == [2, 2]
    [reported] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert reported.startswith("1 of ")
