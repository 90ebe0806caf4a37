"""`kaon kernels build`: a later start for the same GPU, model and flags, and its requests, find every kernel
compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.commands.kernel_build import Idle
from server.commands import kernels as kernels_command
from tests.parity.checkpoints import make_checkpoint
from tests.parity.quantized_checkpoints import write_pair
from tests.parity.test_quantization import FORMATS
from tests.parity.triton_interpreter import requires_interpreter

SLOW = pytest.mark.slow
LIMITS = ("--max-num-batched-tokens", "80", "--max-num-seqs", "6", "--max-model-len", "128", "--dtype", "bfloat16")
FLAGS = (*LIMITS, "--cudagraph-capture-sizes", "2,4", "--piecewise-capture-tokens", "16")
START = """
import dataclasses, sys
import pytest, torch
from triton import knobs
from engine.config.settings import load_config
from engine.commands import kernel_build
from engine.runner.start import start_runner
from engine.runner.device_batch import DeviceBatch
from engine.sequence import Sequence
from models.ops import triton
from models.ops.triton.configs import TARGETS
from tests.parity.ahead import Ahead
from tests.parity.idle_kernels import EACH_CHOICE, allocate_zeros
from tests.parity.paged_model import prompt

compiled, found = set(), set()

def count(*, metadata, cache_hit, **_):
    (found if cache_hit else compiled).add(metadata["name"])

knobs.compilation.listener = count
triton.start(torch.device("cpu"), TARGETS[sys.argv[1]])
loaded = kernel_build._load(load_config(sys.argv[2:]), 0, 1)
# As many blocks as its sequences can fill, which the scheduler reads here.
served = loaded.config.model_copy(update={"num_kvcache_blocks": 6 * 128 // loaded.config.kv_cache_block_size})
loaded = dataclasses.replace(loaded, config=served)
with pytest.MonkeyPatch.context() as patch:
    allocate_zeros(patch)
    runner = start_runner(loaded, rendezvous=lambda: None, agree=lambda fits: (fits.num_blocks, fits.num_slots))
    assert runner.graphs.captured_sizes == [2, 4]
    ahead = Ahead(runner)
    ahead.device = loaded.device_api
    runner.device_batch = DeviceBatch(loaded.device_api, 6)
    ahead.run(Sequence(prompt(3 + 20 * at, seed=at), 16, each, id=at) for at, each in enumerate(EACH_CHOICE))
print(len(found), *sorted(compiled))
"""
"""A start that reads the weights and computes everything that torch computes; requests with each way of sampling."""


@requires_interpreter
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "form"),
    [
        ("gfx942", None),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sm_90", "awq"), ("gfx950", None))),
    ],
)
def test_a_start_after_a_build_compiles_nothing(
    target: str, form: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if form is None:
        path = make_checkpoint(tmp_path / "model", "qwen3")
    else:
        path = write_pair(tmp_path / "model", *FORMATS[form]).quantised
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert kernels_command.run(["build", "--target", target, "--model", str(path), *FLAGS]) == 0
    said = capfd.readouterr()
    built = re.match(rf"{target}: (\d+) kernels compiled in \d+ s, 0 found compiled, in ", said.out)
    assert built, said
    started = subprocess.run(
        [sys.executable, "-c", START, target, str(path), *FLAGS],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    found, *compiled = started.stdout.split()
    assert not compiled
    assert 10 < int(found) <= int(built[1])


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["list"], "usage: kaon kernels build"),
        (["build", "--model", "m"], "--target"),
        (["build", "--target", "gfx942,gfx803"], "target is gfx803, which has no kernels"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels_command.run(arguments) == 2
    assert wrong in capsys.readouterr().err


def test_a_machine_without_triton_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.commands.kernels.find_spec", lambda name: None)
    assert kernels_command.run(["build", "--target", "gfx942"]) == 1
    assert "Triton, which compiles the kernels, is not installed" in capsys.readouterr().err


def test_the_command_takes_the_targets_of_the_table() -> None:
    from models.ops.triton.configs import TARGETS

    assert sorted(kernels_command.TARGETS) == sorted(TARGETS)


def test_torch_computes_nothing_large_and_gives_tensors_of_the_right_form() -> None:
    weight, x = torch.ones(512, 256), torch.ones(3, 256)
    with Idle(), torch.inference_mode():
        product = torch.nn.functional.linear(x, weight).bfloat16()
        assert (product.shape, product.dtype, product.abs().sum().item()) == ((3, 512), torch.bfloat16, 0.0)
        assert weight.t().data_ptr() == weight.data_ptr(), "views are views"
        assert (x[:, :2] + 1).tolist() == [[2.0, 2.0]] * 3, "small tensors are computed with"
        weight.mul_(2)
    assert weight[0, 0].item() == 1.0
