"""The CPU operators compiled for Arm and run by an emulator: the same numerics as on this processor, on each path."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import models.ops.cpu
from tests.parity.emulated_operators import EMULATOR

COMPILER = "aarch64-linux-gnu-gcc"
SOURCES = Path(models.ops.cpu.__file__).parent
# gcc 12 wrongly reports sums of 4-bit weights as uninitialised. Without optimisation, panels.c takes minutes.
FLAGS = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-maybe-uninitialized"]
FLAGS += ["-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden", f"-I{SOURCES}"]
pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason=f"{COMPILER} or {EMULATOR} is missing: Debian has them in gcc-aarch64-linux-gnu and qemu-user",
    ),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor runs Arm's paths itself"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operators and cpu_driver.c, as a program for Arm."""
    directory = tmp_path_factory.mktemp("arm")

    def compile_one(source: Path) -> Path:
        made = directory / f"{source.stem}.o"
        subprocess.run([COMPILER, *FLAGS, "-c", "-o", made, source], check=True)
        return made

    sources = [*sorted(SOURCES.glob("*.c")), Path(__file__).with_name("cpu_driver.c")]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    program = directory / "driver"
    subprocess.run([COMPILER, "-static", "-o", program, *objects, "-lm", "-lpthread"], check=True)
    return program


def test_the_sources_are_c_for_arm_too() -> None:
    """Only the syntax is checked, since generating code takes a quarter of a minute."""
    sources = map(str, sorted(SOURCES.glob("*.c")))
    checked = subprocess.run(
        [COMPILER, *FLAGS, "-fsyntax-only", *sources], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 20])
def test_operators_on_arm_compute_what_their_references_do(rounds: int, driver: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.parity.emulated_operators", driver, str(rounds)],
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.endswith("ran portable neon neon_bf16\n")


@pytest.mark.slow
def test_a_processor_runs_the_paths_that_it_has_instructions_for(driver: Path) -> None:
    """A Cortex-A72 has no byte products, a Neoverse N1 no bfloat16 products."""
    script = (
        "import sys; from pathlib import Path; from models.ops.cpu import runtime\n"
        "from tests.parity.emulated_operators import EmulatedLibrary\n"
        "for cpu in sys.argv[2:]:\n"
        "    library = EmulatedLibrary(Path(sys.argv[1]), cpu)\n"
        "    print(cpu, *(runtime.INSTRUCTION_SETS[isa] for isa in library.available)); library.close()"
    )
    cpus = ["cortex-a72", "neoverse-n1", "max"]
    found = subprocess.check_output([sys.executable, "-c", script, driver, *cpus], text=True)
    assert found.splitlines() == ["cortex-a72 portable", "neoverse-n1 portable neon", "max portable neon neon_bf16"]
