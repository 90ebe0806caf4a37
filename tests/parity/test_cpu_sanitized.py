"""The CPU operators in builds that end at an access out of bounds, undefined arithmetic, or a data race.

A build takes longer than its checks, so each compiled source is cached until it, a header, the flags or the compiler
change.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import models.ops.cpu

SOURCES = Path(models.ops.cpu.__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kaon-tests"
KEPT_SECONDS = 30 * 24 * 3600
CHECKS = "-fsanitize=address,undefined"
FLAGS = ["-O0", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-DKAON_SANITIZE"]


def compile_with(
    runtime: str, build: Path, *arguments: str, more: Sequence[Path] = (), first: Path | None = None
) -> Path:
    """Build `build` of the operators with a sanitizer, whose library is returned.

    `more`: further sources. `first`: a header that each source includes before its own.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing, with which the sanitizers are found")
    found = Path(subprocess.check_output([compiler, f"-print-file-name={runtime}"], text=True).strip())
    if not found.is_absolute():
        pytest.skip(f"gcc's {runtime} is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.iterdir():
        if time.time() - old.stat().st_mtime > KEPT_SECONDS:
            old.unlink(missing_ok=True)
    common = hashlib.sha256(subprocess.check_output([compiler, "--version"]))
    common.update(repr((FLAGS, arguments)).encode())
    for header in (*sorted(SOURCES.glob("*.h")), *([first] if first else [])):
        common.update(header.name.encode() + hashlib.sha256(header.read_bytes()).digest())
    options = [*FLAGS, *arguments, f"-I{SOURCES}", *(["-include", str(first)] if first else [])]
    objects = []
    for source in (*sorted(SOURCES.glob("*.c")), *more):
        digest = common.copy()
        digest.update(source.name.encode() + source.read_bytes())
        objects.append(CACHE / f"{source.stem}-{digest.hexdigest()[:32]}.o")
        if not objects[-1].exists():
            unfinished = objects[-1].with_suffix(f".{os.getpid()}")
            subprocess.run([compiler, *options, "-c", "-o", str(unfinished), str(source)], check=True)
            unfinished.rename(objects[-1])
    subprocess.run([compiler, *arguments, "-o", str(build), *map(str, objects), "-lm", "-lpthread"], check=True)
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rounds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_no_operator_leaves_its_memory(rounds: int, tmp_path: Path) -> None:
    """AMX's tiles are in software, so that processors without AMX check its path, too."""
    arguments = (CHECKS, "-fno-sanitize-recover=all", "-shared", "-fPIC")
    built = tmp_path / "operators.so"
    runtime = compile_with("libasan.so", built, *arguments, first=Path(__file__).with_name("cpu_tiles.h"))
    environment = {**os.environ, "LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    for fuzz in (["cpu_fuzz", str(built), str(rounds)], ["exchange_fuzz", str(rounds), str(built)]):
        run = subprocess.run(
            [sys.executable, "-m", f"tests.parity.{fuzz[0]}", *fuzz[1:]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("programs", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_share_nothing_unordered(programs: int, tmp_path: Path) -> None:
    built, program = tmp_path / "pool", Path(__file__).with_name("cpu_pool.c")
    compile_with("libtsan.so", built, "-fsanitize=thread", more=[program])
    run = subprocess.run([built, str(programs)], capture_output=True, text=True, timeout=1700, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the thread sanitizer of this gcc does not know this kernel's layout of memory")
    assert run.returncode == 0, run.stderr[-4000:]
