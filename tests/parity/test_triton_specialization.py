"""Serving compiles no kernel again if a step has other numbers of tokens, rows, blocks or lengths."""

from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.runner.device import Downloads, Uploads
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.sampler import Sampler
from engine.text.structured.matcher import MaskedRow, packed
from models.attention.triton import TritonAttentionBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.delayed_device import DelayedDevice, read
from tests.parity.launches import Launches
from tests.parity.paged_model import PagedModel, Row, prompt
from tests.parity.test_triton_latent_models import MODELS
from tests.parity.test_triton_quantized_models import write_experts
from tests.parity.triton_interpreter import DEVICE, requires_interpreter, triton_kernels  # noqa: F401, a fixture

pytestmark = [requires_interpreter, pytest.mark.usefixtures("triton_kernels")]


@triton.jit(do_not_specialize=["free"])
def copy_kernel(x, out, free, bound, SIZE: tl.constexpr):
    """No value that varies."""
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(x + lanes, mask=lanes < bound, other=0.0), mask=lanes < free)


@pytest.mark.parametrize(
    ("free", "bound", "offset", "wrong"),
    [
        (1, 16, 0, []),
        (7, 32, 0, []),
        (16, 1, 0, ["copy_kernel in step 1: bound is ('constexpr', 1)"]),
        (16, 7, 0, ["copy_kernel in step 1: bound is ('i32', '')"]),
        (16, 16, 1, ["copy_kernel in step 1: x is ('*fp32', 'S')"]),
    ],
)
def test_what_varies_and_is_specialised_is_found(free: int, bound: int, offset: int, wrong: list[str]) -> None:
    launches = Launches()
    x, out = torch.zeros(32), torch.zeros(16)
    with launches.step():
        copy_kernel[(1,)](x, out, 16, 16, SIZE=16)
    with launches.step():
        copy_kernel[(1,)](x[offset:], out, free, bound, SIZE=16)
    assert launches.recompiled() == wrong


def quantized(name: str, directory: Path) -> Path:
    shape = {"moe_intermediate_size": 64, "num_hidden_layers": 1}
    return write_experts(directory, "Qwen3MoeForCausalLM", name, **shape).quantised


MODELS_OF = {
    "fp8 experts": lambda directory: quantized("fp8 blocks", directory),
    "int4 experts": lambda directory: quantized("gptq, zero points", directory),
    "latents": lambda directory: make_checkpoint(directory, MODELS[2].family, **MODELS[2].overrides),
    "recurrent": lambda directory: make_checkpoint(directory, MODELS[3].family, **MODELS[3].overrides),
}


@pytest.mark.parametrize("name", MODELS_OF)
def test_steps_of_other_sizes_compile_nothing_again(name: str, tmp_path: Path) -> None:
    """Prompts and decodes whose numbers are neither 1 nor multiples of 16, and then those that are."""
    model = PagedModel(MODELS_OF[name](tmp_path), backend=TritonAttentionBackend(DEVICE), num_blocks=128)
    launches = Launches()

    def step(*spans: tuple[Row, int], decodes: int = 0) -> None:
        with launches.step():
            model.step(list(spans), num_decodes=decodes)

    for lengths in ([5, 18, 3], [16], [12, 4], [8] * 16):
        rows = [Row(prompt(length + 2, seed=seed), slot=seed) for seed, length in enumerate(lengths)]
        step(*((row, length) for row, length in zip(rows, lengths, strict=True)))
        step(*((row, 1) for row in rows), decodes=len(rows))
    assert len(launches.steps[0]) > 10
    assert launches.recompiled() == []


def sampled(count: int) -> None:
    """A step that samples some rows in every way, each with changes to its logits and log probabilities."""
    rng, width = np.random.default_rng(count), 160
    every = np.arange(count)
    rows = SamplingRows(
        random=RandomRows(
            rows=every,
            temperature=np.full(count, 0.8, np.float32),
            top_k=np.resize([width, 5], count),
            top_p=np.resize([1.0, 0.9, 0.4], count),
            min_p=np.zeros(count),
            key=every.astype(np.uint64),
            position=every,
            filtered=np.resize([False, True], count),
        ),
        repetition=Adjustments(every, every, np.full(count, 1.5, np.float32)),
        frequency=Adjustments(every, every + 9, np.full(count, 0.5, np.float32)),
        bias=Adjustments(every, every + 20, np.full(count, 4.0, np.float32)),
        masked=[MaskedRow(row, allowed=packed([5, 128], width)) for row in range(0, count, 2)],
        num_logprobs=dict.fromkeys(range(0, count, 2), 3),
    )
    logits = torch.from_numpy(rng.normal(size=(count, width)).astype(np.float32))
    read(Sampler().launch(logits, rows, Uploads(DelayedDevice()).send), Downloads(DelayedDevice()))


def test_sampling_other_numbers_of_rows_compiles_nothing_again() -> None:
    launches = Launches()
    for count in (3, 16, 7, 1, 32):
        with launches.step():
            sampled(count)
    assert {"argmax_kernel", "weigh_kernel"} <= {kernel for kernel, _ in launches.steps[0]}
    assert launches.recompiled() == []
