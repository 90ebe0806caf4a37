"""Decodes of every architecture, replayed as on a GPU: operators and launches, with the values of the capture."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from engine.core.scheduler import Scheduler
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device_batch import DeviceInputs
from engine.runner.model_runner import ModelRunner
from engine.runner.step_graphs import why_no_graphs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.architectures.registry import ARCHITECTURES as REGISTERED
from models.attention.triton import TritonAttentionBackend
from models.ops import triton
from tests.parity.adapters import make_adapter, read_weights
from tests.parity.ahead import answers, waiting
from tests.parity.checkpoints import make_checkpoint
from tests.parity.foreign_models import GLM_MOE_DSA, GPT2, ZAYA, Foreign
from tests.parity.idle_kernels import allocate_zeros
from tests.parity.paged_model import prompt
from tests.parity.quantized_checkpoints import write_pair
from tests.parity.recorded_graph import NotCapturable, RecordedGraph, RecordingDevice
from tests.parity.runners import rebuilt
from tests.parity.test_quantization import FORMATS
from tests.parity.test_transformers_route import LONG_ROPES
from tests.parity.test_triton_quantized_models import write_experts
from tests.parity.test_worker_model_runner import NUM_BLOCKS, runner_for
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import (
    DERIVED,
    KINDS,
    Variant,
    attention_2026,
    attention_families,
    attention_only,
    block_sparse,
    compressed,
    deepseek,
    gemma3,
    gemma3n,
    gemma4,
    glm5_next,
    gpt_oss,
    lfm2,
    llama,
    mamba2,
    moe,
    older,
    phi3,
    qwen3_5,
    qwen3_next,
    recurrent,
    zamba2,
)

__all__ = ["triton_kernels"]

pytestmark = requires_interpreter

SIZE = 4
SLOW = pytest.mark.slow
INDEXED = next(each for each in deepseek.VARIANTS if each.overrides.get("index_topk") == 64)
ARCHITECTURES = [
    pytest.param(None, id="qwen3"),
    pytest.param(llama.VARIANTS[0], id="llama"),
    pytest.param(next(each for each in llama.VARIANTS if each.architecture == "Qwen2ForCausalLM"), id="qwen2"),
    pytest.param(next(each for each in moe.VARIANTS if each.architecture == "MixtralForCausalLM"), id="mixtral"),
    pytest.param(gemma3.VARIANTS[0], id="gemma3"),
    pytest.param(gpt_oss.VARIANTS[0], id="gpt_oss"),
    pytest.param(glm5_next.VARIANTS[0], id="glm5_next"),
    pytest.param(phi3.VARIANTS[0], id="phi3"),
    pytest.param(phi3.VARIANTS[-1], id="phimoe", marks=SLOW),
    pytest.param(moe.VARIANTS[0], id="qwen3_moe"),
    pytest.param(moe.VARIANTS[-1], id="glm4_moe"),
    pytest.param(deepseek.VARIANTS[1], id="deepseek_v2"),
    pytest.param(INDEXED, id="deepseek_v32"),
    pytest.param(qwen3_next.VARIANTS[0], id="qwen3_next"),
    pytest.param(block_sparse.VARIANTS[0], id="minimax_m3"),
    pytest.param(compressed.VARIANTS[0], id="deepseek_v4"),
    *(
        pytest.param(
            next(each for each in variants if each.architecture == name),
            id=name,
            marks=SLOW if name in DERIVED else (),
        )
        for variants in (
            qwen3_5.VARIANTS,
            gemma3n.VARIANTS,
            gemma4.VARIANTS,
            attention_2026.VARIANTS,
            attention_only.VARIANTS,
            attention_families.VARIANTS,
            mamba2.VARIANTS,
            lfm2.VARIANTS,
            older.VARIANTS,
            recurrent.VARIANTS,
            zamba2.VARIANTS,
        )
        for name in sorted({each.architecture for each in variants})
    ),
]


def in_short_form(each: Any) -> Any:
    """The case; if its architecture is not one of `KINDS`, in the long form only."""
    variant = each.values[0]
    is_long = variant is not None and variant.architecture not in KINDS
    return pytest.param(variant, id=each.id, marks=SLOW if is_long else each.marks)


def test_every_architecture_is_among_them() -> None:
    tried = {"Qwen3ForCausalLM", *(each.values[0].architecture for each in ARCHITECTURES if each.values[0])}
    assert {REGISTERED[name].model_class for name in tried} == {REGISTERED[name].model_class for name in REGISTERED}


def test_torchs_attention_to_selected_keys_is_not_captured(tmp_path: Path) -> None:
    runner = runner_of(checkpoint_of(compressed.VARIANTS[0], tmp_path), {"cudagraph_capture_sizes": (SIZE,)})
    triton.leave_to_torch(frozenset({"attention"}))
    reason = why_no_graphs(dataclasses.replace(runner.loaded, device_api=RecordingDevice()))
    assert reason is not None
    assert "lengths that it reads on the host" in reason


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("kind", LONG_ROPES)
def test_the_general_route_has_graphs_where_its_ropes_read_no_lengths(
    kind: str, is_followed: bool, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, rope_parameters=LONG_ROPES[kind], max_position_embeddings=128)
    how, length = {"cudagraph_capture_sizes": (SIZE,)}, 256 if is_followed else 128
    runner = runner_for(path, compilation_config=how, max_model_len=length, model_impl="transformers")
    reason = why_no_graphs(dataclasses.replace(runner.loaded, device_api=RecordingDevice()))
    assert (reason is not None) == is_followed
    if reason is not None:
        assert "set max_model_len to the original context" in reason


@pytest.mark.parametrize(("foreign", "has_graphs"), [(ZAYA, False), (GLM_MOE_DSA, False), (GPT2, True)])
def test_the_general_route_has_graphs_where_no_cache_is_planned_on_the_host(
    foreign: Foreign, has_graphs: bool, tmp_path: Path
) -> None:
    runner = runner_for(foreign.checkpoint(tmp_path), model_impl="transformers")
    reason = why_no_graphs(dataclasses.replace(runner.loaded, device_api=RecordingDevice()))
    assert (reason is None) == has_graphs
    assert has_graphs or "lengths that Kaon reads on the host" in str(reason)


@pytest.fixture(autouse=True)
def _captures(triton_kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)


@pytest.fixture
def _kernels_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs are zeros."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *arguments, **options: None)
    allocate_zeros(monkeypatch)


def checkpoint_of(variant: Variant | None, directory: Path) -> Path:
    if variant is None:
        return make_checkpoint(directory, "qwen3")
    return make_checkpoint(directory, variant.family, **variant.overrides)


def runner_of(path: Path, how: dict[str, Any], **fields: Any) -> ModelRunner:
    return runner_for(path, compilation_config=how, max_num_seqs=SIZE, max_model_len=64, **fields)


def captured(path: Path, **fields: Any) -> tuple[ModelRunner, RecordingDevice]:
    """A runner whose steps of up to SIZE rows are recorded."""
    runner, device = runner_of(path, {"cudagraph_capture_sizes": (SIZE,)}, **fields), RecordingDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    assert runner.graphs is not None
    runner.graphs.capture_next()
    device.num_replayed = 0  # The pass that tested the graph does not count.
    return runner, device


def assert_captures(caplog: pytest.LogCaptureFixture, path: Path, **fields: Any) -> None:
    runner, _ = captured(path, **fields)
    assert runner.graphs is not None
    assert runner.graphs.captured_sizes == [SIZE], caplog.messages


def sequences() -> list[Sequence]:
    """Sequences that end in turn."""
    made = []
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=i + 1, ignore_eos=True, logprobs=1)
        made.append(Sequence(prompt(i + 2, seed=i), 16, params, id=i))
    return made


@pytest.mark.usefixtures("_kernels_compute_nothing")
@pytest.mark.parametrize("variant", map(in_short_form, ARCHITECTURES))
def test_a_decode_of_every_architecture_can_be_captured_and_a_prompt_in_pieces(
    variant: Variant | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner, _ = captured_in_pieces(checkpoint_of(variant, tmp_path))
    assert runner.graphs is not None
    assert runner.graphs.captured_sizes == [SIZE], caplog.messages
    assert f"up to {PIECES} tokens replay graphs" in caplog.text, caplog.messages


@pytest.mark.usefixtures("_kernels_compute_nothing")
@pytest.mark.parametrize("name", ["fp8 blocks", "fbgemm", "awq", "quark mxfp4"])
def test_a_decode_by_quantised_weights_can_be_captured(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize, config = FORMATS[name]
    assert_captures(caplog, write_pair(tmp_path, quantize, config).quantised)


@pytest.mark.usefixtures("_kernels_compute_nothing")
@pytest.mark.parametrize("name", ["fp8 blocks", "gptq, zero points"])
def test_a_decode_by_quantised_experts_can_be_captured(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = write_experts(tmp_path, "Qwen3MoeForCausalLM", name, moe_intermediate_size=64)
    assert_captures(caplog, pair.quantised)


@pytest.mark.usefixtures("_kernels_compute_nothing")
def test_a_decode_with_adapters_and_a_cache_in_fp8_can_be_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "base", "qwen3")
    make_adapter(tmp_path / "adapter", read_weights(path), rank=4, alpha=8, leaves={"q_proj", "down_proj"}, seed=1)
    assert_captures(caplog, path, lora=(f"one={tmp_path / 'adapter'}",), quantization_config={"kv_cache_dtype": "fp8"})


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(*each.values, id=each.id, marks=() if each.id == "qwen3" else pytest.mark.slow)
        for each in ARCHITECTURES
    ],
)
def test_replays_are_eager_steps(variant: Variant | None, tmp_path: Path) -> None:
    path = checkpoint_of(variant, tmp_path)
    expected = answers(waiting(runner_of(path, {"enforce_eager": True}), sequences()))
    runner, device = captured(path)
    assert answers(waiting(runner, sequences())) == expected
    assert device.num_replayed == 2


PIECES = 12
"""Number of tokens of a captured step with prompts."""
QUICK = ("Lfm2ForCausalLM",)
"""Attention, and a short convolution next to it."""


def captured_in_pieces(path: Path, **fields: Any) -> tuple[ModelRunner, RecordingDevice]:
    """A runner whose steps with prompts are recorded in pieces."""
    how = {"cudagraph_capture_sizes": (SIZE,), "piecewise_capture_tokens": PIECES}
    device = RecordingDevice(has_pieces=True)
    runner = rebuilt(runner_of(path, how, max_num_batched_tokens=64, **fields), device, NUM_BLOCKS)
    assert runner.graphs is not None
    runner.graphs.capture_all()
    device.num_replayed = 0
    return runner, device


@pytest.mark.usefixtures("_kernels_compute_nothing")
def test_prompts_without_adapters_are_replayed_where_others_have_them(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "base", "qwen3")
    make_adapter(tmp_path / "adapter", read_weights(path), rank=4, alpha=8, leaves={"q_proj", "down_proj"}, seed=1)
    runner, device = captured_in_pieces(path, lora=(f"one={tmp_path / 'adapter'}",))
    scheduler = Scheduler(runner.config)
    for adapter, is_replayed in ((0, True), (1, False)):
        before = device.num_replayed
        scheduler.extend([Sequence([1, 2, 3], 16, SamplingParams(max_tokens=1), id=adapter, adapter=adapter)])
        scheduled = scheduler.schedule()
        assert scheduled is not None
        batch, in_step = scheduled
        scheduler.postprocess(list(in_step.values()), runner.forward(batch))
        assert (device.num_replayed > before) == is_replayed


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(*each.values, id=each.id, marks=() if each.id in QUICK else pytest.mark.slow)
        for each in ARCHITECTURES
    ],
)
def test_prompts_replayed_in_pieces_are_eager_steps(variant: Variant | None, tmp_path: Path) -> None:
    """Two sequences at first, and another one while they decode, whose prompt is longer than the captured ones."""
    path = checkpoint_of(variant, tmp_path)
    expected = answers(waiting(runner_of(path, {"enforce_eager": True}), sequences()))
    runner, device = captured_in_pieces(path)
    graphs = runner.graphs
    assert graphs is not None
    replayed = []
    in_pieces = graphs.run_in_pieces

    def run_in_pieces(step: DeviceInputs, num_tokens: int) -> torch.Tensor | None:
        before = device.num_replayed
        hidden = in_pieces(step, num_tokens)
        replayed.append((num_tokens, device.num_replayed - before))
        return hidden

    graphs.run_in_pieces = run_in_pieces  # type: ignore[method-assign]
    assert answers(waiting(runner, sequences())) == expected
    ((num_tokens, num_graphs),) = replayed
    assert num_tokens == sum(len(seq.token_ids) for seq in sequences())
    # One around each attention or recurrent part, which some layers do not have; an indexer's is part of the
    # attention's.
    num_layers = len({tuple(spec.name.split(".")[:4]) for spec in runner.model.kv_cache_layers()})
    assert num_layers < num_graphs <= 3 * num_layers, "at most three graphs for a layer and those without a cache"


@pytest.mark.parametrize(
    ("refused", "run"),
    [
        ("aten._local_scalar_dense", lambda x: x.sum().item()),
        ("aten.index_put", lambda x: x.index_put_((x > 0,), x[:2])),
        ("aten._local_scalar_dense", lambda x: bool(x[0] > 0)),
        ("aten.index.Tensor", lambda x: x[x > 0]),
        ("tensor", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
        ("asarray", lambda x: x + torch.asarray([1.0, 2.0, 3.0])),
        ("lift_fresh", lambda x: x + torch.from_numpy(np.ones(3, np.float32))),
        ("new_tensor", lambda x: x + x.new_tensor([1.0, 2.0, 3.0])),
        ("numbers of the host", lambda x: x[[0, 2]]),
        ("names no device", lambda x: x + torch.arange(3)),
        ("tolist", lambda x: x.tolist()),
        ("aten.bernoulli", lambda x: torch.bernoulli(x)),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(refused: str, run: Callable[[torch.Tensor], None]) -> None:
    given = torch.tensor([0.5, 0.0, 1.0])
    with pytest.raises(NotCapturable, match=refused):
        RecordedGraph(lambda: run(given))


def test_a_replay_has_the_host_s_numbers_of_the_capture_and_the_device_s_of_now() -> None:
    given, taken, factor = torch.ones(3), torch.zeros(3), 2.0
    with torch.inference_mode():
        graph = RecordedGraph(lambda: taken.copy_(given * factor + 1.0))
        given[:], factor = 5.0, 100.0
        graph.replay()
    assert taken.tolist() == [11.0, 11.0, 11.0]
