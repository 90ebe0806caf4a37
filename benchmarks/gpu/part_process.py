"""A part of the benchmark in a process of its own, which may crash, hang or exceed its time: child and parent."""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import IO

import torch

from benchmarks.gpu.bench import Bench, first_line
from benchmarks.gpu.parts import BY_NAME, Finding, Part

MARK = "@finding "
BROKEN = 3


def run_part(
    part: Part, bench: Bench, begin: Callable[[str], None], tell: Callable[[Finding], None], *, skip: int = 0
) -> bool:
    """Run a part's cases after the first `skip`. Returns whether the device still answers. `begin` is called before
    each case."""
    for number, case in enumerate(part.cases(bench)):
        if number < skip:
            continue
        begin(case.name)
        try:
            finding = Finding(part.name, case.name, case.run())
        # A case may fail with any error of the compiler, the device or a library. Its message becomes the row.
        except Exception as error:  # noqa: BLE001
            finding = Finding(part.name, case.name, error=first_line(error))
        tell(finding)
        if finding.error is not None and bench.is_broken():
            return False
    return True


def main() -> int:
    """Run as the child process: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part_process")
    parser.add_argument("part", choices=list(BY_NAME))
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    lines = sys.stdout

    def say(**reported: object) -> None:
        lines.write(f"{MARK}{json.dumps(reported)}\n")
        lines.flush()

    # Output of libraries is not part of the findings.
    with redirect_stdout(sys.stderr):
        bench = Bench(torch.device(options.device), is_quick=options.quick)
        answers = run_part(
            BY_NAME[options.part],
            bench,
            lambda case: say(begins=case),
            lambda finding: say(**finding.as_json()),
            skip=options.skip,
        )
    return 0 if answers else BROKEN


if __name__ == "__main__":
    sys.exit(main())


# The parent: the findings of a part that a process measures which may crash, hang or exceed its time.

_START = "start"
"""Name of the process's start, before its first case."""


def command_of(part: Part, device: str, *, is_quick: bool, skip: int) -> list[str]:
    """Return the command that measures a part without its first `skip` cases."""
    quick = ["--quick"] if is_quick else []
    return [
        sys.executable,
        "-m",
        "benchmarks.gpu.part_process",
        part.name,
        "--device",
        device,
        *quick,
        "--skip",
        str(skip),
    ]


def findings_of(
    part: Part, command: Callable[[int], Sequence[str]], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Finding]:
    """Yield findings as they arrive, for at most `seconds`. `command` receives the number of cases that are done.

    If the process ends within a case, that case is reported as failed, and another process continues with the next
    one.
    """
    deadline, done, case = clock() + seconds, 0, _START
    while True:
        process = subprocess.Popen(command(done), stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        lines = _lines(process.stdout)
        began_with, patience = done, 0.0
        try:
            while True:
                try:
                    line = lines.get(timeout=max(0.0, deadline - clock()))
                except queue.Empty:
                    yield Finding(part.name, case, error=f"not done within the part's {seconds:.0f} s")
                    return
                if line is None:
                    # The output ends just before the exit code is known.
                    patience = 10.0
                    break
                reported = json.loads(line)
                if "begins" in reported:
                    case = reported["begins"]
                    continue
                done, case = done + 1, _START
                yield Finding(**reported)
        finally:
            _end(process, patience)
        if process.returncode == 0:
            return
        if process.returncode != BROKEN or case != _START:
            yield Finding(part.name, case, error=f"its process ended with {_ending(process.returncode)}")
            done += case != _START
        if done == began_with:
            return


def _lines(stream: IO[str]) -> "queue.SimpleQueue[str | None]":
    """Put the findings' lines of a stream on a queue, and None at its end."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            if line.startswith(MARK):
                found.put(line.removeprefix(MARK))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def _end(process: "subprocess.Popen[str]", patience: float) -> None:
    """Kill the process with all its children, unless it has ended."""
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
