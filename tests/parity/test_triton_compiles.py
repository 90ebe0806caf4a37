"""Every kernel compiles ahead of time for every target, without spills, within LDS, with the instructions it needs.

In a process of its own: in this one kernels may be interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.kernels.triton.assembly import Assembly, problems
from models.kernels.triton.configs import TARGETS
from models.kernels.triton.probe_kernel import COMPILATIONS as PROBE

FIRST_CLASS = [arch for arch, target in TARGETS.items() if target.first_class]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", FIRST_CLASS)
def test_kernels_on_a_first_class_target(arch: str, tmp_path: Path) -> None:
    _compile(arch, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch not in FIRST_CLASS])
def test_kernels_on_another_target(arch: str, tmp_path: Path) -> None:
    _compile(arch, tmp_path)


def test_the_page_of_kernels_has_all_of_them(tmp_path: Path) -> None:
    result = _report(tmp_path, "--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("assembly", "wrong"),
    [
        (Assembly(8, 0, 0, 0, 8, {"v_mfma_f32": 1}, {16: 2}), []),
        (Assembly(8, 12, 3, 0, 8, {"v_mfma_f32": 1}, {16: 2}), ["12 bytes of registers are spilled"]),
        (Assembly(8, 0, 0, 65537, 8, {"v_mfma_f32": 1}, {16: 2}), ["65537 bytes of LDS of 65536"]),
        (Assembly(8, 0, 0, 0, 8, {}, {16: 2}), ["has a dot and no matrix instruction"]),
        (Assembly(8, 0, 0, 0, 8, {"v_mfma_f32": 1}, {2: 2}), ["2 loads of less than 4 bytes, 0 expected"]),
    ],
)
def test_what_is_wrong_is_said(assembly: Assembly, wrong: list[str]) -> None:
    (on_gfx942,) = (compilation for compilation in PROBE if compilation.target.arch == "gfx942")
    assert problems(on_gfx942, assembly) == wrong


def _compile(arch: str, cache: Path) -> None:
    result = _report(cache, "--json", "--targets", arch)
    assert result.stdout, result.stderr
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    wrong = [f"{one['name']} ({one['file']}): {', '.join(one['problems'])}" for one in compiled if one["problems"]]
    assert not wrong, "\n".join(wrong)
    assert result.returncode == 0, result.stderr


def _report(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "models.kernels.triton.report", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
