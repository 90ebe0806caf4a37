"""Settings of every test process. Imported by pytest before any test, so before torch."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.warm_starts import COLD_START, WARM_CHILDREN, servers_and_cores_start_warm
from tests.processor_time import (
    pytest_collection_finish,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.run_folder import own_folder, run_folder
from tests.worker_order import worker_order

__all__ = [
    "pytest_collection_finish",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]

# Two spinning OpenMP teams on two cores, one a test worker, slow torch down a hundredfold: idle threads shall sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton decides when it is imported whether kernels are compiled for a GPU or interpreted on CPU tensors.
if not any(any(Path("/dev").glob(device)) for device in ("kfd", "nvidia[0-9]*", "dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where servers keep batches by default: not among those of the user who runs the tests.
os.environ["XDG_STATE_HOME"] = str(own_folder("kaon-test-state-"))

# The first process of a run makes it, so that those of xdist inherit it.
run_folder()

# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test passes or fails for what it tests: with the same examples each time, as long as they may take. Those of
# `make test-long` are drawn anew, four times as many where a test does not give their number.
settings.register_profile("anew", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("ci"), max_examples=25)
settings.load_profile("ci")

# Other people's clients, each in an environment of its own: `make conformance`.
collect_ignore = ["conformance"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors: tests wait for the processes that they start a third of their time."""
    return min(len(os.sched_getaffinity(0)) + 2, 8)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays, so no collection of garbage walks through it, now or test after test.

    Tests that keep many objects, as simulations do, spent four fifths of their time on collections by Python's default
    of one every 700 objects, since all of them are of objects that are younger than the frozen ones.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Make no tests of the forms that `-m "not slow"` would deselect, which are more than the others."""
    if "not slow" in metafunc.config.option.markexpr.split(" and "):
        metafunc.parametrize = partial(_parametrize_shortly, metafunc.parametrize)  # type: ignore[method-assign]
    return (yield)


def _parametrize_shortly(
    parametrize: Callable[..., None], names: str | Sequence[str], values: Iterable[Any], *rest: Any, **options: Any
) -> None:
    """Leave out the values that are marked slow, unless all are."""
    values = list(values)
    short = [all(mark.name != "slow" for mark in getattr(each, "marks", ())) for each in values]
    if any(short):
        values = list(compress(values, short))
        ids = options.get("ids")
        if ids is not None and not callable(ids):
            options["ids"] = list(compress(ids, short))
    parametrize(names, values, *rest, **options)


@pytest.fixture(scope="session")
def warm_starts() -> Iterator[None]:
    """Servers and engine cores start from a process that has imported their modules, if none may use a GPU.

    What a GPU's libraries have begun in a process does not work in its clones. `make test-long` has all start cold.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or COLD_START.items() <= os.environ.items():
        yield
        return
    with servers_and_cores_start_warm():
        yield


@pytest.fixture(scope="module")
def warm_children(warm_starts: None) -> Iterator[None]:
    """All engine cores of servers, and ranks, start warm."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WARM_CHILDREN.items():
            patch.setenv(name, value)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After others have deselected, so that the stretches are those that xdist cuts."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers > 1:
        items[:] = worker_order(items, num_workers)
