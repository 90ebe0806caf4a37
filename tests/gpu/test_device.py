"""The interface to a real device: copies arrive, graphs replay, and sampling never makes the host wait."""

import numpy as np
import pytest
import torch

from engine.runner.device import Downloads, Uploads
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.sampler import Sampler
from engine.text.structured.matcher import MaskedRow, packed
from tests.gpu.places import ANYWHERE, ON_GPU, Place
from tests.parity.delayed_device import read

VOCAB_SIZE = 3000


@ANYWHERE
def test_what_is_copied_arrives_behind_the_work_before_it(place: Place) -> None:
    device = place.device_api()
    uploads, downloads = Uploads(device), Downloads(device)
    size = 2000 if place.is_gpu else 20
    for step in range(20):
        left, right = uploads.send([np.arange(5000) + step, np.full(3, step, dtype=np.float32)])
        slow = torch.randn(size, size, device=place.device)
        for _ in range(5):
            slow = slow @ slow
        download = downloads.begin(left * 2 + right[0].long())
        assert download.wait().tolist() == [2 * (value + step) + step for value in range(5000)]
        downloads.give_back(download)


@ANYWHERE
def test_a_graph_replays_over_the_memory_it_was_captured_with(place: Place) -> None:
    device = place.device_api()
    source, target = (torch.zeros(8, device=place.device) for _ in range(2))

    def run() -> None:
        target.copy_(source * 2 + 1)

    run()
    graphs = [device.capture(run) for _ in range(3)]
    for value, graph in enumerate(graphs):
        source.fill_(value)
        graph.replay()
        device.record().synchronize()
        assert target.tolist() == [2 * value + 1] * 8


@ON_GPU
def test_what_cannot_be_captured_leaves_all_else_as_it_was(place: Place) -> None:
    device = place.device_api()
    source, target = torch.ones(8, device=place.device), torch.zeros(8, device=place.device)
    # The host waits for a number, which ends the capture.
    with pytest.raises(RuntimeError):
        device.capture(lambda: target.copy_(source * float(source.sum().item())) and None)
    torch.cuda.empty_cache()
    graph = device.capture(lambda: target.copy_(source * 3) and None)
    graph.replay()
    device.record().synchronize()
    assert target.tolist() == [3.0] * 8


def rows_of(num_rows: int) -> SamplingRows:
    """Every kind of row."""
    rng = np.random.default_rng(1)
    top_k = rng.choice([5, 40, VOCAB_SIZE], size=num_rows)
    top_p = rng.choice([0.5, 1.0], size=num_rows)
    min_p = rng.choice([0.0, 0.05], size=num_rows)
    changes = Adjustments(np.arange(8), np.arange(8) * 7, np.full(8, 1.5, dtype=np.float32))
    return SamplingRows(
        random=RandomRows(
            np.arange(4, num_rows),
            np.full(num_rows - 4, 0.8, dtype=np.float32),
            top_k[4:],
            top_p[4:],
            min_p[4:],
            rng.integers(0, 2**63, num_rows - 4).astype(np.uint64),
            np.arange(num_rows - 4),
            ((top_k < VOCAB_SIZE) | (top_p < 1.0) | (min_p > 0.0))[4:],
        ),
        repetition=changes,
        presence=changes,
        frequency=changes,
        bias=changes,
        masked=[MaskedRow(row, allowed=packed([3, 5, 900], VOCAB_SIZE)) for row in (2, 9)],
        num_logprobs={1: 3, 6: 0},
    )


@ANYWHERE
@pytest.mark.parametrize("by_kernels", [False, True])
def test_choosing_tokens_waits_for_nothing_and_chooses_what_the_cpu_does(place: Place, by_kernels: bool) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(32, VOCAB_SIZE)).astype(np.float32) * 3)
    rows = rows_of(32)
    expected = Sampler().sample(logits.clone(), rows)
    if by_kernels:
        if not place.is_gpu:
            pytest.skip("tests/parity/test_triton_deferred.py compares them in the interpreter")
        place.backend()
    device = place.device_api()
    uploads, downloads = Uploads(device), Downloads(device)
    sampler = Sampler()
    sampler.launch(logits.clone().to(place.device), rows, uploads.send).read()
    on_device = logits.clone().to(place.device)
    mode = torch.cuda.set_sync_debug_mode if place.is_gpu else lambda _: None
    mode("error")
    try:
        launched = sampler.launch(on_device, rows, uploads.send)
    finally:
        mode("default")
    found = read(launched, downloads)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, reported in found.logprobs.items():
        assert reported.logprob == pytest.approx(expected.logprobs[row].logprob, abs=1e-4)
