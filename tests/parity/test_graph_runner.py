"""Decodes replayed from graphs: which steps, sizes and memory; the tokens are those of eager steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import Graph
from engine.runner.device_batch import DeviceBatch
from engine.runner.model_runner import ModelRunner
from engine.runner.step_graphs import capture_sizes
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.attention.backend import AttentionMetaData
from models.attention.context import get_forward_context
from models.ops.triton.grids import PIECE
from models.parallel.tensor_parallel import ExpertParallel, TensorParallel
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.delayed_device import DelayedDevice
from tests.parity.rank_threads import RankThreads
from tests.parity.runners import rebuilt
from tests.parity.test_deferred_output import sequences
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, prompts, runner_for

__all__ = ["checkpoint", "prompts"]

SIZES = (1, 2, 4, 8)
FIELDS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 64, "num_kvcache_blocks": NUM_BLOCKS}


class GraphDevice(DelayedDevice):
    """A late device whose graphs are counted."""

    has_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.num_captured = self.num_replayed = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        self.num_captured += 1
        graph, device = super().capture(run), self

        class Counted:
            def replay(self) -> None:
                device.num_replayed += 1
                graph.replay()

        return Counted()


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1)


def graphed(
    checkpoint: Path, sizes: tuple[int, ...] = SIZES, capture: str = "behind", **fields: Any
) -> tuple[ModelRunner, GraphDevice]:
    """A runner on a device with graphs, which has captured none yet."""
    how = {"cudagraph_capture_sizes": sizes, "capture": capture}
    runner = runner_for(checkpoint, compilation_config=how, **fields)
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    return runner, device


def test_graphs_are_captured_behind_traffic_and_give_the_tokens_of_eager_steps(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:12])))
    runner, device = graphed(checkpoint)
    assert runner.graphs is not None
    assert answers(waiting(runner, sequences(prompts[:12]))) == expected
    assert runner.graphs.captured_sizes == list(SIZES)
    assert device.num_replayed > 0
    before = device.num_replayed
    ahead = Ahead(runner)
    ahead.device = device
    runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
    assert answers(ahead.run(sequences(prompts[:12]))) == expected
    assert device.num_replayed > before
    assert device.num_captured == len(SIZES)


@pytest.mark.parametrize(("capture", "order"), [("start", [8, 4, 2, 1]), ("behind", [1, 2, 4, 8])])
def test_sizes_are_captured_largest_first_at_the_start_and_smallest_first_behind_it(
    checkpoint: Path, capture: str, order: list[int]
) -> None:
    runner, _ = graphed(checkpoint, capture=capture)
    assert runner.graphs is not None
    captured: list[int] = []
    for _ in SIZES:
        runner.prepare_while_idle()
        captured += set(runner.graphs.captured_sizes) - set(captured)
    assert captured == order


def test_the_first_decode_after_the_start_replays_a_graph_on_every_rank(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    devices = [GraphDevice(), GraphDevice()]
    ranks = RankThreads(checkpoint, devices=devices, capture="start", sizes=SIZES, **FIELDS)
    replayed = []

    def lead(runner: ModelRunner) -> None:
        assert runner.graphs is not None
        assert [device.num_captured for device in devices] == [len(SIZES)] * 2
        before = devices[0].num_replayed
        params = SamplingParams(temperature=0.0, max_tokens=4)
        waiting(runner, [Sequence(prompt, 16, params, id=index) for index, prompt in enumerate(prompts[:3])])
        replayed.append(devices[0].num_replayed - before)

    ranks.run(lead)
    # The prompts' step, and three decodes; on rank 1 the passes that tested its graphs are the same.
    assert replayed == [3]
    assert devices[0].num_replayed == devices[1].num_replayed
    assert [device.num_captured for device in devices] == [len(SIZES)] * 2


def test_without_captures_at_the_start_none_is_made_before_the_first_step(checkpoint: Path) -> None:
    devices = [GraphDevice(), GraphDevice()]
    ranks = RankThreads(checkpoint, devices=devices, capture="behind", sizes=SIZES, **FIELDS)
    ranks.run(lambda runner: None)
    assert [device.num_captured for device in devices] == [0, 0]


def test_a_replay_reads_fixed_memory_and_padding_rows_write_to_an_unused_block(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    runner, device = graphed(checkpoint, (4,))
    seen = set()
    forward = runner.model.forward  # type: ignore[attr-defined]

    def noted(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        if context.context.graph_bs:
            seen.add((input_ids.data_ptr(), positions.data_ptr(), len(input_ids), id(context.attn_metadata)))
        return forward(input_ids, positions)

    runner.model.forward = noted  # type: ignore[attr-defined]
    assert runner.graphs is not None
    assert not runner.graphs.capture_next()
    device.num_replayed = 0  # The pass that tested the graph does not count.
    spare = [pool[NUM_BLOCKS] for pool in runner.caches.pools]
    others = [pool[:NUM_BLOCKS].clone() for pool in runner.caches.pools]
    assert any(part.any() for part in spare), "the pass that comes before a capture writes somewhere"
    assert all(torch.equal(pool[:NUM_BLOCKS], old) for pool, old in zip(runner.caches.pools, others, strict=True))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    seqs = sequences(prompts[:3])
    for seq in seqs:
        seq.sampling_params, seq.temperature, seq.max_tokens = params, 0.0, 5
        seq.prompt_logprobs = None
    waiting(runner, seqs)
    assert device.num_replayed == 4
    assert len(seen) == 1
    touched = {index for pool in runner.caches.pools for index in pool.flatten(1).any(1).nonzero()[:, 0].tolist()}
    # Blocks are given out in ascending order.
    assert touched <= {*range(40), NUM_BLOCKS}


@pytest.mark.parametrize(
    "fields", [{"max_num_seqs": 64}, {"scheduling_policy": "mixed", "max_num_batched_tokens": 40}]
)
def test_steps_larger_than_every_graph_and_prompts_run_eagerly(
    checkpoint: Path, prompts: list[list[int]], fields: dict[str, Any]
) -> None:
    expected = answers(waiting(runner_for(checkpoint, **fields), sequences(prompts)))
    runner, _ = graphed(checkpoint, (2,), **fields)
    assert answers(waiting(runner, sequences(prompts))) == expected


def test_a_capture_that_fails_leaves_steps_eager(
    checkpoint: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: GraphDevice, run: Callable[[], None]) -> Graph:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(GraphDevice, "capture", fail)
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:5])))
    runner, _ = graphed(checkpoint)
    assert answers(waiting(runner, sequences(prompts[:5]))) == expected
    assert runner.graphs is not None
    assert runner.graphs.captured_sizes == []
    assert [record.message for record in caplog.records if "capturing a graph failed" in record.message]


def test_a_backend_without_graphs_is_asked_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none(self: CapturingBackend, batch_size: int, query_len: int) -> AttentionMetaData | None:
        asked.append(batch_size)
        return None

    monkeypatch.setattr(CapturingBackend, "prepare_for_capture", none)
    runner, _ = graphed(checkpoint)
    assert runner.graphs is not None
    assert not runner.graphs.capture_next()
    assert not runner.graphs.capture_next()
    assert asked == [1]


def test_enforce_eager_and_models_that_cannot_be_replayed_have_no_graphs(checkpoint: Path) -> None:
    runner, _ = graphed(checkpoint)
    assert runner.graphs is not None
    eager = runner.config.compilation_config.model_copy(update={"enforce_eager": True})
    config = runner.config.model_copy(update={"compilation_config": eager})
    assert rebuilt(runner, config=config).graphs is None


def test_replicas_that_exchange_tokens_have_a_spare_block_and_no_graphs(checkpoint: Path) -> None:
    runner, _ = graphed(checkpoint)

    class Others:
        """Not used here."""

    experts = ExpertParallel(0, 2, Others())  # type: ignore[arg-type]
    runner = rebuilt(runner, parallel=TensorParallel(experts=experts))
    assert runner.graphs is None
    assert runner.padding_block == NUM_BLOCKS


def test_sizes_by_default_are_small_ones_and_every_sixteenth() -> None:
    assert capture_sizes((), 40) == [1, 2, 4, 8, 16, 32, 40]
    assert capture_sizes((), 3) == [1, 2, 3]
    assert capture_sizes((), 4096)[-2:] == [496, 512]
    assert capture_sizes((64, 5, 5), 48) == [5, 48]


class StaleDevice(GraphDevice):
    """A device whose replays repeat the results of the first one, as if they had not read their inputs."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        graph, kept = super().capture(run), []
        runner = self.runner

        class Stale:
            def replay(self) -> None:
                graph.replay()
                assert runner.graphs is not None
                hidden = runner.graphs._plain._hidden
                assert hidden is not None
                kept.append(hidden.clone())
                hidden.copy_(kept[0])

        return Stale()

    runner: ModelRunner


@pytest.mark.parametrize(("max_model_len", "captured"), [(512, []), (200, [4])])
def test_graphs_that_are_wrong_for_rows_of_several_pieces_are_dropped(
    max_model_len: int, captured: list[int], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode attention merges the pieces of a row; a model of short contexts has no such rows, so that none is
    tested."""
    lengths: list[int] = []
    replay = CapturingBackend.prepare_for_replay

    def prepare_for_replay(self: CapturingBackend, metadata: AttentionMetaData, batch_size: int) -> None:
        lengths.append(int(metadata.seq_lens.max()))
        replay(self, metadata, batch_size)

    class WrongBeyondAPiece(GraphDevice):
        def capture(self, run: Callable[[], None]) -> Graph:
            graph, runner = super().capture(run), self.runner

            class Wrong:
                def replay(self) -> None:
                    graph.replay()
                    if lengths[-1] > PIECE:
                        assert runner.graphs is not None
                        hidden = runner.graphs._plain._hidden
                        assert hidden is not None
                        hidden.zero_()

            return Wrong()

        runner: ModelRunner

    monkeypatch.setattr(CapturingBackend, "prepare_for_replay", prepare_for_replay)
    sizes = {"cudagraph_capture_sizes": (4,)}
    runner = runner_for(checkpoint, compilation_config=sizes, max_model_len=max_model_len)
    device = WrongBeyondAPiece()
    device.runner = runner = rebuilt(runner, device, NUM_BLOCKS)
    assert runner.graphs is not None
    runner.graphs.capture_next()
    assert runner.graphs.captured_sizes == captured
    assert max(lengths) == (PIECE + 30 if max_model_len > PIECE + 30 else 193), "the last block may be cut short"


def test_graphs_whose_replays_are_not_the_pass_are_dropped(
    checkpoint: Path, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(waiting(runner_for(checkpoint), sequences(prompts[:6])))
    runner = runner_for(checkpoint, compilation_config={"cudagraph_capture_sizes": (2, 4)})
    device = StaleDevice()
    device.runner = runner = rebuilt(runner, device, NUM_BLOCKS)
    assert runner.graphs is not None
    assert not runner.graphs.capture_next()
    assert runner.graphs.captured_sizes == []
    assert any("does not reproduce the pass" in message for message in caplog.messages)
    assert answers(waiting(runner, sequences(prompts[:6]))) == expected
