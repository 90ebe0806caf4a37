"""The CPU operators on random shapes, in a build that an access out of bounds or undefined arithmetic ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import models.kernels.cpu

SOURCES = Path(models.kernels.cpu.__file__).parent
CHECKS = "-fsanitize=address,undefined"
FLAGS = ["-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fno-trapping-math"]
FLAGS += ["-DKAON_SANITIZE", CHECKS, "-fno-sanitize-recover=all"]


def test_no_operator_leaves_its_memory(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing, with which the sanitizers are found")
    built = tmp_path / "operators.so"
    runtime = subprocess.check_output([compiler, "-print-file-name=libasan.so"], text=True).strip()
    if not Path(runtime).is_absolute():
        pytest.skip("gcc's address sanitizer is not installed")
    sources = map(str, sorted(SOURCES.glob("*.c")))
    subprocess.run([compiler, *FLAGS, "-shared", "-fPIC", "-o", built, *sources, "-lm"], check=True)
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.parity.cpu_fuzz", built, "60"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
