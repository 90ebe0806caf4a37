"""`AsyncIOProcManager` while ranks load, over real processes without a model: failures are reported with their
reason."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import psutil
import pytest

from engine.config.config import Config, ParallelConfig
from engine.distributed import rank_link
from engine.distributed.core_process import CoreProcess
from engine.distributed.rank_link import RankError
from engine.distributed.rank_manager import AsyncIOProcManager
from models.child_environment import code_environment

WAIT_SECONDS = 60

Failures = SimpleQueue[tuple[str, bool, bool]]
"""The core's final error messages, whether a rank was killed, and whether the user is at fault."""

StartRanks = Callable[..., tuple[AsyncIOProcManager, Failures]]


@pytest.fixture
def start_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StartRanks]:
    """Starts ranks with `stub_rank`'s faults; when the test ends, none of them remains."""
    monkeypatch.setattr(rank_link, "RANK_MODULE", "stub_rank")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    ended = Event()
    with ExitStack() as ends:

        def start(fault: str, size: int = 2, timeout: float = WAIT_SECONDS) -> tuple[AsyncIOProcManager, Failures]:
            monkeypatch.setenv("STUB_RANK", fault)
            failures: Failures = SimpleQueue()

            def fail(sentence: str, killed: bool = False, usage: bool = False) -> None:
                failures.put((sentence, killed, usage))
                ended.wait()  # A call that ends the core does not return.

            fields = {"tensor_parallel_size": size, "rank_start_timeout": timeout}
            config = Config(parallel_config=ParallelConfig.model_validate(fields))
            ranks = AsyncIOProcManager(config, str(tmp_path), fail, tmp_path)
            ends.callback(ranks.close)
            return ranks, failures

        yield start
        ended.set()
    assert not [child for child in psutil.Process().children() if "stub_rank" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    """Empty for a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process started; the kernel shows none for a moment after its start."""
    while not (environment := psutil.Process(pid).environ()):
        time.sleep(0.001)
    return environment


def test_what_every_rank_has_loaded_is_added_up(start_ranks: StartRanks) -> None:
    ranks, failures = start_ranks("loaded", size=3)
    assert ranks.wait_loaded() == (frozenset({1, 2}), 2000)
    assert failures.empty()


def test_threads_of_a_core_and_of_a_rank_sleep_while_they_wait(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads the policy when torch is imported: the process must be started with it in its environment."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    start_ranks("loaded")
    [rank] = [child for child in psutil.Process().children() if "stub_rank" in command_of(child)]
    core = CoreProcess(Config())
    core.start()
    try:
        policies = [environment_of(pid).get("OMP_WAIT_POLICY") for pid in (core.pid, rank.pid)]
    finally:
        core.stop(0.0)
    assert policies == ["passive", "passive"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert code_environment()["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("load", "tensor-parallel rank 1: the shard is damaged"),
        ("bug", "tensor-parallel rank 1: ZeroDivisionError: division by cucumber"),
        ("late", r"tensor-parallel rank 1 did not load its part of the model within rank_start_timeout 0.2 s"),
    ],
)
def test_a_wait_for_a_rank_that_does_not_load_raises_the_reason(
    fault: str, sentence: str, start_ranks: StartRanks
) -> None:
    ranks, _ = start_ranks(fault, timeout=0.2 if fault == "late" else WAIT_SECONDS)
    with pytest.raises(RankError, match=sentence):
        ranks.wait_loaded()


@pytest.mark.parametrize(
    ("fault", "sentence", "usage"),
    [
        ("load", "tensor-parallel rank 1: the shard is damaged", True),
        ("bug", "tensor-parallel rank 1: ZeroDivisionError: division by cucumber", False),
        ("exit", "tensor-parallel rank 1 exited with code 7; its log says why", False),
    ],
)
def test_a_rank_that_fails_ends_a_core_that_still_loads(
    fault: str, sentence: str, usage: bool, start_ranks: StartRanks
) -> None:
    _, failures = start_ranks(fault)
    assert failures.get(timeout=WAIT_SECONDS) == (sentence, False, usage)
