"""The CPU operators in builds that end at an access out of bounds, undefined arithmetic, or a data race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import models.ops.cpu

SOURCES = Path(models.ops.cpu.__file__).parent
CHECKS = "-fsanitize=address,undefined"
FLAGS = ["-O0", "-g1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-DKAON_SANITIZE"]


def compile_with(runtime: str, built: Path, *arguments: str) -> Path:
    """Compile the operators with a sanitizer; where its library is."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing, with which the sanitizers are found")
    found = Path(subprocess.check_output([compiler, f"-print-file-name={runtime}"], text=True).strip())
    if not found.is_absolute():
        pytest.skip(f"gcc's {runtime} is not installed")
    sources = map(str, sorted(SOURCES.glob("*.c")))
    subprocess.run([compiler, *FLAGS, *arguments, "-o", built, *sources, "-lm", "-lpthread"], check=True)
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_no_operator_leaves_its_memory(rounds: int, tmp_path: Path) -> None:
    built = tmp_path / "operators.so"
    runtime = compile_with("libasan.so", built, CHECKS, "-fno-sanitize-recover=all", "-shared", "-fPIC")
    environment = {**os.environ, "LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    for fuzz in (["tests.parity.cpu_fuzz", built, str(rounds)], ["tests.parity.exchange_fuzz", str(rounds), built]):
        run = subprocess.run(
            [sys.executable, "-m", *fuzz], env=environment, capture_output=True, text=True, timeout=1700, check=False
        )
        assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("programs", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_share_nothing_unordered(programs: int, tmp_path: Path) -> None:
    built = tmp_path / "pool"
    compile_with("libtsan.so", built, "-fsanitize=thread", f"-I{SOURCES}", str(Path(__file__).with_name("cpu_pool.c")))
    run = subprocess.run([built, str(programs)], capture_output=True, text=True, timeout=1700, check=False)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the thread sanitizer of this gcc does not know this kernel's layout of memory")
    assert run.returncode == 0, run.stderr[-4000:]
