"""Steps on a GPU: graphs and asynchronous steps give the results of eager steps; running out of memory fails no
request."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.config import Config
from engine.runner import graphs as graph_runner
from engine.runner.build import load_rank
from engine.runner.model_runner import ModelRunner
from engine.runner.start import measure_kv_cache
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.gpu.places import ANYWHERE_LONG, ON_GPU, Place
from tests.parity.ahead import Ahead, answers, by_core, waiting
from tests.parity.checkpoints import make_checkpoint

LENGTHS = [(3, 4), (30, 6), (60, 9)]
SHORT = [(3, 2), (17, 3)]
"""For the interpreter."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, vocab_size=259)


def sequences(lengths: list[tuple[int, int]] = LENGTHS) -> list[Sequence]:
    """Greedy and sampled requests, with log probabilities and a penalty."""
    rng = np.random.default_rng(3)
    params = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9},
        {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.2},
    ]
    return [
        Sequence(
            rng.integers(0, 259, length).tolist(),
            16,
            SamplingParams(max_tokens=most, ignore_eos=True, **params[place % len(params)]),  # type: ignore[arg-type]
            id=place,
        )
        for place, (length, most) in enumerate(lengths)
    ]


@ANYWHERE_LONG
def test_graphs_and_steps_ahead_give_the_tokens_of_eager_steps(
    place: Place, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    lengths, sizes = (LENGTHS, (2, 4)) if place.is_gpu else (SHORT, (2,))
    eager = place.runner(checkpoint)
    expected = answers(waiting(eager, sequences(lengths)))
    del eager
    runner = place.runner(checkpoint, cudagraph_capture_sizes=sizes)
    while runner.prepare_while_idle():
        pass
    assert runner.graphs is not None
    assert runner.graphs.captured_sizes == list(sizes)
    assert answers(waiting(runner, sequences(lengths))) == expected
    device_batch = runner.device_batch
    ahead = Ahead(runner)
    # The fixture has set an emulated late CPU.
    runner.device_batch = device_batch
    assert answers(ahead.run(sequences(lengths))) == expected


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Leaves this process `num_bytes` of the GPU in addition to the memory that it uses."""

    def leave(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def large_checkpoint(tmp_path: Path) -> Path:
    """Of 100 MB."""
    return make_checkpoint(
        tmp_path, "qwen3", hidden_size=1024, intermediate_size=4096, num_attention_heads=16, head_dim=64
    )


@ON_GPU
def test_a_model_that_does_not_fit_is_refused_in_a_sentence(
    place: Place, tmp_path: Path, little_memory: Callable[[int], None]
) -> None:
    path = large_checkpoint(tmp_path)
    place.backend()
    little_memory(32 << 20)
    with pytest.raises(ValueError, match=r"does not fit the (GPU|memory of device)"):
        load_rank(Config(model=str(path), device="cuda"), path)


@ON_GPU
def test_a_cache_that_does_not_fit_says_how_much_is_missing(place: Place, checkpoint: Path) -> None:
    built = load_rank(Config(model=str(checkpoint), device="cuda", gpu_memory_utilization=0.001), checkpoint)
    with pytest.raises(ValueError, match=r"are missing: free memory or raise gpu_memory_utilization"):
        measure_kv_cache(built.loaded)


@ON_GPU
@pytest.mark.parametrize("mode", ["off", "on"])
def test_all_requests_are_answered_when_memory_runs_out_while_serving(
    place: Place, tmp_path: Path, mode: str, little_memory: Callable[[int], None]
) -> None:
    path = large_checkpoint(tmp_path)
    lengths = [(200, 5)] * 12
    fields = {"async_scheduling": mode, "num_kvcache_blocks": 400, "max_num_batched_tokens": 2400}
    runner = place.runner(path, **fields)
    expected = told_by(runner, sequences(lengths))
    # Memory for a part of the prompts: all of them need about 100 MB in the feed-forward layers.
    little_memory(24 << 20)
    assert told_by(runner, sequences(lengths)) == expected


def told_by(runner: ModelRunner, seqs: list[Sequence]) -> dict[int, list[int]]:
    """Tokens by request, through the engine core."""
    tokens: dict[int, list[int]] = {}
    for output in by_core(runner, seqs):
        assert output.error is None, output.error
        tokens.setdefault(output.request_id, []).extend(output.output_tokens)
    return tokens
