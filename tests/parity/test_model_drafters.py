"""Drafts of a model in the runner: answers equal those without drafts, and the drafter's inputs are correct."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.distributed.rank_steps import decode_step, encode_step
from engine.runner import model_runner
from engine.runner.draft_passes import DraftPasses
from engine.runner.model_runner import ModelRunner
from engine.runner.start import proposal_bytes
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.attention import context as forward_context
from models.attention.backend import AttentionBackend, AttentionMetaData
from models.demo import CHECKPOINT_DIR
from models.layers.base import CacheSpec, CausalLM, DraftLM, KVCacheSpec
from models.ops.cpu.runtime import load_library
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.ahead import answers, waiting
from tests.parity.checkpoints import make_checkpoint
from tests.parity.draft_heads import WEIGHTS, make_eagle
from tests.parity.paged_model import prompt
from tests.parity.runners import load, rebuilt
from tests.parity.test_speculative_decoding import sequences
from tests.parity.test_worker_model_runner import NUM_BLOCKS, checkpoint, runner_for
from tests.parity.thread_ranks import at_once, thread_ranks
from tests.sweeps import sweep

__all__ = ["checkpoint"]

K = 3


def by_model(path: Path, k: int = K) -> dict[str, Any]:
    fields = {"num_speculative_tokens": k, "speculative_method": "draft", "speculative_model": str(path)}
    return {"speculative_config": fields}


class Steps:
    """A scheduler and a runner, whose steps are read immediately."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.scheduler = runner, Scheduler(runner.config)
        self.drafted: list[int] = []
        """Drafts of each row that a step verified."""

    def run(self, seqs: list[Sequence], most: int = 1000) -> list[list[int]]:
        """The tokens of each sequence, after all steps or at most `most` of them."""
        self.scheduler.extend(seqs)
        for _ in range(most):
            if (scheduled := self.scheduler.schedule()) is None:
                break
            batch, in_step = scheduled
            self.drafted += [len(drafts) for drafts in batch.scheduled_spec_decode_tokens.values()]
            output = self.forward(batch)
            assert not output.errors
            self.scheduler.postprocess(list(in_step.values()), output)
            self.scheduler.check_integrity()
        return [seq.completion_token_ids for seq in seqs]

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        return self.runner.forward(batch)

    @property
    def acceptance(self) -> float:
        return self.scheduler.total_accepted_tokens / max(1, self.scheduler.total_draft_tokens)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture with the same vocabulary and other weights: its drafts are correct by chance only."""
    return make_checkpoint(tmp_path_factory.mktemp("smaller"), "llama", vocab_size=160, num_hidden_layers=1)


@pytest.fixture(scope="module")
def answered(checkpoint: Path) -> list[list[int]]:
    """What is answered to `sequences` without drafts."""
    return answers(waiting(runner_for(checkpoint), sequences()))


@pytest.mark.parametrize("drafter", ["itself", "another"])
def test_drafts_of_a_model_change_no_answer(
    checkpoint: Path, smaller: Path, answered: list[list[int]], drafter: str
) -> None:
    path = checkpoint if drafter == "itself" else smaller
    assert answers(waiting(runner_for(checkpoint, **by_model(path)), sequences())) == answered


def endless(count: int = 4, tokens: int = 21) -> list[Sequence]:
    """Greedy and seeded sequences that end by their length alone, so that all correct drafts count."""
    made = []
    for i in range(count):
        how: dict[str, Any] = {"temperature": 0.0} if i % 2 == 0 else {"temperature": 1.0, "seed": i, "top_p": 0.9}
        params = SamplingParams(**how, max_tokens=tokens + i, ignore_eos=True)
        made.append(Sequence(prompt(3 + 11 * i, seed=i, vocab_size=160), 16, params, id=i))
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of `endless` without drafts."""
    return Steps(runner_for(checkpoint)).run(endless())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scheduling_policy": "mixed", "max_num_batched_tokens": 20},
        {"max_num_batched_tokens": 8},
    ],
    ids=["whole prompts", "chunks among decodes", "small steps"],
)
def test_a_model_that_drafts_for_itself_is_always_right(checkpoint: Path, fields: dict[str, Any]) -> None:
    """With greedy rows, and seeded ones, which share their noise. Then every draft has read the right keys and
    values."""
    expected = Steps(runner_for(checkpoint, **fields)).run(endless())
    steps = Steps(runner_for(checkpoint, **fields, **by_model(checkpoint)))
    assert steps.run(endless()) == expected
    assert steps.acceptance == 1.0
    # If a step has room for 4 rows and 4 drafts, each row has one.
    assert max(steps.drafted) == (1 if fields.get("max_num_batched_tokens") == 8 else K)


@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8)), 8])
def test_any_number_of_drafts_of_the_model_itself_is_accepted(
    checkpoint: Path, expected: list[list[int]], k: int
) -> None:
    steps = Steps(runner_for(checkpoint, **by_model(checkpoint, k)))
    assert steps.run(endless()) == expected
    assert steps.acceptance == 1.0
    assert max(steps.drafted) == k


def by_rejection(path: Path) -> dict[str, Any]:
    fields = by_model(path)
    fields["speculative_config"]["speculative_acceptance"] = "rejection"
    return fields


def test_rejection_accepts_all_drafts_of_the_model_itself(checkpoint: Path) -> None:
    steps = Steps(runner_for(checkpoint, **by_rejection(checkpoint)))
    steps.run(endless(tokens=40))
    # The distributions are equal, except for rounding in rows of other lengths.
    assert steps.acceptance > 0.98
    assert max(steps.drafted) == K


def test_the_distributions_that_rejection_keeps_are_counted_as_memory(checkpoint: Path) -> None:
    few, many = ({"max_num_seqs": count, **by_rejection(checkpoint)} for count in (2, 64))
    assert proposal_bytes(runner_for(checkpoint, **few).loaded) == 2 * K * 160 * 4
    assert proposal_bytes(runner_for(checkpoint, **many).loaded) == 64 * 160 * 4
    assert proposal_bytes(runner_for(checkpoint, **by_model(checkpoint)).loaded) == 0


def test_rejection_accepts_more_than_coupled_samples_and_leaves_greedy_answers(
    checkpoint: Path, smaller: Path
) -> None:
    expected = Steps(runner_for(checkpoint)).run(endless(8, tokens=40))
    coupled = Steps(runner_for(checkpoint, **by_model(smaller)))
    assert coupled.run(endless(8, tokens=40)) == expected
    steps = Steps(runner_for(checkpoint, **by_rejection(smaller)))
    found = steps.run(endless(8, tokens=40))
    assert found[::2] == expected[::2]
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in expected]
    assert steps.acceptance > coupled.acceptance


def test_a_preempted_sequence_drafts_again(checkpoint: Path) -> None:
    """There are too few blocks for four sequences: some are preempted, and use the prefix cache when they resume."""
    expected = Steps(runner_for(checkpoint)).run(endless(tokens=40))
    runner = runner_for(checkpoint, **by_model(checkpoint))
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 11})
    steps = Steps(runner)
    assert steps.run(endless(tokens=40)) == expected
    assert steps.scheduler.stats("decode", 0.0).preemptions > 0
    assert steps.acceptance > 0.9


def test_cached_prefixes_have_the_drafters_keys_and_values_too(checkpoint: Path) -> None:
    steps = Steps(runner_for(checkpoint, **by_model(checkpoint)))
    steps.run(endless())
    begun = steps.scheduler.total_draft_tokens, steps.scheduler.total_accepted_tokens
    again = [Sequence([*seq.token_ids], 16, seq.sampling_params, id=9 + i) for i, seq in enumerate(done(steps))]
    steps.run(again)
    assert steps.scheduler.stats("decode", 0.0).prefix_hit_tokens > 100
    drafted, accepted = steps.scheduler.total_draft_tokens - begun[0], steps.scheduler.total_accepted_tokens - begun[1]
    assert drafted > 20
    assert accepted == drafted


def done(steps: Steps) -> list[Sequence]:
    """The sequences of `endless` with their generated tokens."""
    seqs = endless()
    for seq, tokens in zip(seqs, Steps(steps.runner).run(endless()), strict=True):
        seq.token_ids += tokens
    return seqs


def test_what_a_dead_core_generated_is_drafted_from(checkpoint: Path, expected: list[list[int]]) -> None:
    begun = endless()
    Steps(runner_for(checkpoint, **by_model(checkpoint))).run(begun, most=4)
    resumed = [
        Sequence(seq.prompt_token_ids, 16, seq.sampling_params, id=seq.id, resumed_token_ids=seq.completion_token_ids)
        for seq in begun
    ]
    steps = Steps(runner_for(checkpoint, **by_model(checkpoint)))
    assert steps.run(resumed) == expected
    assert steps.acceptance == 1.0


def test_an_aborted_sequence_leaves_its_slot_to_another(checkpoint: Path, expected: list[list[int]]) -> None:
    steps = Steps(runner_for(checkpoint, max_num_seqs=2, **by_model(checkpoint)))
    steps.run([Sequence(prompt(40, vocab_size=160), 16, SamplingParams(max_tokens=99), id=99)], most=5)
    steps.scheduler.abort([99])
    assert steps.run(endless()) == expected
    assert steps.scheduler.total_draft_tokens > 0


@pytest.mark.skipif(load_library() is None, reason="only the compiled operators give a token the same result alone")
def test_the_compiled_operators_draft_in_one_call_a_pass(tmp_path: Path) -> None:
    """The embedded model in bfloat16: by a recorded pass, and by a head without logits."""
    other = make_checkpoint(
        tmp_path, "llama", vocab_size=1536, hidden_size=128, head_dim=64, max_position_embeddings=4096
    )
    expected = answers(waiting(runner_for(CHECKPOINT_DIR, torch.bfloat16), sequences(1536)))
    for path in (CHECKPOINT_DIR, other):
        runner = runner_for(CHECKPOINT_DIR, torch.bfloat16, **by_model(path))
        assert runner.drafts is not None
        assert runner.drafts.drafter.is_recorded
        assert answers(waiting(runner, sequences(1536))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_draft_of_a_head_that_repeats_its_target_is_accepted(dtype: torch.dtype, tmp_path: Path) -> None:
    """As in Qwen3-0.6B, queries are twice as wide as hidden states.

    Layers of both add nothing, so that a token decides the next one by its embedding, which the head returns. The
    target rounds its norm to bfloat16, which may exchange close tokens.
    """
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target = make_checkpoint(tmp_path / "target", "qwen3", vocab_size=512, **sizes)
    head = make_eagle(tmp_path / "head", target, version=1, **sizes)
    for path in (target, head):
        tensors = load_file(path / WEIGHTS)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        if path == head:
            tensors["fc.weight"] = torch.eye(128, 256)
        else:
            tensors["model.norm.weight"].fill_(1.0)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})
    eagle = {"num_speculative_tokens": K, "speculative_method": "eagle", "speculative_model": str(head)}
    steps = Steps(runner_for(target, dtype, speculative_config=eagle))
    assert steps.run(endless()[::2]) == Steps(runner_for(target, dtype)).run(endless()[::2])
    assert steps.acceptance >= (1.0 if dtype is torch.float32 else 0.9)
    assert len({token for answer in steps.run(endless()[:1]) for token in answer}) > 5


class Toy(DraftLM):
    """A drafter with one cached layer that is never read; it returns logits by a rule."""

    hidden_size = 64

    def __init__(self, hidden_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.hidden_layers = hidden_layers

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        del positions, hidden
        return torch.zeros(len(input_ids), self.hidden_size)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), 160), torch.nan)

    def kv_cache_layers(self) -> list[CacheSpec]:
        return [KVCacheSpec("model.layers.0.self_attn", 1, 16)]


class Outside(Toy):
    """Drafts a token that is not in the vocabulary."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), 200)
        logits[:, 190] = 9.0
        return logits


class Forbidden(Toy):
    """Drafts nothing: no token has a probability."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), 160), -torch.inf)


class SometimesBroken(Toy):
    """Its second draft is none."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return (positions % 3).float()[:, None].expand(-1, self.hidden_size).contiguous()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), 160)
        logits[hidden[:, 0] == 1] = torch.nan
        return logits


def with_drafter(path: Path, drafter: DraftLM, **fields: Any) -> ModelRunner:
    config = Config(**{"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 64, **fields})
    loaded = load(path, config)
    speculative = {"num_speculative_tokens": K, "speculative_method": "draft", "speculative_model": "-"}
    config = Config.model_validate({**config.model_dump(), "speculative_config": speculative})
    return ModelRunner(dataclasses.replace(loaded, config=config, drafter=drafter), NUM_BLOCKS)


@sweep(drafter=[Toy, Outside, Forbidden, SometimesBroken], hidden_layers=[(), (-1,)])
def test_a_broken_drafter_costs_no_answer(
    checkpoint: Path, answered: list[list[int]], drafter: type[Toy], hidden_layers: tuple[int, ...]
) -> None:
    runner = with_drafter(checkpoint, drafter(hidden_layers))
    assert answers(waiting(runner, sequences())) == answered


class Witness(Toy):
    """Checks that each entry's hidden state is the target's at its position: its argmax is the entry's token.

    If sequences are the target's own continuation of one token, that is true at every position.
    """

    hidden_size = 64

    def __init__(self, target: CausalLM) -> None:
        super().__init__((-1,))
        self._target = [target]  # Not registered as a submodule.
        self.num_checked = 0
        self.random = torch.Generator().manual_seed(0)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden, torch.ones(len(hidden), 1)), -1)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[1] == 65:
            hidden = hidden[:, :64]
            assert self._target[0].compute_logits(hidden).argmax(-1).tolist() == input_ids.tolist()
            self.num_checked += len(input_ids)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Sometimes the target's own next token but one, mostly not."""
        return torch.rand(len(hidden), 160, generator=self.random)


class WithPauses(Steps):
    """Asks for no drafts of some rows for some of the time, up to longer than entries wait."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        batch.num_next_drafts = [
            K if seq.id % 4 == 0 or (seq.id % 4 == 1 and seq.num_tokens % 9 == 0) else 0 for seq in batch.sequences
        ]
        return super().forward(batch)


class WithGaps(WithPauses):
    """Lets the drafter skip five steps in a row, now and then."""

    num_steps = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.num_steps += 1
        if self.num_steps % 20 < 15:
            return super().forward(batch)
        batch.num_next_drafts = []
        return Steps.forward(self, batch)


@pytest.mark.parametrize("kind", [WithPauses, WithGaps])
def test_a_drafter_reads_the_states_of_its_own_positions(checkpoint: Path, kind: type[Steps]) -> None:
    """In chunks, after prefix hits and preemption, after drafts of any acceptance, and after rows that waited."""
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    grown = Steps(runner_for(checkpoint)).run([Sequence([i], 16, params, id=i) for i in range(8)])

    def asked() -> list[Sequence]:
        made = []
        for i, tokens in enumerate(grown):
            own = dataclasses_params(max_tokens=50 if i % 2 else 12)
            made.append(Sequence([i, *tokens[: 5 * i]], 16, own, id=i))
        return made

    plain = runner_for(checkpoint, max_num_batched_tokens=32, scheduling_policy="mixed")
    expected = Steps(plain).run(asked())
    fields = {"max_num_batched_tokens": 32, "scheduling_policy": "mixed"}
    runner = with_drafter(checkpoint, Toy((-1,)), **fields)
    witness = Witness(runner.model)
    runner = rebuilt(runner, drafter=witness, num_blocks=NUM_BLOCKS)
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 17})
    steps = kind(runner)
    assert steps.run(asked()) == expected
    assert steps.run(asked()) == expected
    assert steps.scheduler.stats("decode", 0.0).preemptions > 0
    assert steps.scheduler.stats("decode", 0.0).prefix_hit_tokens > 0
    assert witness.num_checked > 200


def dataclasses_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_ranks_draft_together(checkpoint: Path, smaller: Path, expected: list[list[int]]) -> None:
    """Two ranks: the second one has no sampling parameters, and receives drafts and tokens from the first."""
    for path, least in ((checkpoint, 1.0), (smaller, 0.0)):
        fields: dict[str, Any] = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 8}
        config = Config(**fields, **by_model(path))
        [ranks] = thread_ranks(2)
        runners = at_once([partial(made, checkpoint, config, rank) for rank in ranks])
        steps = OverRanks(runners)
        assert steps.run(endless()) == expected
        assert steps.acceptance >= least
        assert steps.scheduler.total_draft_tokens > 10


def made(path: Path, config: Config, parallel: TensorParallel) -> tuple[ModelRunner, dict[str, Any]]:
    """A rank's runner and its caches, which are a global of the process."""
    runner = ModelRunner(load(path, config, parallel=parallel), NUM_BLOCKS)
    return runner, forward_context._kv_cache_data


class OverRanks(Steps):
    """Rank 0 computes each step while the other follows."""

    def __init__(self, runners: list[tuple[ModelRunner, dict[str, Any]]]) -> None:
        super().__init__(runners[0][0])
        self._runners = runners

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        (leader, own), (follower, others) = self._runners
        message = decode_step(encode_step(batch, 1, [], is_greedy=False))

        def lead() -> ScheduledBatchOutput:
            forward_context.set_kv_cache_data(own)
            return leader.forward(batch)

        def follow() -> None:
            forward_context.set_kv_cache_data(others)
            follower.follow(message)

        output, _ = at_once([lead, follow])
        assert isinstance(output, ScheduledBatchOutput)
        assert np.array_equal(leader.input_batch._num_read[:4], follower.input_batch._num_read[:4])
        return output


class StreamWitness(Toy):
    """Reads the streams of all layers; it must receive the inputs of the layers."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int) -> None:
        super().__init__(layers)
        self.hidden_size = hidden_size
        self.seen: list[torch.Tensor] = []

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden.float().clone())
        return hidden[:, : self.hidden_size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_of_layers_are_those_that_they_receive(
    checkpoint: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, and by a recorded pass, of the embedded model, whose layers overwrite their residuals."""
    path = CHECKPOINT_DIR if dtype is torch.bfloat16 else checkpoint
    config = Config(num_kvcache_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=8)
    loaded = load(path, config, dtype)
    num_layers = len(loaded.model.model.layers)  # type: ignore[attr-defined]
    layers = tuple(range(num_layers))
    witness = StreamWitness((*layers, -1), loaded.hidden_size)
    speculative = {"num_speculative_tokens": K, "speculative_method": "draft", "speculative_model": "-"}
    config = Config.model_validate({**config.model_dump(), "speculative_config": speculative})
    loaded = dataclasses.replace(loaded, config=config, drafter=witness)
    runner = ModelRunner(loaded, NUM_BLOCKS)
    assert (runner.program is not None) == (dtype is torch.bfloat16 and load_library() is not None)
    received: list[torch.Tensor] = []
    seqs = endless(1, tokens=3)
    witness.seen.clear()
    Steps(runner).run(seqs)
    [found] = witness.seen[:1]
    # The same tokens layer by layer, without a recorded pass.
    runner = ModelRunner(dataclasses.replace(loaded, operators=None), NUM_BLOCKS)
    for layer in loaded.model.model.layers:  # type: ignore[attr-defined]
        layer.register_forward_pre_hook(
            lambda _, inputs: received.append((inputs[0] + (0 if inputs[1] is None else inputs[1])).float().clone())
        )
    final: list[torch.Tensor] = []
    loaded.model.register_forward_hook(lambda _, inputs, output: final.append(output.float().clone()))  # type: ignore[attr-defined]
    Steps(runner).run(endless(1, tokens=1))
    assert torch.equal(found, torch.cat([*received[:num_layers], final[0]], -1))


def test_a_warm_up_drafts_as_serving_does(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels are compiled, every number of rows drafts; later requests are not affected."""
    runner = runner_for(checkpoint, max_num_seqs=6, **by_rejection(checkpoint))
    assert runner.drafts is not None
    rows: list[tuple[int, int]] = []
    draft_following = runner.drafts.drafter._draft_following

    def noted(state: torch.Tensor, *arguments: Any, **how: Any) -> None:
        rows.append((len(state), int(arguments[3].max())))
        draft_following(state, *arguments, **how)

    monkeypatch.setattr(runner.drafts.drafter, "_draft_following", noted)
    with monkeypatch.context() as patch:
        patch.setattr("models.ops.triton.active", lambda: True)
        runner.warm_up()
    assert {(count, K) for count in (1, 2, 4, 6)} <= set(rows)
    steps = Steps(runner)
    steps.run(endless(tokens=40))
    assert steps.acceptance > 0.98


def test_a_drafter_leaves_a_backend_that_was_found_wrong(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_for(checkpoint, **by_model(checkpoint))
    other = type(runner.backend)()
    monkeypatch.setattr(model_runner, "leave_to_torch", lambda *_: other)
    monkeypatch.setattr("models.ops.aiter.leave", lambda _: None)
    monkeypatch.setattr("models.ops.triton.active", lambda: True)
    runner.leave_to_torch("attention")
    monkeypatch.setattr("models.ops.triton.active", lambda: False)
    backends: set[AttentionBackend] = set()
    run = DraftPasses.run

    def noted(self: DraftPasses, metadata: AttentionMetaData, *arguments: Any, **how: Any) -> torch.Tensor:
        backends.add(metadata.backend)
        return run(self, metadata, *arguments, **how)

    monkeypatch.setattr(DraftPasses, "run", noted)
    assert Steps(runner).run(endless()) == expected
    assert backends == {other}
