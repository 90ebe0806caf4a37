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

HERE = Path(__file__).parent
SOURCES = Path(models.ops.cpu.__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kaon-tests"
PATHS_IN_SOFTWARE = ("avx_vnni", "avx512", "avx512_bf16", "amx")
KEPT_SECONDS = 30 * 24 * 3600
CHECKS = "-fsanitize=address,undefined"
FLAGS = ["-O0", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-DKAON_SANITIZE"]


def compile_with(
    runtime: str,
    build: Path,
    *arguments: str,
    sources: Path = SOURCES,
    more: Sequence[Path] = (),
    first: Path | None = None,
) -> Path:
    """Build `build` of the operators in `sources` with a sanitizer, whose library is returned.

    `more`: further files. `first`: a header that each source includes before its own.
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
    for header in (*sorted(sources.glob("*.h")), *(sorted(HERE.glob("cpu_*.h")) if first else [])):
        common.update(header.name.encode() + hashlib.sha256(header.read_bytes()).digest())
    options = [*FLAGS, *arguments, f"-I{sources}", *(["-include", str(first)] if first else [])]
    objects = []
    for source in (*sorted(sources.glob("*.c")), *more):
        digest = common.copy()
        digest.update(source.name.encode() + source.read_bytes())
        objects.append(CACHE / f"{source.stem}-{digest.hexdigest()[:32]}.o")
        if not objects[-1].exists():
            unfinished = objects[-1].with_suffix(f".{os.getpid()}")
            subprocess.run([compiler, *options, "-c", "-o", str(unfinished), str(source)], check=True)
            unfinished.rename(objects[-1])
    subprocess.run([compiler, *arguments, "-o", str(build), *map(str, objects), "-lm", "-lpthread"], check=True)
    return found


def fuzz(runtime: Path, *arguments: object, timeout: int) -> None:
    """Run cpu_fuzz.py with the address sanitizer's library, and require that it ends well."""
    environment = {**os.environ, "LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parity.cpu_fuzz", *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rounds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_no_operator_leaves_its_memory(rounds: int, tmp_path: Path) -> None:
    """AMX's tiles are in software, so that processors without AMX check its path, too."""
    arguments = (CHECKS, "-fno-sanitize-recover=all", "-shared", "-fPIC")
    built = tmp_path / "operators.so"
    runtime = compile_with("libasan.so", built, *arguments, first=HERE / "cpu_tiles.h")
    fuzz(runtime, built, rounds, timeout=1700)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="the other sets are made of AVX2")
def test_paths_that_this_processor_lacks_compute_what_their_references_do(tmp_path: Path) -> None:
    """AVX-512, its products of bfloat16 and bytes, AVX-VNNI and AMX in software: layouts, tails and sums of each."""
    built, sources = tmp_path / "operators.so", tmp_path / "sources"
    shutil.copytree(
        SOURCES, sources, ignore=lambda _, names: [name for name in names if name[-2:] not in (".c", ".h")]
    )
    panels = (sources / "panels.c").read_text()
    assert panels.count('"x"(x)') == 1, "a register, which holds no vector of 64 bytes"
    (sources / "panels.c").write_text(panels.replace('"x"(x)', '"m"(x)'))
    # GCC 12 misjudges the size of an array that a condition chooses from two.
    arguments = (CHECKS, "-fno-sanitize=object-size", "-O1", "-fno-sanitize-recover=all", "-shared", "-fPIC")
    runtime = compile_with("libasan.so", built, *arguments, sources=sources, first=HERE / "cpu_wide.h")
    fuzz(runtime, built, 5, *PATHS_IN_SOFTWARE, timeout=3500)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("programs", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_share_nothing_unordered(programs: int, tmp_path: Path) -> None:
    built, program = tmp_path / "pool", HERE / "cpu_pool.c"
    compile_with("libtsan.so", built, "-fsanitize=thread", more=[program])
    run = subprocess.run([built, str(programs)], capture_output=True, text=True, timeout=1700, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the thread sanitizer of this gcc does not know this kernel's layout of memory")
    assert run.returncode == 0, run.stderr[-4000:]
