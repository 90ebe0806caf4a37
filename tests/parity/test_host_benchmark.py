"""The benchmark of the host's work for a GPU runs without one, with that GPU's tiles."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton

from benchmarks import host
from benchmarks.gpu.launch import OPERATORS
from models.ops import triton as kernels
from models.ops.triton.grids import cdiv, next_power_of_2
from tests.parity.triton_interpreter import DEVICE, triton_kernels

__all__ = ["triton_kernels"]

_LAUNCHES = """
import torch
from benchmarks.gpu.absent import AbsentBench, on
from benchmarks.gpu.launch import Launches
from benchmarks.gpu.launch import OPERATORS
from models.ops.triton.configs import TARGETS

with on(TARGETS["{target}"]), torch.inference_mode():
    call = OPERATORS["experts' gate and up"](AbsentBench(is_dry=True))
    with Launches() as launches:
        call()
    (signature,) = launches.signatures
    print(signature)
"""


def run(*arguments: str) -> str:
    """The output of a process of its own, in which kernels are not interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # One operator: the next test.
def test_every_operator_and_turn_is_measured_and_written_as_tables() -> None:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = json.loads(
        run("-m", "benchmarks.host", "--target", "sm_90", "--dry")
    )
    operators, turns = (dict(found[part]) for part in ("operators", "turns"))
    assert set(OPERATORS) <= set(operators)
    assert operators["attention: store, decode, merge"]["kernels"] == "3"
    assert operators["experts: sort, products, sum"]["kernels"] == "4"
    prompts = {name for name in turns if name.startswith("a prompt of 256 tokens")}
    assert set(turns) - prompts == {"2 sequences, replayed", "2 sequences, eager"}
    assert len(prompts) == 2
    for turn in (turns[name] for name in set(turns) - prompts):
        assert turn["a turn, ms"] > max(turn["schedule, ms"], turn["read, ms"], turn["postprocess, ms"]) > 0
    text = host.section({"sm_90": found})
    assert "### Launching kernels, sm_90" in text
    assert "| experts: sort, products, sum | " in text


@pytest.mark.parametrize(
    ("target", "is_amd"), [pytest.param("sm_90", False, marks=pytest.mark.slow), ("gfx942", True)]
)
def test_launches_are_those_of_the_gpu_that_is_named(target: str, is_amd: bool) -> None:
    assert ("matrix_instr_nonkdim" in run("-c", _LAUNCHES.format(target=target))) == is_amd


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 255, 256, 257, 151936])
def test_what_grids_and_tiles_are_computed_with_gives_tritons_numbers(count: int) -> None:
    assert next_power_of_2(count) == triton.next_power_of_2(count)
    assert [cdiv(count, size) for size in (1, 2, 16, 100)] == [triton.cdiv(count, size) for size in (1, 2, 16, 100)]


@pytest.mark.usefixtures("triton_kernels")
def test_kernels_run_rows_without_gaps_on_their_device() -> None:
    x = torch.zeros(4, 8, device=DEVICE)
    assert kernels.runs(x, x[:, :3], x[::2], x[0], x.sum(), x.expand(2, 4, 8))
    assert not kernels.runs(x, x.T)
    assert not kernels.runs(x, x[:, ::2])
    assert not kernels.runs(x, torch.zeros(4, 8, device="meta"))
