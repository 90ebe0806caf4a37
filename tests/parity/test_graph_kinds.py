"""Graphs of steps other than plain decodes on one rank: recurrent states, adapters, several ranks, rows of drafts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.distributed.rank_steps import decode_step, encode_step
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import Graph, HostDevice
from engine.runner.device_batch import AttentionTarget, DeviceBatch, DeviceInputs
from engine.runner.graphs import GraphRunner, GraphShape
from engine.runner.input_batch import InputBatch, StepInputs
from engine.runner.kv_cache import LayerCaches
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.attention.backend import AttentionBackend
from models.attention.context import Context, forward_context
from models.lora import adapters as captured
from models.ops.types import StateCache
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.adapters import make_adapter, read_weights
from tests.parity.ahead import answers, waiting
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.delayed_device import DelayedDevice
from tests.parity.paged_model import prompt
from tests.parity.paged_torch import CapturedTorchBackend
from tests.parity.runners import load, rebuilt
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, runner_for
from tests.parity.tolerance import assert_within, with_bound
from tests.parity.variants.qwen3_next import VARIANTS as QWEN3_NEXT

__all__ = ["checkpoint"]


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)


def captured_all(runner: ModelRunner) -> tuple[ModelRunner, GraphDevice]:
    """The runner on a device with graphs, of which it captures all sizes; it must have graphs."""
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS)
    assert runner.graphs is not None
    while runner.graphs.capture_next():
        pass
    assert runner.graphs.captured_sizes == [2, 4]
    device.num_replayed = 0  # Passes that tested the graphs do not count.
    return runner, device


def sequences(adapters: tuple[int, ...] = (0, 0, 0), max_tokens: tuple[int, ...] = (5, 9, 13)) -> list[Sequence]:
    """Greedy sequences of various lengths, which end in turn."""
    made = []
    for i, (adapter, count) in enumerate(zip(adapters, max_tokens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
        made.append(Sequence(prompt(5 + 9 * i, seed=i, vocab_size=160), 16, params, id=i, adapter=adapter))
    return made


SIZES = {"cudagraph_capture_sizes": (2, 4)}


def test_rows_with_recurrent_states_leave_the_states_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, QWEN3_NEXT[0].family, **QWEN3_NEXT[0].overrides)
    fields: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 5}
    expected = answers(waiting(runner_for(path, **fields), sequences()))
    runner = runner_for(path, compilation_config=SIZES, **fields)
    caches: list[StateCache] = []
    allocate = LayerCaches.allocate

    def kept(*args: Any) -> Any:
        made = allocate(*args)
        caches.extend(cache for cache in made.values() if isinstance(cache, StateCache))
        return made

    monkeypatch.setattr(LayerCaches, "allocate", kept)
    runner, device = captured_all(runner)
    states = [tensor for cache in caches for tensor in cache.tensors]
    assert {len(state) for state in states} == {6}, "a slot to spare"
    assert not any(state[:5].any() for state in states), "the pass before a capture writes to nobody's state"
    assert any(state[5].any() for state in states)
    assert answers(waiting(runner, sequences())) == expected
    assert device.num_replayed == 12
    # Slots are assigned in ascending order: three rows never use the last two sequences' slots.
    assert not any(state[3:5].any() for state in states)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """A checkpoint, and flags of two adapters for it, with other ranks and other layers."""
    directory = tmp_path_factory.mktemp("adapted")
    path = make_checkpoint(directory / "base", vocab_size=160)
    base = read_weights(path)
    make_adapter(directory / "wide", base, rank=8, alpha=9, leaves={"q_proj", "v_proj", "down_proj", "o_proj"}, seed=1)
    make_adapter(directory / "narrow", base, rank=2, alpha=9, leaves={"q_proj", "k_proj"}, use_rslora=True, seed=2)
    return path, (f"wide={directory / 'wide'}", f"narrow={directory / 'narrow'}")


@pytest.mark.parametrize("adapters", [(1, 0, 2), (2, 2, 1), (0, 0, 0)])
def test_each_row_has_its_own_adapter(adapted: tuple[Path, tuple[str, str]], adapters: tuple[int, ...]) -> None:
    path, flags = adapted
    expected = answers(waiting(runner_for(path, lora=flags), sequences(adapters)))
    plain = answers(waiting(runner_for(path), sequences()))
    assert (expected == plain) == (not any(adapters)), "the adapters change nothing here"
    runner = runner_for(path, lora=flags, compilation_config=SIZES)
    runner, device = captured_all(runner)
    assert answers(waiting(runner, sequences(adapters))) == expected
    assert device.num_replayed == 12


def test_adapters_of_many_ranks_leave_decodes_eager_and_say_so(
    adapted: tuple[Path, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured, "MAX_RANKS", 19)
    caplog.set_level("INFO")
    runner = runner_for(adapted[0], lora=adapted[1], compilation_config=SIZES)
    runner = rebuilt(runner, GraphDevice(), NUM_BLOCKS)
    assert runner.graphs is None
    assert "Decodes run eagerly: the adapters have 20 ranks together, and a graph takes 19" in caplog.messages


class Twins:
    """Collectives of two ranks that compute the same; the other may fail to capture."""

    def __init__(self, *, are_captured: bool = True, other_fails: bool = False) -> None:
        self.are_captured, self._other_fails = are_captured, other_fails
        self.num_sums = 0
        self.is_capturing = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return x if x.numel() == 1 and self._other_fails else x + x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), -1)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: object) -> None:
        pass

    def broadcast(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.is_capturing = True
        yield
        self.is_capturing = False


def shard(path: Path, collectives: Twins, rank: int = 0) -> ModelRunner:
    base = runner_for(path, compilation_config=SIZES)
    parallel = TensorParallel(rank, 2, collectives)
    return ModelRunner(load(path, base.config, parallel=parallel), NUM_BLOCKS)


def test_a_rank_replays_its_part_of_what_ranks_exchange(checkpoint: Path) -> None:
    collectives = Twins()
    runner = shard(checkpoint, collectives)
    expected = answers(waiting(runner, sequences()))
    sums = collectives.num_sums
    runner, device = captured_all(runner)
    # For each size one pass runs together with the other rank, with two sums per layer and the embedding's, and four
    # more each followed by a replay. Five times all agree: that none fails, that none lacks memory, that all have
    # captured, that no sum of the graph is unknown, that replays are right.
    assert collectives.num_sums - sums == 2 * (5 + 4 * 2 * 5 + 5)
    assert answers(waiting(runner, sequences())) == expected
    assert device.num_replayed == 12


@pytest.mark.parametrize("other_fails", [False, True])
def test_ranks_capture_by_counted_steps_and_give_up_together(
    checkpoint: Path, other_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 2)
    ranks = [shard(checkpoint, Twins(other_fails=other_fails), rank) for rank in range(2)]
    graphs = []
    ranks = [rebuilt(runner, GraphDevice(), NUM_BLOCKS) for runner in ranks]
    for runner in ranks:
        assert runner.graphs is not None
        graphs.append(runner.graphs)
        runner.prepare_while_idle()
        assert runner.graphs.captured_sizes == [], "an idle rank captures nothing by itself"
    scheduler = Scheduler(ranks[0].config)
    scheduler.extend(sequences())
    number, sampled = 0, list[tuple[int, list[int]]]()
    seen = []
    while (scheduled := scheduler.schedule()) is not None:
        batch, in_step = scheduled
        output = ranks[0].forward(batch)
        number += 1
        ranks[1].follow(decode_step(encode_step(batch, number, sampled, is_greedy=False)))
        sampled = [(number, [token for tokens in output.token_ids.values() for token in tokens])]
        scheduler.postprocess(list(in_step.values()), output)
        assert graphs[0].captured_sizes == graphs[1].captured_sizes
        seen.append(graphs[0].captured_sizes)
    assert seen[-1] == ([] if other_fails else [2, 4])
    assert not any(each.capture_next() for each in graphs)


def test_ranks_know_when_a_graph_is_captured_and_run_nothing_meanwhile(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Twins()
    runner = shard(checkpoint, collectives)
    seen = []
    forward, capture = runner.model.forward, GraphDevice.capture  # type: ignore[attr-defined]

    def noted_forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append(("pass", collectives.is_capturing))
        return forward(input_ids, positions)

    def noted_capture(self: GraphDevice, run: Callable[[], None]) -> Graph:
        seen.append(("capture", collectives.is_capturing))
        return capture(self, run)

    runner.model.forward = noted_forward  # type: ignore[attr-defined]
    monkeypatch.setattr(GraphDevice, "capture", noted_capture)
    captured_all(runner)
    tried = [("pass", False)] * 2 * 4
    assert seen == [("pass", False), ("pass", False), ("capture", True), *tried] * 2


def test_what_ranks_exchange_through_the_host_is_in_no_graph(checkpoint: Path) -> None:
    runner = shard(checkpoint, Twins(are_captured=False))
    runner = rebuilt(runner, GraphDevice(), NUM_BLOCKS)
    assert runner.graphs is None


@pytest.mark.parametrize("backend", [CapturingBackend, CapturedTorchBackend])
def test_rows_of_a_token_and_its_drafts_are_replayed(
    checkpoint: Path, backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of three tokens after contexts of various lengths, in a graph of four, then two rows in the same."""
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: backend())
    runner = runner_for(checkpoint)
    device = GraphDevice()
    runner = rebuilt(runner, device, NUM_BLOCKS + 1)
    # Slots 0 to 2, and their blocks, stay written.
    waiting(runner, sequences(max_tokens=(1, 1, 1)))
    shape = GraphShape(block_size=16, max_blocks=16, padding_block=NUM_BLOCKS, padding_slot=64, query_len=3)
    graphs = GraphRunner(device, runner.backend, runner.model, (4,), shape)
    assert not graphs.capture_next()
    device.num_replayed = 0  # The pass that tested the graph does not count.
    for rows in ([0, 1, 2], [2, 1]):
        inputs = drafts(runner, np.array(rows), length=3)
        eager = assembled(runner, replace(inputs, num_decodes=0, query_len=1), 0)
        with forward_context(eager.metadata, Context(eager.positions, True, len(rows))):
            compute = partial(runner.model, eager.input_ids, eager.positions)
            expected, bound = with_bound(runner.model, compute)
        assert graphs.size_for(inputs) == 4
        assert graphs.size_for(replace(inputs, num_decodes=0)) == 0
        assert graphs.size_for(replace(inputs, query_len=1)) == 0
        found = graphs.run(assembled(runner, graphs.pad(inputs, 4), 4), len(inputs.input_ids))
        assert_within(found, expected, bound)
    assert device.num_replayed == 2


@pytest.mark.parametrize("kind", [HostDevice, DelayedDevice])
def test_an_unread_token_precedes_the_drafts_of_its_row(kind: type[HostDevice]) -> None:
    """Rows of three tokens, of which the first is on the device in two rows, and known in one."""
    device = kind()
    batch = InputBatch(max_num_seqs=4, max_model_len=64, block_size=16, vocab_size=160, seed=0)
    seqs = sequences()
    for slot, seq in enumerate(seqs):
        seq.slot, seq.block_table = slot, [2 * slot, 2 * slot + 1]
        batch._write(seq)
    batch._num_unread[[0, 2]] += 1
    lengths = [len(seqs[0]) + 1, len(seqs[1]), len(seqs[2]) + 1]
    inputs = batch.step_inputs(
        ScheduledBatch(
            {seq.id: seq for seq in seqs},
            [3, 3, 3],
            9,
            total_seqs_num=3,
            total_seqs_num_decode=3,
            context_lens=[length + 2 for length in lengths],
            scheduled_spec_decode_tokens={seq.id: [100 + slot, 110 + slot] for slot, seq in enumerate(seqs)},
        )
    )
    assert inputs.query_len == inputs.num_decodes == 3
    on_device = DeviceBatch(device, 4)
    on_device.last_tokens[:] = torch.tensor([70, 71, 72, 73, 0])
    place = AttentionTarget(CapturedTorchBackend(), None, graphs_take_adapters=False)
    shape = GraphShape(block_size=16, max_blocks=4, padding_block=9, padding_slot=4, query_len=3)
    padded = GraphRunner(device, CapturingBackend(), torch.add, (4,), shape).pad(inputs, 4)
    known = seqs[1].token_ids[-1]
    for step, size, more in ((inputs, 0, []), (padded, 4, [0, 0, 0])):
        ids = on_device.assemble(step, batch.table_changes, place, size).input_ids
        assert ids.tolist() == [70, 100, 110, known, 101, 111, 72, 102, 112, *more]


def drafts(runner: ModelRunner, slots: np.ndarray[Any, np.dtype[np.int64]], length: int) -> StepInputs:
    """A step as a proposer of drafts would have it: the last tokens of each row, and as many contexts."""
    batch = runner.input_batch
    seq_lens = np.array([5 + 9 * slot for slot in slots.tolist()])
    positions = (seq_lens[:, None] - length + np.arange(length)).ravel()
    token_slots = np.repeat(slots, length)
    tables = batch._block_table
    none = np.zeros(0, dtype=np.int64)
    return StepInputs(
        input_ids=np.arange(len(positions)) + 3,
        positions=positions,
        slot_mapping=tables[token_slots, positions // 16] * np.int64(16) + positions % 16,
        query_lens=np.full(len(slots), length),
        seq_lens=seq_lens,
        block_tables=None if runner.tables is not None else tables[slots, :2],
        num_blocks=2,
        num_decodes=len(slots),
        slots=slots,
        sampled_rows=none,
        sampled_slots=none,
        last_tokens=none,
        pending_rows=none,
        pending_tokens=none,
        sampling=batch._sampling.rows(none, none, batch._tokens),
        adapters=None,
        query_len=length,
    )


def assembled(runner: ModelRunner, inputs: StepInputs, size: int) -> DeviceInputs:
    place = AttentionTarget(runner.backend, runner.tables, graphs_take_adapters=False)
    return runner.device_batch.assemble(inputs, runner.input_batch.table_changes, place, size)
