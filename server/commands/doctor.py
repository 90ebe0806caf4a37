"""`kaon doctor`: prints the hardware and kernels that this machine runs models with, and any problems found.

A child process loads torch and examines the machine, so that this process survives a broken driver.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

import msgspec

from engine.doctor_report import Facts, Gpu, Report, slow_rates
from models.child_environment import code_environment, working_directory

_SECONDS = 900.0
"""Time limit of the examination: the first kernels of a library may take minutes to compile."""
_USAGE = "usage: kaon doctor [--json]\n"


def run(arguments: Sequence[str]) -> int:
    """Print the report. The exit code: 0 if nothing is wrong, 1 if something is, 2 for an unknown flag."""
    if arguments and list(arguments) != ["--json"]:
        is_help = list(arguments) in (["--help"], ["-h"])
        wrong = next((each for each in arguments if each != "--json"), "--json twice")
        message = _USAGE if is_help else f"kaon doctor: {wrong} is not known; {_USAGE}"
        (sys.stdout if is_help else sys.stderr).write(message)
        return 0 if is_help else 2
    report = examine([sys.executable, "-P", "-m", "engine.commands.doctor"])
    if arguments:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines(report)))
    return 1 if report.problems else 0


def examine(command: Sequence[str], seconds: float = _SECONDS) -> Report:
    """Run `command` and parse the report that it prints; if it fails, return a report of the failure."""
    # Files instead of pipes: a pipe that a grandchild process holds open would block this process.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=errors,
                timeout=seconds,
                check=False,
                env=code_environment(),
                cwd=working_directory(),
            )
        except subprocess.TimeoutExpired:
            return _without_report(
                f"the examination of this machine took longer than {seconds:g} s; a driver may hang"
            )
        printed, error_lines = _lines(out), _lines(errors)
    if done.returncode == 0:
        # Libraries may print before and after the report.
        for line in reversed(printed):
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(line, type=Report)
    cause = _cause(error_lines)
    if done.returncode < 0:
        ended = f"signal {signal.Signals(-done.returncode).name}"
        return _without_report(f"the examination was ended by {ended}: torch or a driver is broken ({cause})")
    return _without_report(f"the examination of this machine ended with exit code {done.returncode}: {cause}")


def _cause(error_lines: Sequence[str]) -> str:
    """Return the line with the exception: CUDA's errors continue with advice for developers."""
    raised = [line for line in error_lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or error_lines or ["it printed no error"])[-1]


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def lines(report: Report) -> list[str]:
    """Format the report as lines of text."""
    facts = report.facts
    found = []
    if facts.torch is not None:
        found.append(f"torch     {facts.torch}, built for {facts.build}; Python {facts.python}")
        found += [f"GPU       {gpu.name}, {gpu.arch}, {_memory(gpu)}" for gpu in facts.gpus] or [
            "GPU       none; models run on the CPU"
        ]
        found.append(f"memory    {facts.memory_gib:.1f} GiB available")
        found += _cpu(facts)
        found += [f"sandbox   {gap}" for gap in facts.sandbox_gaps] or ["sandbox   Landlock and seccomp"]
        found += [f"{name:<10}{version or 'not installed'}" for name, version in _libraries(facts)]
        if facts.aiter is not None:
            found += [f"aiter     {name}: {_use(facts, name)}" for name in facts.aiter_reasons]
        if facts.kernels_checked:
            names = ", ".join(name for name in facts.kernels_checked if name not in facts.kernel_reasons) or "none"
            found.append(f"kernels   tiles of {facts.kernels_like}; equal to torch: {names}")
        found += [f"operator  {words}" for words in facts.operators]
    slow = [f"slow      {rate}" for rate in slow_rates(facts)]
    found += slow
    if not report.problems:
        return [*found, "Nothing else is wrong." if slow else "Nothing is wrong."]
    return [*found, *(f"wrong     {problem}" for problem in report.problems)]


def _cpu(facts: Facts) -> list[str]:
    """Describe the CPU operators, and their measured share of the machine's limits."""
    others = ", ".join(path for path in facts.cpu_paths if path != facts.cpu_library)
    found = [f"CPU       {facts.cpu_library or 'no compiled'} operators" + (f"; also runs {others}" if others else "")]
    if facts.cpu_limits is not None:
        read, row, matrix, product = facts.cpu_limits
        found.append(f"CPU       one row reads {row:.1f} GB/s, {row / read:.0%} of a plain loop's {read:.1f}")
        found.append(
            f"CPU       products {product:.0f} GFLOP/s, {product / matrix:.0%} of a plain loop's {matrix:.0f}"
        )
    return found


def _memory(gpu: Gpu) -> str:
    free = "" if gpu.free_gib is None else f"{gpu.free_gib:.1f} of "
    return f"{free}{gpu.memory_gib:.1f} GiB" + (" free" if free else "")


def _use(facts: Facts, operator: str) -> str:
    """Describe whether, or with which setting, aiter computes an operator."""
    reason = facts.aiter_reasons[operator]
    if reason is not None:
        return f"not used: {reason}"
    return f"works; used with --kernel-backend {operator}=aiter" if operator in facts.aiter_when_asked else "used"


def _libraries(facts: Facts) -> list[tuple[str, str | None]]:
    found = [("Triton", facts.triton)]
    if facts.ptxas is not None:
        found.append(("ptxas", facts.ptxas))
    return found + ([("aiter", facts.aiter)] if facts.build.startswith("ROCm") else [])


def _without_report(problem: str) -> Report:
    return Report(facts=Facts(), problems=[problem])
