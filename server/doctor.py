"""`kaon doctor`: what this machine runs models on, and what is wrong, in words. Needs no torch in this process."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from engine.doctor_report import Facts, Report

_SECONDS = 900.0
"""The first kernels of a library may take minutes to compile."""
_USAGE = "usage: kaon doctor [--json]\n"


def run(arguments: Sequence[str]) -> int:
    """Print what was found; 0 where nothing is wrong, 1 where something is, 2 for a flag that there is not."""
    if arguments and list(arguments) != ["--json"]:
        is_help = list(arguments) in (["--help"], ["-h"])
        (sys.stdout if is_help else sys.stderr).write(_USAGE)
        return 0 if is_help else 2
    report = examine([sys.executable, "-m", "engine.doctor"])
    if arguments:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(report)))
    return 1 if report.problems else 0


def examine(command: Sequence[str], seconds: float = _SECONDS) -> Report:
    """The report that a process prints; one of what became of it, where it prints none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return _without_report(f"looking at this machine took longer than {seconds:g} s; a driver may hang")
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Report)
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    if done.returncode < 0:
        ended = f"signal {signal.Signals(-done.returncode).name}"
        return _without_report(
            f"looking at this machine was ended by {ended}: torch or a driver is broken ({last[0]})"
        )
    return _without_report(f"looking at this machine ended with exit code {done.returncode}: {last[0]}")


def lines(report: Report) -> list[str]:
    """The report as people read it."""
    facts = report.facts
    found = []
    if facts.torch is not None:
        found.append(f"torch     {facts.torch}, built for {facts.build}; Python {facts.python}")
        found += [
            f"GPU       {gpu.name}, {gpu.arch}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
            for gpu in facts.gpus
        ] or ["GPU       none; models run on the CPU"]
        found.append(f"memory    {facts.memory_gib:.1f} GiB available")
        found.append(f"CPU       {facts.cpu_library or 'no compiled'} operators")
        found += [f"{name:<10}{version or 'not installed'}" for name, version in _libraries(facts)]
        found += [f"operator  {words}" for words in facts.operators]
    if not report.problems:
        return [*found, "Nothing is wrong."]
    return [*found, *(f"wrong     {problem}" for problem in report.problems)]


def _libraries(facts: Facts) -> list[tuple[str, str | None]]:
    return [("Triton", facts.triton)] + ([("aiter", facts.aiter)] if facts.build.startswith("ROCm") else [])


def _without_report(problem: str) -> Report:
    return Report(facts=Facts(), problems=[problem])
