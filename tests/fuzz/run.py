"""`make fuzz ARGS="--minutes 5 --target NAME"`: runs parsers on mutated bytes, guided by coverage.

Each target runs in a process of its own under atheris (libFuzzer), from its corpus in `tests/fuzz/corpora`. New inputs
stay in build/fuzz. An input that causes a failure is named at the end: add it to the corpus, which `make test`
replays, together with the fix. `--keep` adds the few inputs of a run that reach code that the corpus does not reach.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models.child_environment import code_environment

ROOT = Path(__file__).parents[2]
CORPORA = Path(__file__).parent / "corpora"
BUILD = ROOT / "build" / "fuzz"
_MAX_BYTES = 4096
"""Length of the longest input: parsers that fail on long inputs fail on short ones of the same form."""
_INPUT_SECONDS = 20
_MEMORY_MIB = 4096
_PACKAGES = [
    *("server", "engine", "models.config", "models.lora", "models.loading", "models.architectures.config"),
    *("jinja2", "uvicorn", "starlette", "python_multipart", "jwt"),
]
"""Packages whose code guides the fuzzer; native libraries are not instrumented."""
_SHOWN_LINES = 40
"""Lines of the log of a run that failed."""
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_SIZE = re.compile(r"cov: (\d+)")


class Outcome(NamedTuple):
    """The result of fuzzing a target."""

    runs: int
    coverage: int
    """Number of edges of instrumented code that were reached."""
    failure: str
    """The end of the log of a run that failed; empty if none did."""


def fuzz(name: str, seconds: float, *, keep: bool = False, seed: int = 0) -> Outcome:
    """Fuzz a target for a number of seconds, or until an input causes a failure."""
    found = BUILD / name
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(round(seconds), 1)}",
        f"-max_len={_MAX_BYTES}",
        f"-timeout={_INPUT_SECONDS}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
    ]
    if seed:
        options.append(f"-seed={seed}")
    more = found / "corpus"
    more.mkdir(exist_ok=True)
    done = _child(name, [*options, str(more), str(CORPORA / name)])
    if keep and not done.returncode:
        _child(name, ["-merge=1", f"-max_len={_MAX_BYTES}", str(CORPORA / name), str(more)])
    shutil.rmtree(more)
    runs, sizes = _RUNS.findall(done.stdout), _SIZE.findall(done.stdout)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("INFO: Instrumenting", "#"))]
    failure = "".join(f"  {line}\n" for line in lines[-_SHOWN_LINES:]) if done.returncode else ""
    return Outcome(int(runs[-1]) if runs else 0, int(sizes[-1]) if sizes else 0, failure)


def _child(name: str, options: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tests.fuzz.run", "--child", name, *options]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=code_environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def run_child(name: str, options: list[str]) -> None:
    """Fuzz in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=_PACKAGES):
        import models.loading.checkpoint  # noqa: F401 - which the targets import when they need torch
        from tests.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


def names() -> list[str]:
    """The findings of all targets."""
    return sorted(path.name for path in CORPORA.iterdir() if path.is_dir())


def main(argv: Sequence[str]) -> int:
    """Return 1 if an input caused a failure."""
    if argv[:1] == ["--child"]:
        run_child(argv[1], list(argv[2:]))
    parser = argparse.ArgumentParser(prog="make fuzz", description="Feed parsers mutated bytes.")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each target (default: 5)")
    parser.add_argument("--target", action="append", choices=names(), help="may be given several times; default: all")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default: another each time")
    arguments = parser.parse_args(argv)
    failed = 0
    for name in arguments.target or names():
        outcome = fuzz(name, 60 * arguments.minutes, keep=arguments.keep, seed=arguments.seed)
        sys.stdout.write(f"{name}: {outcome.runs} inputs, {outcome.coverage} edges reached\n{outcome.failure}")
        sys.stdout.flush()
        failed |= bool(outcome.failure)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
