"""Asynchronous drafts of a model: answers equal those of synchronous steps without drafts."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.config import Config
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import Event
from engine.runner.device_batch import DeviceBatch, DeviceInputs
from engine.runner.input_batch import StepInputs
from engine.runner.kv_cache import LayerCaches
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.speculative.adaptive import DraftGate, DraftPlan, StepCosts
from models.attention.triton import TritonAttentionBackend
from models.ops.triton.grids import most_pieces_within, num_pieces
from tests.parity.ahead import Ahead, answers, waiting
from tests.parity.delayed_device import DelayedDevice
from tests.parity.paged_model import prompt, tensors_of
from tests.parity.paged_torch import CapturedTorchBackend
from tests.parity.rank_threads import RankThreads
from tests.parity.recorded_graph import RecordingDevice
from tests.parity.runners import load
from tests.parity.test_draft_graphs import CASES, Case, captured, config_of
from tests.parity.test_drafter_pairs import FAULTS, Knowing
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_model_drafters import K, by_model, by_rejection, endless
from tests.parity.test_speculative_decoding import sequences
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, runner_for
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.sweeps import some

__all__ = ["checkpoint", "triton_kernels"]


@pytest.fixture(autouse=True)
def tables_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables are on the device, and the plan, which knows no costs, always gives drafts."""
    for name in ("note_step", "note_prompts", "note_drafting", "note_drafting_step"):
        monkeypatch.setattr(StepCosts, name, lambda *_, **__: None)
    monkeypatch.setattr(DraftGate, "note", lambda *_, **__: None)
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturedTorchBackend())


class Noted(Ahead):
    """Records the steps whose positions only the device knows."""

    def __init__(self, runner: ModelRunner, device: DelayedDevice | None = None) -> None:
        super().__init__(runner)
        if device is not None:
            self.device = device
            runner.device_batch = DeviceBatch(device, runner.config.max_num_seqs)
        self.unknown: list[int] = []
        """Number of tokens of a row of each such step."""
        self.num_padded = 0
        """Rows of these steps that had fewer tokens than the longest."""
        self.waits: list[tuple[int, int]] = []
        """By step: how often the host had waited for the device, and the number of replayed graphs, before it."""
        self.num_waits = 0
        record = self.device.record

        def counted() -> Event:
            event = record()
            synchronize = event.synchronize

            def wait() -> None:
                self.num_waits += 1
                synchronize()

            event.synchronize = wait  # type: ignore[method-assign]
            return event

        self.device.record = counted  # type: ignore[method-assign]
        run_model = runner.run_model

        def noted(inputs: StepInputs, on_device: DeviceInputs, *arguments: Any) -> Any:
            if inputs.bounds is not None:
                assert len(self.pipeline._flights) == 1, "the step before is not read"
                self.unknown.append(inputs.query_len)
                self.num_padded += int((inputs.bounds.counts < inputs.query_len).sum())
                self.waits.append((self.num_waits, getattr(self.device, "num_replayed", 0)))
            return run_model(inputs, on_device, *arguments)

        runner.run_model = noted  # type: ignore[method-assign]

    @property
    def acceptance(self) -> float:
        return self.scheduler.total_accepted_tokens / max(1, self.scheduler.total_draft_tokens)


@pytest.mark.parametrize(
    "name", some([each for each in CASES if each != "MTP, latents"], "the model itself", "MTP, recurrent states")
)
def test_drafts_one_step_ahead_change_no_answer(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    expected = answers(waiting(runner_for(case.target), endless()))
    ahead = Noted(ModelRunner(load(case.target, config_of(case)), NUM_BLOCKS))
    assert answers(ahead.run(endless())) == expected
    assert len(ahead.unknown) > 3
    if name == "the model itself":
        assert ahead.acceptance == 1.0
        assert max(ahead.unknown) == 1 + K


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"eos_token_id": 17, "stop_token_ids": (60, 5)}, marks=pytest.mark.slow),
        {"scheduling_policy": "mixed", "max_num_batched_tokens": 20, "max_num_seqs": 3},
        {"max_num_batched_tokens": 24, "num_kvcache_blocks": 8, "max_model_len": 128},
        pytest.param({"max_model_len": 72, "num_kvcache_blocks": 40}, marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 2}, marks=pytest.mark.slow),
    ],
    ids=["stops", "mixed", "preempted", "at the end of the context", "few slots"],
)
def test_in_any_company_answers_are_those_without_drafts(checkpoint: Path, fields: dict[str, Any]) -> None:
    def some() -> list[Sequence]:
        made = endless(6, tokens=24) if "stop_token_ids" not in fields else sequences()
        for seq in made if "stop_token_ids" in fields else []:
            seq.ignore_eos = False
        return made

    expected = answers(waiting(runner_for(checkpoint, **fields), some()))
    ahead = Noted(runner_for(checkpoint, **fields, **by_model(checkpoint)))
    assert answers(ahead.run(some())) == expected
    assert ahead.unknown or "stop_token_ids" in fields
    if fields.get("num_kvcache_blocks") == 8:
        assert ahead.scheduler.stats("decode", 0.0).preemptions > 0
    # Prefix hits have the drafter's keys and values too.
    assert answers(ahead.run(some())) == expected


@pytest.mark.parametrize("name", some(["the model itself", "EAGLE"], "EAGLE"))
def test_no_row_reads_what_the_step_before_it_left_where_it_has_no_draft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with fewer drafts than the longest are padded. Unused blocks hold NaN, as a failed sequence leaves them."""
    case = CASES[name](tmp_path)
    expected = answers(waiting(runner_for(case.target), uneven()))
    allocate = LayerCaches.allocate

    def allocate_nan(*arguments: Any) -> Any:
        caches = allocate(*arguments)
        for cache in caches.values():
            for tensor in tensors_of(cache):
                tensor.fill_(torch.nan)
        return caches

    monkeypatch.setattr(LayerCaches, "allocate", allocate_nan)
    ahead = Noted(ModelRunner(load(case.target, config_of(case)), NUM_BLOCKS))
    assert answers(ahead.run(uneven())) == expected
    assert ahead.num_padded > 0


def test_padding_of_a_row_with_fewer_drafts_changes_no_state_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs no state belongs to padding rows; the last slot's states are those of a sequence."""
    target, rows = CASES["MTP, recurrent states"](tmp_path).target, endless(2)
    expected = answers(waiting(runner_for(target), rows))
    loaded = load(target, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=2))
    case = Case(target, {"speculative_method": "draft", "speculative_model": "-"})
    config = config_of(case).model_copy(update={"max_num_seqs": 2})
    ahead = Noted(ModelRunner(dataclasses.replace(loaded, config=config, drafter=Knowing(rows)), NUM_BLOCKS))
    limits = itertools.cycle([K, 1, 1, K, 0])
    monkeypatch.setattr(DraftPlan, "limit", lambda *_: next(limits))
    assert answers(ahead.run(endless(2))) == expected
    assert ahead.num_padded > 3


def test_blocks_of_rejected_drafts_may_exceed_what_a_later_step_with_fewer_drafts_reads(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks stay reserved for drafts that were rejected, so a row may have more blocks than a step's tables have
    columns. One row runs at a time, since the longest row determines the columns."""
    case = Case(checkpoint, {"speculative_method": "draft", "speculative_model": "-"})
    loaded = load(checkpoint, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8))
    loaded = dataclasses.replace(loaded, config=config_of(case, 4), drafter=Knowing([]))
    plain, ahead = runner_for(checkpoint), Noted(ModelRunner(loaded, NUM_BLOCKS))
    limits = itertools.cycle([4, 4, 1, 1])
    monkeypatch.setattr(DraftPlan, "limit", lambda *_: next(limits))
    num_blocks_above: list[int] = []
    assemble = DeviceBatch._bounded

    def noted(batch: DeviceBatch, inputs: StepInputs, *arguments: Any) -> DeviceInputs:
        assert inputs.bounds is not None
        num_blocks_above.append(int(inputs.bounds.num_blocks.max()) - inputs.num_blocks)
        return assemble(batch, inputs, *arguments)

    monkeypatch.setattr(DeviceBatch, "_bounded", noted)
    for length in range(4, 9):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
        tokens = prompt(length, seed=length, vocab_size=160)
        expected = answers(waiting(plain, [Sequence(tokens, 16, params, id=length)]))
        assert answers(ahead.run([Sequence(tokens, 16, params, id=length)])) == expected
    assert max(num_blocks_above) == 1


def uneven() -> list[Sequence]:
    """Rows that end after different numbers of tokens, at both sides of a block's end, so that some draft less."""
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens) for tokens in (21, 22, 23, 24, 9, 40)
    ]
    return [Sequence(prompt(3 + 9 * i, seed=i, vocab_size=160), 16, each, id=i) for i, each in enumerate(params)]


def test_rejection_accepts_all_drafts_of_the_model_itself_one_step_ahead(checkpoint: Path) -> None:
    """The noise of each draft, and the distribution from which it was sampled, belong to its final position."""
    expected = answers(waiting(runner_for(checkpoint), endless(tokens=40)))
    ahead = Noted(runner_for(checkpoint, **by_rejection(checkpoint)))
    found = answers(ahead.run(endless(tokens=40)))
    assert {key: found[key] for key in (0, 2)} == {key: expected[key] for key in (0, 2)}
    assert ahead.acceptance > 0.98
    assert len(ahead.unknown) > 5


@pytest.mark.parametrize("hidden_layers", [(), (-1,)])
def test_drafts_of_which_some_are_accepted(checkpoint: Path, hidden_layers: tuple[int, ...]) -> None:
    few = endless()
    expected = answers(waiting(runner_for(checkpoint), few))
    case = Case(checkpoint, {"speculative_method": "draft", "speculative_model": "-"})
    loaded = load(checkpoint, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8))
    loaded = dataclasses.replace(loaded, config=config_of(case), drafter=Knowing(few, hidden_layers))
    ahead = Noted(ModelRunner(loaded, NUM_BLOCKS))
    assert answers(ahead.run(endless())) == expected
    assert 0.3 < ahead.acceptance < 1.0
    assert len(ahead.unknown) > 3


@pytest.mark.parametrize("version", some(FAULTS, "sometimes NaN", "outside of the vocabulary"))
def test_a_broken_drafter_costs_no_answer_one_step_ahead(version: str, checkpoint: Path) -> None:
    expected = answers(waiting(runner_for(checkpoint), endless()))
    drafter, hidden_layers = FAULTS[version]
    case = Case(checkpoint, {"speculative_method": "draft", "speculative_model": "-"})
    loaded = load(checkpoint, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8))
    loaded = dataclasses.replace(loaded, config=config_of(case), drafter=drafter(hidden_layers))
    assert answers(Noted(ModelRunner(loaded, NUM_BLOCKS)).run(endless())) == expected


def test_a_sequence_that_is_aborted_in_flight_leaves_the_others_whole(checkpoint: Path) -> None:
    expected = answers(waiting(runner_for(checkpoint), endless(6)))
    ahead = Noted(runner_for(checkpoint, max_num_seqs=3, **by_model(checkpoint)))
    ahead.scheduler.extend(endless(6))
    while len(ahead.unknown) < 2:
        assert ahead.pipeline.advance(ahead.on_read) is None
    assert ahead.pipeline
    ahead.outputs += ahead.scheduler.abort([1])
    found = answers(ahead.run([]))
    assert {key: reported for key, reported in found.items() if key != 1} == {
        key: reported for key, reported in expected.items() if key != 1
    }
    assert "abort" in found[1][2]  # type: ignore[operator]


def test_a_step_that_raises_is_computed_again(checkpoint: Path) -> None:
    expected = answers(waiting(runner_for(checkpoint), endless()))
    runner = runner_for(checkpoint, **by_model(checkpoint))
    ahead = Noted(runner)
    ahead.scheduler.extend(endless())
    while len(ahead.unknown) < 3:
        assert ahead.pipeline.advance(ahead.on_read) is None
    intact = runner.run_model
    runner.run_model = None  # type: ignore[method-assign, assignment]
    assert ahead.pipeline.advance(ahead.on_read) is not None
    ahead.scheduler.check_integrity()
    runner.run_model = intact  # type: ignore[method-assign]
    assert answers(ahead.run([])) == expected


def test_what_a_dead_core_generated_goes_on_ahead(checkpoint: Path) -> None:
    expected = answers(waiting(runner_for(checkpoint), endless()))
    begun = endless()
    ahead = Noted(runner_for(checkpoint, **by_model(checkpoint)))
    ahead.scheduler.extend(begun)
    while len(ahead.unknown) < 3:
        ahead.pipeline.advance(ahead.on_read)
    resumed = [
        Sequence(seq.prompt_token_ids, 16, seq.sampling_params, id=seq.id, resumed_token_ids=seq.completion_token_ids)
        for seq in begun
    ]
    again = Noted(runner_for(checkpoint, **by_model(checkpoint)))
    again.run(resumed)
    assert {seq.id: seq.completion_token_ids for seq in resumed} == {
        key: reported[0] for key, reported in expected.items()
    }
    assert again.acceptance == 1.0


@pytest.mark.parametrize("name", some(["the model itself", "EAGLE", "MTP, recurrent states"], "EAGLE"))
def test_on_two_ranks_the_devices_count_what_rank_0_accepts(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    expected = answers(waiting(runner_for(case.target), endless()))
    speculative = {"num_speculative_tokens": K, **case.speculative}
    sizes: dict[str, Any] = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 8}
    ranks = RankThreads(case.target, speculative_config=speculative, **sizes)

    def lead(runner: ModelRunner) -> Noted:
        ahead = Noted(runner)
        assert answers(ahead.run(endless())) == expected
        return ahead

    ahead = ranks.run(lead)
    assert len(ahead.unknown) > 3
    assert sum(message.drafts_on_device for message in ranks.messages) >= len(ahead.unknown)


@pytest.mark.parametrize("name", some(["the model itself", "EAGLE", "EAGLE-3"], "EAGLE-3"))
def test_graphs_of_every_length_replay_and_the_host_waits_for_no_step_before_it_launches_the_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    case = CASES[name](tmp_path)
    expected = answers(waiting(runner_for(case.target), endless()))
    device = GraphDevice()
    runner = captured(ModelRunner(load(case.target, config_of(case)), NUM_BLOCKS), device)
    ahead = Noted(runner, device)
    assert answers(ahead.run(endless())) == expected
    full = [
        (later[0] - before[0], later[1] - before[1])
        for before, later, length in zip(ahead.waits, ahead.waits[1:], ahead.unknown[1:], strict=False)
        if length == 1 + K
    ]
    assert len(full) >= 3
    # Between launches the host waits once, for the step before the running one; a step is the target's graph and one
    # graph for each pass of the drafter.
    assert set(full) == {(1, 1 + K)}


@pytest.mark.slow
@requires_interpreter
@pytest.mark.parametrize("name", CASES)
def test_kernels_read_where_rows_begin_from_the_device(
    name: str, tmp_path: Path, triton_kernels: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eagerly, and replayed without Python over memory full of garbage, by Triton's kernels."""
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    monkeypatch.setattr(graph_runner, "_TRIED_LENGTHS", (2,))
    case = CASES[name](tmp_path)
    expected = answers(waiting(runner_for(case.target), endless(2, 8)))
    eager = Noted(ModelRunner(load(case.target, config_of(case, 2, (2,))), NUM_BLOCKS))
    assert answers(eager.run(endless(2, 8))) == expected
    device = RecordingDevice()
    replayed = Noted(captured(eager.runner, device), device)
    assert answers(replayed.run(endless(2, 8))) == expected
    assert eager.unknown == replayed.unknown
    assert len(eager.unknown) >= 2


def test_pieces_are_listed_for_all_contexts_that_a_row_may_have() -> None:
    longest = np.arange(1, 40000)
    most = most_pieces_within(longest, 80)
    possible = num_pieces(np.maximum(longest - np.arange(81)[:, None], 1)).max(0)
    assert (most >= possible).all()
    assert (most <= possible + 1).all()
