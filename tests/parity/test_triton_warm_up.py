"""The warm-up compiles all that Triton needs: a varied load afterwards needs no other kernel."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from benchmarks.gpu.launch import Launches, empty_kernel
from engine.batch import StepOutOfMemory
from engine.runner import kernel_checks, loaded_model
from engine.runner.device_batch import DeviceBatch
from engine.runner.warm_up import StepSizes, WarmUpStep, compile_kernels, warm_up_steps
from engine.sequence import Sequence
from models.attention.triton import TritonAttentionBackend
from models.ops.self_test import Problems
from models.ops.triton import configs
from models.ops.triton.configs import TARGETS, launch_of
from models.parallel.tensor_parallel import SINGLE_RANK, Collectives, Exchange, ExpertParallel, TensorParallel
from tests.parity.ahead import Ahead
from tests.parity.checkpoints import make_checkpoint
from tests.parity.idle_kernels import EACH_CHOICE, allocate_zeros
from tests.parity.runners import rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import VOCAB_SIZE, runner_for
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import Variant, deepseek, gemma3, gpt_oss, qwen3_next

__all__ = ["triton_kernels"]

pytestmark = requires_interpreter

INDEXED = next(each for each in deepseek.VARIANTS if each.overrides.get("index_topk") == 64)
SIZES = StepSizes(max_num_batched_tokens=100, max_num_seqs=9, max_model_len=64)
LIMITS = {"max_num_batched_tokens": 160, "max_num_seqs": 20, "max_model_len": 256}


def load() -> list[Sequence]:
    """Prompts that are chunked, that share steps, and that follow each other, each with its own way of sampling."""
    rng = np.random.default_rng(1)
    lengths = [1, 17, 200, 3, 64, 33, 5, 2, 90]
    return [
        Sequence(rng.integers(0, VOCAB_SIZE, length).tolist(), 16, EACH_CHOICE[place % len(EACH_CHOICE)], id=place)
        for place, length in enumerate(lengths)
    ]


# AMD's tiles are the most various.
@pytest.fixture(params=["gfx942", pytest.param("sm_90", marks=pytest.mark.slow)])
def fake_gpu(
    request: pytest.FixtureRequest, triton_kernels: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Kernels are launched with the tiles of a GPU, and compute nothing: their outputs are zeros."""
    monkeypatch.setattr(configs, "INTERPRETER", TARGETS[request.param])
    monkeypatch.setattr(type(empty_kernel), "run", lambda self, *arguments, **options: None)
    allocate_zeros(monkeypatch)
    launch_of.cache_clear()
    yield
    launch_of.cache_clear()


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(None, id="qwen3"),
        pytest.param(gpt_oss.VARIANTS[0], id="gpt_oss"),
        pytest.param(INDEXED, id="deepseek"),
        pytest.param(qwen3_next.VARIANTS[0], id="qwen3_next"),
    ],
)
def test_after_the_warm_up_a_varied_load_compiles_nothing(
    variant: Variant | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    path = (
        make_checkpoint(tmp_path, "qwen3")
        if variant is None
        else make_checkpoint(tmp_path, variant.family, **variant.overrides)
    )
    runner = runner_for(path, compilation_config={"cudagraph_capture_sizes": (2, 4)}, **LIMITS)
    device = GraphDevice()
    runner = rebuilt(runner, device, 100)
    with Launches() as warming:
        runner.warm_up()
    with Launches() as serving:
        ahead = Ahead(runner)
        ahead.device = device
        runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
        ahead.run(load())
    assert serving.signatures
    new = [signature for signature in serving.signatures if signature not in warming.signatures]
    assert not new, "\n".join(map(str, new))


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(None, id="qwen3"),
        pytest.param(gemma3.VARIANTS[0], id="gemma3", marks=pytest.mark.slow),
        pytest.param(gpt_oss.VARIANTS[0], id="gpt_oss", marks=pytest.mark.slow),
        pytest.param(INDEXED, id="deepseek"),
        pytest.param(qwen3_next.VARIANTS[0], id="qwen3_next"),
    ],
)
def test_what_checks_of_kernels_compile_requests_need(
    variant: Variant | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    family, overrides = ("qwen3", {}) if variant is None else (variant.family, variant.overrides)
    runner = runner_for(make_checkpoint(tmp_path, family, **overrides), **LIMITS)
    runner.device_batch = DeviceBatch(GraphDevice(), runner.config.max_num_seqs)
    with Launches() as checking, torch.inference_mode():
        for case in itertools.chain.from_iterable(kernel_checks._cases_of(runner.loaded).values()):
            # Kernels that compute nothing are all wrong: each check runs to its end.
            list(case.compare(Problems(runner.device)))
    runner = rebuilt(runner, num_blocks=100)
    with Launches() as warming:
        runner.warm_up()
    assert checking.signatures
    new = [signature for signature in checking.signatures if signature not in warming.signatures]
    assert not new, "\n".join(map(str, new))


def test_the_warm_up_keeps_to_the_limits_of_a_step_and_meets_every_power_of_two() -> None:
    steps = list(warm_up_steps(SIZES))
    for rows, num_decodes in steps:
        assert len(rows) <= 9
        assert sum(row.tokens for row in rows) <= 100
        assert all(row.tokens <= row.context <= 64 for row in rows)
        assert all(row.tokens == 1 for row in rows[:num_decodes])
    assert [sum(row.tokens for row in rows) for rows, decodes in steps if not decodes][:8] == [
        1, 2, 4, 8, 16, 32, 64, 100,
    ]  # fmt: skip
    assert {len(rows) for rows, decodes in steps if decodes == len(rows)} == {1, 2, 4, 8, 9}
    assert any(0 < decodes < len(rows) for rows, decodes in steps)


@pytest.mark.parametrize("parallel", [SINGLE_RANK, TensorParallel(1, 2, cast(Collectives, object()))])
def test_steps_without_room_are_left_out_and_reported_once(
    parallel: TensorParallel, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def run(step: WarmUpStep) -> None:
        tried.append(step)
        if len(step.rows) > 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.50 GiB")

    compile_kernels(SIZES, run, parallel)
    assert tried == list(warm_up_steps(SIZES))
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    left_out = sum(len(step.rows) > 1 for step in tried)
    assert warning.startswith(f"{left_out} of {len(tried)} steps of the warm-up were left out")
    assert warning.endswith("the GPU ran out of memory: 2.50 GiB more were asked for")


def test_a_step_without_room_ends_the_start_of_replicas_that_wait_for_it() -> None:
    tried = []

    def run(step: WarmUpStep) -> None:
        tried.append(step)
        raise torch.OutOfMemoryError("Tried to allocate 2.50 GiB")

    experts = ExpertParallel(0, 2, cast(Exchange, object()))
    with pytest.raises(StepOutOfMemory, match=r"2\.50 GiB"):
        compile_kernels(SIZES, run, TensorParallel(experts=experts))
    assert len(tried) == 1
