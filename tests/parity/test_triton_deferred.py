"""Asynchronous steps with the kernels: their sampler's tokens equal torch's, and replays equal eager steps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import Downloads, Uploads, device_of
from engine.runner.device_batch import DeviceBatch
from engine.runner.model_runner import ModelRunner
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.structured.matcher import MaskedRow, packed
from models.attention.triton import TritonAttentionBackend
from models.ops import triton as kernels
from models.ops.counter_rng import request_key
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.delayed_device import DelayedDevice, read
from tests.parity.runners import rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, VOCAB_SIZE, checkpoint, runner_for
from tests.parity.triton_interpreter import DEVICE, INTERPRETED, requires_interpreter, triton_kernels

__all__ = ["checkpoint", "triton_kernels"]

NUM_ROWS = 12


def by_torch_and_ahead(logits: torch.Tensor, rows: SamplingRows) -> tuple[SampledTokens, SampledTokens]:
    """By the sampler in torch, and by the kernels without waiting for them."""
    device = DelayedDevice() if INTERPRETED else device_of(DEVICE)
    downloads = Downloads(device)
    with torch.inference_mode():
        expected = Sampler().sample(logits.clone(), rows)
        reason = kernels.start(DEVICE)
        assert reason is None, reason
        launched = Sampler().launch(logits.clone().to(DEVICE), rows, Uploads(device).send)
        found = read(launched, downloads)
    kernels.stop()
    assert launched.token_ids.tolist() == found.token_ids.tolist()
    return expected, found


def assert_same(expected: SampledTokens, found: SampledTokens) -> None:
    """Tokens, log probabilities, and the rows that have none."""
    assert found.non_finite == expected.non_finite
    assert found.refused == expected.refused
    usable = [row for row in range(len(expected.token_ids)) if row not in (*expected.non_finite, *expected.refused)]
    assert found.token_ids[usable].tolist() == expected.token_ids[usable].tolist()
    assert list(found.logprobs) == list(expected.logprobs)
    for row, one in expected.logprobs.items():
        other = found.logprobs[row]
        assert (other.token_id, other.rank, list(other.top_ids)) == (one.token_id, one.rank, list(one.top_ids))
        assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
        assert list(other.top_logprobs) == pytest.approx(list(one.top_logprobs), abs=1e-5)


def drawn(width: int, rng: np.random.Generator) -> RandomRows:
    """All but the first two rows, with every kind of filter among them."""
    num_drawn = NUM_ROWS - 2
    top_k = np.resize([width, 5, width, 1], num_drawn)
    top_p = np.resize([1.0, 0.9, 0.4], num_drawn)
    min_p = np.resize([0.0, 0.0, 0.0, 0.0, 0.1], num_drawn)
    return RandomRows(
        rows=np.arange(2, NUM_ROWS),
        temperature=rng.uniform(0.3, 1.5, num_drawn).astype(np.float32),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        key=np.array([request_key(seed) for seed in range(num_drawn)], np.uint64),
        position=np.arange(num_drawn) * 7,
        filtered=(top_k < width) | (top_p < 1.0) | (min_p > 0.0),
    )


@pytest.mark.parametrize("most", [3, 40])
@pytest.mark.parametrize("width", [50, 700])
def test_tokens_and_log_probabilities_are_those_of_torch(width: int, most: int) -> None:
    rng = np.random.default_rng(width + most)
    # Ties, as in bfloat16.
    logits = torch.from_numpy(rng.normal(size=(NUM_ROWS, width)).astype(np.float32) * 3).bfloat16().float()
    rows = SamplingRows(
        random=drawn(width, rng),
        repetition=Adjustments(np.array([0, 3]), np.array([4, 9]), np.array([1.5, 0.7], np.float32)),
        frequency=Adjustments(np.array([1, 1, 5]), np.array([2, 2, 8]), np.array([0.5, 0.5, -0.9], np.float32)),
        bias=Adjustments(np.array([6]), np.array([11]), np.array([4.0], np.float32)),
        num_logprobs={0: most, 4: 0, 6: 2, 11: most},
    )
    assert_same(*by_torch_and_ahead(logits, rows))


@pytest.mark.parametrize("most", [2, 40])
def test_rows_that_are_broken_or_leave_no_token_are_reported_and_no_others(most: int) -> None:
    rng, width = np.random.default_rng(2), 130
    logits = torch.from_numpy(rng.normal(size=(NUM_ROWS, width)).astype(np.float32))
    logits[1, 3] = torch.nan
    logits[7] = torch.nan
    logits[8, 129] = torch.inf
    rows = SamplingRows(
        random=drawn(width, rng),
        bias=Adjustments(np.array([5]), np.array([7]), np.array([-np.inf], np.float32)),
        masked=[
            MaskedRow(0, allowed=packed([5, 128], width)),
            MaskedRow(4, allowed=packed([9, 64], width)),
            MaskedRow(5, allowed=packed([7], width)),
        ],
        num_logprobs={0: 2, 1: most, 5: 1, 8: 3, 9: most},
    )
    expected, found = by_torch_and_ahead(logits, rows)
    assert_same(expected, found)
    assert found.non_finite == [1, 7, 8]
    assert list(found.refused) == [5]
    assert list(found.logprobs) == [0, 9]


def sequences() -> list[Sequence]:
    """Three sequences that end in turn; the contexts of two cross a block's end as they grow."""
    rng = np.random.default_rng(3)
    return [
        Sequence(
            rng.integers(0, VOCAB_SIZE, length).tolist(),
            16,
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=max_tokens, logprobs=2, ignore_eos=True),
            id=i,
        )
        for i, (length, max_tokens) in enumerate([(3, 2), (14, 4), (46, 6)])
    ]


def runner_of(checkpoint: Path, *, enforce_eager: bool = False) -> tuple[ModelRunner, GraphDevice, list[torch.Tensor]]:
    """A runner with graphs of two and of four rows to capture, unless eager, and the logits of each of its steps."""
    how = {"cudagraph_capture_sizes": (2, 4), "enforce_eager": enforce_eager}
    runner = runner_for(checkpoint, compilation_config=how)
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    steps: list[torch.Tensor] = []
    compute = runner.model.compute_logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        steps.append(logits.clone())
        return logits

    runner.model.compute_logits = noted  # type: ignore[method-assign]
    return runner, device, steps


@requires_interpreter
@pytest.mark.usefixtures("triton_kernels")
def test_a_replayed_padded_decode_is_the_eager_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    runner, _, eager = runner_of(checkpoint, enforce_eager=True)
    expected = answers(waiting(runner, sequences()))
    replaying, device, replayed = runner_of(checkpoint)
    while replaying.prepare_while_idle():
        pass
    device.num_replayed = 0  # The passes that tested the graphs do not count.
    assert replaying.graphs is not None
    assert replaying.graphs.captured_sizes == [2, 4]
    assert answers(waiting(replaying, sequences())) == expected
    # A step of prompts; decodes of three rows, of two and of one.
    assert device.num_replayed == 5
    assert [len(logits) for logits in replayed] == [3] * 2 + [2] * 2 + [1] * 2
    for one, other in zip(replayed, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    ahead = Ahead(replaying)
    ahead.device = device
    replaying.device_batch = DeviceBatch(device, replaying.config.max_num_seqs)
    assert answers(ahead.run(sequences())) == expected
    assert device.num_replayed == 10
