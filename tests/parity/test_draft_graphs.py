"""A drafter's passes replayed as on a GPU: for every length, the same drafts as eager passes, and no eager
operations."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.runner import graphs as graph_runner
from engine.runner import loaded_model
from engine.runner.device import Device
from engine.runner.device_batch import DeviceBatch
from engine.runner.draft_passes import DraftGraphRunner, DraftPasses
from engine.runner.drafting import ModelDrafter
from engine.runner.model_runner import ModelRunner
from models.attention.backend import AttentionBackend
from models.attention.triton import TritonAttentionBackend
from tests.parity.capturing_backend import CapturingBackend
from tests.parity.checkpoints import make_checkpoint
from tests.parity.draft_heads import MTPPair, make_eagle
from tests.parity.paged_torch import CapturedTorchBackend
from tests.parity.rank_threads import RankThreads
from tests.parity.recorded_graph import RecordingDevice
from tests.parity.runners import load
from tests.parity.test_drafter_pairs import FAULTS, Knowing
from tests.parity.test_graph_runner import GraphDevice
from tests.parity.test_model_drafters import K, Steps, by_model, endless
from tests.parity.test_speculative_decoding import sequences
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, runner_for
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import deepseek, qwen3_next
from tests.sweeps import some

__all__ = ["checkpoint", "triton_kernels"]


class Case(NamedTuple):
    target: Path
    speculative: dict[str, Any]


def eagle(directory: Path, version: int, **options: Any) -> Case:
    target = make_checkpoint(directory / "target", "llama", vocab_size=160, num_hidden_layers=3)
    head = make_eagle(directory / "head", target, version=version, **options)
    return Case(target, {"speculative_method": "eagle3" if version == 3 else "eagle", "speculative_model": str(head)})


def itself(directory: Path) -> Case:
    path = make_checkpoint(directory, "qwen3", vocab_size=160)
    return Case(path, by_model(path)["speculative_config"])


def mtp(directory: Path, variants: Any, architecture: str) -> Case:
    variant = next(each for each in variants if each.architecture == architecture)
    overrides = {**variant.overrides, "vocab_size": 160}
    return Case(MTPPair(directory, variant._replace(overrides=overrides)).path, {"speculative_method": "mtp"})


CASES: dict[str, Callable[[Path], Case]] = {
    "the model itself": itself,
    "EAGLE": lambda path: eagle(path, 1),
    "EAGLE-3": lambda path: eagle(path, 3, draft_vocab_size=96, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "MTP, recurrent states": lambda path: mtp(path, qwen3_next.VARIANTS, "Qwen3NextForCausalLM"),
    "MTP, latents": lambda path: mtp(path, deepseek.VARIANTS, "DeepseekV3ForCausalLM"),
}


class Counting(Steps):
    """Records the drafts of each step, and how its passes were run."""

    def __init__(self, runner: ModelRunner, device: GraphDevice | RecordingDevice | None = None) -> None:
        super().__init__(runner)
        self._device = device
        self.made: list[dict[int, list[int]]] = []
        """Drafts of each step by sequence."""
        self.replays: list[tuple[int, int, int, int]] = []
        """For each step of decodes: replayed graphs, the longest of its drafts, eager passes of the drafter, and how
        often the host waited for drafts."""
        self.num_eager = self.num_reads = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        before = 0 if self._device is None else self._device.num_replayed
        eager, reads = self.num_eager, self.num_reads
        output = super().forward(batch)
        self.made.append(output.draft_token_ids or {})
        if self._device is not None and not batch.total_seqs_num_prefill:
            depth = max(map(len, self.made[-1].values()), default=0)
            counts = self._device.num_replayed - before, depth, self.num_eager - eager, self.num_reads - reads
            self.replays.append(counts)
        return output


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of entries of a row in the drafter's replayed passes."""
    found: list[int] = []
    draft = DraftGraphRunner.draft

    def noted(self: DraftGraphRunner, *arguments: Any) -> torch.Tensor:
        found.append(self.query_len)
        return draft(self, *arguments)

    monkeypatch.setattr(DraftGraphRunner, "draft", noted)
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    return found


def config_of(case: Case, num_drafts: int = K, sizes: tuple[int, ...] = (2, 4)) -> Config:
    speculative = {"num_speculative_tokens": num_drafts, **case.speculative}
    limits = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 8}
    compilation = {"cudagraph_capture_sizes": sizes}
    return Config(**limits, speculative_config=speculative, compilation_config=compilation)


def captured(runner: ModelRunner, device: Device) -> ModelRunner:
    """A runner of the same model that has captured all graphs on the device."""
    made = ModelRunner(dataclasses.replace(runner.loaded, device_api=device), NUM_BLOCKS)
    made.device_batch = DeviceBatch(device, made.config.max_num_seqs)
    assert made.graphs is not None
    while made.graphs.capture_next():
        pass
    assert made.graphs.captured_sizes == list(made.config.compilation_config.cudagraph_capture_sizes)
    return made


def count(patch: pytest.MonkeyPatch, steps: Counting) -> None:
    """Count eager passes, and how often the host reads drafts, in each step."""
    run, read = DraftPasses.run, ModelDrafter._read

    def counted_read(self: ModelDrafter, *arguments: Any) -> Any:
        steps.num_reads += 1
        return read(self, *arguments)

    def counted(self: DraftPasses, *arguments: Any, **how: Any) -> torch.Tensor:
        steps.num_eager += 1
        return run(self, *arguments, **how)

    patch.setattr(DraftPasses, "run", counted)
    patch.setattr(ModelDrafter, "_read", counted_read)


def assert_replayed(steps: Counting) -> None:
    """A step of decodes is one graph of the target and one for each pass of the drafter, whose drafts are read
    once."""
    full = [each for each in steps.replays if each[1] == K]
    assert len(full) >= 3
    assert all(each == (1 + K, K, 0, 1) for each in full), full


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        # EAGLE's head and this backend are each in another case.
        pytest.param("EAGLE", CapturedTorchBackend, marks=pytest.mark.slow),
        *((name, CapturedTorchBackend) for name in CASES if name not in ("EAGLE", "MTP, latents")),
        ("EAGLE", CapturingBackend),
        pytest.param("MTP, recurrent states", CapturingBackend, marks=pytest.mark.slow),
    ],
)
def test_a_drafters_passes_are_graphs_that_make_the_eager_ones_drafts(
    name: str,
    backend: type[AttentionBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: backend())
    case = CASES[name](tmp_path)
    expected = Steps(runner_for(case.target)).run(endless())
    runner = ModelRunner(load(case.target, config_of(case)), NUM_BLOCKS)
    eager = Counting(runner)
    assert eager.run(endless()) == expected
    assert not lengths
    device = GraphDevice()
    steps = Counting(captured(runner, device), device)
    count(monkeypatch, steps)
    assert steps.run(endless()) == expected
    assert steps.made == eager.made
    assert_replayed(steps)


def test_drafts_that_depend_on_the_draft_before_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For penalties and bad words of a row the host waits after each pass; the drafts are those of eager passes."""
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    case = CASES["EAGLE"](tmp_path)
    eager = Counting(ModelRunner(load(case.target, config_of(case)), NUM_BLOCKS))
    expected = eager.run(sequences())
    device = GraphDevice()
    steps = Counting(captured(eager.runner, device), device)
    count(monkeypatch, steps)
    assert steps.run(sequences()) == expected
    assert steps.made == eager.made
    assert max(reads for *_, reads in steps.replays) == K


@pytest.mark.parametrize("version", some(FAULTS, "sometimes NaN", "outside of the vocabulary"))
def test_a_broken_drafter_of_which_the_device_takes_each_token_costs_no_answer(
    version: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    monkeypatch.setattr(graph_runner, "_STEPS_BETWEEN", 1 << 30)
    expected = Steps(runner_for(checkpoint)).run(endless())
    drafter, hidden_layers = FAULTS[version]
    loaded = load(checkpoint, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8))
    case = Case(checkpoint, {"speculative_method": "draft", "speculative_model": "-"})
    loaded = dataclasses.replace(loaded, config=config_of(case), drafter=drafter(hidden_layers))
    eager = Counting(ModelRunner(loaded, NUM_BLOCKS))
    assert eager.run(endless()) == expected
    device = GraphDevice()
    steps = Counting(captured(eager.runner, device), device)
    assert steps.run(endless()) == expected
    assert steps.made == eager.made


@pytest.mark.parametrize("hidden_layers", some([(), (-1,)], (-1,)))
def test_first_passes_of_all_lengths_are_replayed(
    checkpoint: Path, hidden_layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """After a step that accepts some drafts, the rows have different numbers of entries."""
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    few, one = endless(), endless(1, 50)
    plain = Steps(runner_for(checkpoint))
    expected = plain.run(few), plain.run(one)
    case = Case(checkpoint, {"speculative_method": "draft", "speculative_model": "-"})
    loaded = load(checkpoint, Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8))
    loaded = dataclasses.replace(loaded, config=config_of(case), drafter=Knowing([*few, *one], hidden_layers))
    eager = Counting(ModelRunner(loaded, NUM_BLOCKS))
    assert (eager.run(endless()), eager.run(endless(1, 50))) == expected
    device = GraphDevice()
    steps = Counting(captured(eager.runner, device), device)
    count(monkeypatch, steps)
    assert (steps.run(endless()), steps.run(endless(1, 50))) == expected
    assert steps.made == eager.made
    assert_replayed(steps)
    # Which ones depends on the plan's numbers of drafts, and on the accepted ones.
    assert {1, 4} < set(lengths) <= {1, 2, 3, 4}


@pytest.mark.slow
@requires_interpreter
@pytest.mark.parametrize("name", CASES)
def test_recorded_passes_of_kernels_make_the_eager_ones_drafts(
    name: str, tmp_path: Path, triton_kernels: torch.device, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """Replayed without Python, over memory full of garbage, by Triton's kernels."""
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)
    monkeypatch.setattr(graph_runner, "_TRIED_LENGTHS", (2,))
    case = CASES[name](tmp_path)
    runner = ModelRunner(load(case.target, config_of(case, 2, (2,))), NUM_BLOCKS)
    eager = Counting(runner)
    expected = eager.run(endless(2, 4))
    device = RecordingDevice()
    steps = Counting(captured(runner, device), device)
    assert steps.run(endless(2, 4)) == expected
    assert steps.made == eager.made
    assert lengths


def test_ranks_take_greedy_drafts_to_the_next_pass_on_their_devices(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """Rank 0 sends each draft from device to device; both hosts wait once per step, for all of them."""
    monkeypatch.setattr(loaded_model, "select_backend", lambda device: CapturingBackend())
    expected = Steps(runner_for(checkpoint)).run(endless()[::2])
    devices = [GraphDevice(), GraphDevice()]
    sizes: dict[str, Any] = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 8}
    ranks = RankThreads(checkpoint, devices=devices, capture="start", sizes=(2, 4), **sizes, **by_model(checkpoint))

    def lead(runner: ModelRunner) -> Counting:
        for device in devices:
            device.num_replayed = 0
        steps = Counting(runner, devices[0])
        count(monkeypatch, steps)
        assert steps.run(endless()[::2]) == expected
        return steps

    steps = ranks.run(lead)
    assert steps.acceptance == 1.0
    assert lengths
    full = [each for each in steps.replays if each[1] == K]
    # The other rank's reads are counted too, in this step or at the beginning of the next one.
    assert len(full) >= 3
    assert all(replays == 1 + K and not eager and reads <= 3 for replays, _, eager, reads in full), full
