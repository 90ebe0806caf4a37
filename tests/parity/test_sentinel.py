"""Served results are compared with torch at intervals: each wrong operator and rank is found, and no other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from engine.core.scheduler import Scheduler
from engine.runner import loaded_model, sentinel
from engine.runner.model_runner import ModelRunner
from engine.runner.sentinel import Mismatch, Sentinel
from engine.sampling_params import SamplingParams
from models.attention.triton import TritonAttentionBackend
from models.layers import linear as linear_layers
from models.ops import triton
from models.ops.cpu import attention as attention_ops
from models.ops.cpu import dense as dense_ops
from models.ops.stored_weight import stored_of
from models.ops.triton.specializations import Specialization, UncheckedKernel
from tests.parity import quantized_checkpoints as q
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.rank_threads import RankThreads
from tests.parity.runners import rebuilt
from tests.parity.test_cpu_models import needs_operators
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_quantization import FORMATS
from tests.parity.test_triton_checks import break_kernels
from tests.parity.test_worker_model_runner import generate, runner_for
from tests.parity.thread_ranks import ThreadCollectives
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import all_variants

__all__ = ["triton_kernels"]

BF16 = torch.bfloat16
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention, experts and projections, of sizes that the CPU's operators support."""
    variant = next(one for one in all_variants() if one.architecture == "Qwen3MoeForCausalLM")
    sizes = {"head_dim": 32, "moe_intermediate_size": 32}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), variant.family, **variant.overrides | sizes)


def watched(path: Path, **fields: Any) -> ModelRunner:
    """A runner that compares each decode step, at any cost, once an earlier comparison has ended."""
    runner = runner_for(path, BF16, sentinel_interval=1, num_kvcache_blocks=NUM_BLOCKS, **fields)
    unhurried(runner)
    return runner


def unhurried(runner: ModelRunner) -> None:
    assert runner.sentinel is not None
    runner.sentinel._budget = float("inf")
    runner.sentinel._seconds = dict.fromkeys(sentinel.OPERATORS, 0.0)


def decode(runner: ModelRunner, steps: int, seed: int = 0) -> list[list[int]]:
    """Run `steps` steps of two sequences. Returns the sentinel's findings, completed while idle."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    prompts = [prompt(5 + seed % 7, seed=2 * seed), prompt(6 + seed % 5, seed=2 * seed + 1)]
    tokens = generate(runner, Scheduler(runner.config), prompts, params)
    while runner.sentinel is not None and runner.sentinel.catch_up():
        pass
    return tokens


def found(runner: ModelRunner) -> set[str]:
    assert runner.sentinel is not None
    return {mismatch.operator for mismatch in runner.sentinel.mismatches}


@needs_operators
@pytest.mark.parametrize(
    "steps", [240, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(14400)])], ids=["some", "many"]
)
def test_sound_steps_raise_no_alarm(checkpoint: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "_LATER", 0)
    runner = watched(checkpoint)
    assert runner.program is not None, "steps that are not compared are recorded ones"
    for seed in range(-(-steps // 240)):
        decode(runner, 240, seed)
    checks, mismatches = runner.sentinel_counts()
    assert checks > 0.9 * steps
    assert mismatches == 0


@needs_operators
def test_padded_heads_and_experts_raise_no_alarm(tmp_path: Path) -> None:
    variant = next(one for one in all_variants() if one.architecture == "Qwen3MoeForCausalLM")
    sizes = {"head_dim": 20, "hidden_size": 72, "moe_intermediate_size": 40}
    runner = watched(make_checkpoint(tmp_path, variant.family, **variant.overrides | sizes))
    assert runner.program is not None, "the operators compute all layers"
    decode(runner, 24)
    assert runner.sentinel_counts()[0] >= 12
    assert not runner.sentinel.mismatches  # type: ignore[union-attr]


SPOILED = {
    "attention": (attention_ops, "attention"),
    "linear": (dense_ops, "linear"),
    "moe": (dense_ops, "grouped_linear"),
}


@needs_operators
@pytest.mark.parametrize("operator", SPOILED)
def test_each_spoiled_operator_is_found(
    operator: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = watched(checkpoint)
    module, name = SPOILED[operator]
    compute = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **how: compute(*args, **how) * 1.2)
    decode(runner, 12)
    assert found(runner) == {operator}
    assert "A decode step does not equal torch: " in caplog.text
    assert runner.sentinel_counts()[1] > 0


@pytest.fixture
def triton_backend(triton_kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models attend by kernels."""
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)


@pytest.mark.slow  # An operator: the test above; a kernel that is refused: the last test here.
@requires_interpreter
@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("kernel", "operator"), [("attention_decode_kernel", "attention"), ("moe_gemm_kernel", "moe")]
)
def test_a_spoiled_kernel_is_left_to_torch(
    kernel: str, operator: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = watched(checkpoint, cpu_operators=False)
    break_kernels(monkeypatch, kernel)
    decode(runner, 6)
    assert found(runner) == {operator}
    mismatches = runner.sentinel_counts()[1]
    decode(runner, 4)
    assert triton.left() == {operator}
    assert runner.sentinel_counts()[1] == mismatches, "the spoiled kernel computes no further step"


@pytest.mark.slow
@requires_interpreter
@pytest.mark.usefixtures("triton_backend")
def test_a_spoiled_product_of_quantised_weights_is_found_and_weights_become_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = q.write_pair(tmp_path, *FORMATS["awq"], hidden_size=192, intermediate_size=320).quantised
    runner = watched(path, cpu_operators=False)
    decode(runner, 2)
    assert not found(runner)
    break_kernels(monkeypatch, "four_bit_gemm_kernel")
    decode(runner, 6)
    assert found(runner) == {"linear"}
    decode(runner, 2)
    assert triton.left() == {"linear"}
    assert all(stored_of(layer.weight) is None for layer in runner.sentinel._linear)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_the_rows_of_a_graph_s_replay_are_compared(
    is_spoiled: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr("models.loading.loader.can_pack", lambda _dtype: False)
    sizes = {"cudagraph_capture_sizes": (2,)}
    runner = watched(checkpoint, cpu_operators=False, compilation_config=sizes)
    runner = rebuilt(runner, device := GraphDevice(), NUM_BLOCKS)
    unhurried(runner)
    assert runner.graphs is not None
    assert not runner.graphs.capture_next()
    if is_spoiled:
        compute = linear_layers.linear
        monkeypatch.setattr(linear_layers, "linear", lambda *args: compute(*args) * 1.2)
    device.num_replayed = 0
    decode(runner, 9)
    assert device.num_replayed >= 8
    assert runner.sentinel_counts()[0] > 2
    assert found(runner) == ({"linear"} if is_spoiled else set())


@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_each_spoiled_rank_is_found(
    spoiled: int | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ranks know it after the comparison, for any rank with a wrong sum."""
    reported: list[tuple[int, str]] = []
    report, reduce = Sentinel._report, ThreadCollectives.all_reduce
    is_serving = False

    def note(self: Sentinel, mismatch: Mismatch) -> None:
        reported.append((self._parallel.rank, mismatch.operator))
        report(self, mismatch)

    def all_reduce(self: ThreadCollectives, x: torch.Tensor) -> torch.Tensor:
        total = reduce(self, x)
        return total * 1.25 if is_serving and self._rank == spoiled else total

    monkeypatch.setattr(Sentinel, "_report", note)
    monkeypatch.setattr(ThreadCollectives, "all_reduce", all_reduce)
    path = make_checkpoint(tmp_path, "qwen3")

    def lead(runner: ModelRunner) -> tuple[int, int]:
        nonlocal is_serving
        is_serving = True
        unhurried(runner)
        decode(runner, 6)
        return runner.sentinel_counts()

    ranks = RankThreads(
        path, sentinel_interval=2, num_kvcache_blocks=NUM_BLOCKS, max_model_len=128, max_num_seqs=4, device="cpu"
    )
    checks, mismatches = ranks.run(lead)
    assert checks >= 3
    if spoiled is None:
        assert not reported
    else:
        assert {rank for rank, operator in reported if operator == "all_reduce"} == {0, 1}
        assert mismatches > 0


@needs_operators
def test_what_would_delay_a_step_waits_until_the_engine_is_idle(checkpoint: Path) -> None:
    runner = watched(checkpoint)
    assert runner.sentinel is not None
    runner.sentinel._budget = 0.0
    runner.sentinel._seconds = dict.fromkeys(sentinel.OPERATORS, 1.0)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    generate(runner, Scheduler(runner.config), [prompt(5)], params)
    assert runner.sentinel_counts() == (0, 0)
    while runner.prepare_while_idle():
        pass
    assert runner.sentinel_counts() == (3, 0)


@needs_operators
@pytest.mark.parametrize(("seconds", "is_affordable"), [(0.009, True), (0.011, False)])
def test_a_comparison_delays_a_step_by_one_percent_at_most(
    seconds: float, is_affordable: bool, checkpoint: Path
) -> None:
    watching = runner_for(checkpoint, BF16, sentinel_interval=1, num_kvcache_blocks=NUM_BLOCKS).sentinel
    assert watching is not None
    watching._step_seconds, watching._seconds = 1.0, {"linear": seconds}
    assert watching._is_affordable("linear") == is_affordable


@needs_operators
def test_only_so_many_steps_are_compared_and_none_on_a_cpu_unless_that_is_asked_for(checkpoint: Path) -> None:
    runner = runner_for(checkpoint, BF16, sentinel_interval=16, num_kvcache_blocks=NUM_BLOCKS)
    unhurried(runner)
    decode(runner, 40)
    assert runner.sentinel_counts() == (6, 0), "three operators of two steps"
    assert runner_for(checkpoint, BF16).sentinel is None


@requires_interpreter
@pytest.mark.usefixtures("triton_backend")
def test_an_operator_whose_kernel_is_refused_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_for(make_checkpoint(tmp_path, "qwen3"), BF16, cpu_operators=False)
    expected = decode(runner, 2)
    run = InterpretedFunction.run

    def refuse(self: Any, *arguments: Any, **keywords: Any) -> None:
        if self.__name__ == "rms_norm_kernel":
            raise UncheckedKernel(Specialization("rms_norm_kernel", ()), "norm")
        run(self, *arguments, **keywords)

    monkeypatch.setattr(InterpretedFunction, "run", refuse)
    with pytest.raises(UncheckedKernel, match="a kernel for norm was not compared with torch in this form"):
        decode(runner, 2)
    assert triton.left() == {"norm"}
    assert decode(runner, 2) == expected
