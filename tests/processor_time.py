"""Reports at the end of a run how much processor time the tests took, by folder and by module.

It is the sum over the test processes and the processes that they started, so that it hardly depends on what else the
machine computes. CONTRIBUTING.md has the budget. The hooks are imported by `conftest`.
"""

import os
import resource
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import pytest

_SHOWN = 12
_START = "start, collection and end"
_seconds: Counter[str] = Counter()
"""Seconds of processor time by module."""
_charged = 0.0
"""The part of this process' processor time that is in `_seconds`."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """Seconds of this process, of its processes that have ended, and of those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_spent_by, _running("self")))


def _spent_by(pid: str) -> float:
    """Seconds of a process and of its processes that have ended; 0 if it has ended itself."""
    with suppress(OSError):
        # The name, in parentheses, may contain any characters.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
    return 0.0


def _running(pid: str) -> Iterator[str]:
    """The processes that a process, or one of these, has started and that run."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as listing:
                for child in listing.read().split():
                    yield child
                    yield from _running(child)


def _charge(name: str) -> None:
    """Add what was spent since the last call."""
    global _charged
    before, _charged = _charged, spent()
    _seconds[name] += _charged - before


def pytest_collection_finish() -> None:
    _charge(_START)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        # Reading the times of a server's threads takes a millisecond, as long as many a test.
        if nextitem is None or nextitem.path != item.path:
            _charge(item.nodeid.partition("::")[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):
        # The processes of this one are xdist's workers, which report what they spent.
        _seconds[_START] += time.process_time()
        return
    _charge(_START)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_seconds"] = dict(_seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist has ended."""
    _seconds.update(getattr(node, "workeroutput", {}).get("processor_seconds", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: Counter[str] = Counter()
    for name, seconds in _seconds.items():
        folders["/".join(PurePath(name).parts[:2])] += seconds
    terminalreporter.section("processor time")
    for name, seconds in folders.most_common():
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
    modules = Counter({name: seconds for name, seconds in _seconds.items() if name != _START})
    terminalreporter.write_line(f"{_seconds.total():7.1f} s  in all; the most expensive modules:")
    for name, seconds in modules.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
