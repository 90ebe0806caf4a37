"""The committed head drafts for the demo model as it is served."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner import build, draft_states
from engine.runner.drafting import ModelDrafter
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.demo import CHECKPOINT_DIR, DRAFT_HEAD_DIR
from models.ops.cpu.draft_chain import MOST_ROUNDS
from models.ops.cpu.runtime import load_library
from tests.parity.checkpoints import edit_json
from tests.parity.test_model_drafters import Steps
from tests.parity.test_worker_model_runner import runner_for
from tests.sweeps import sweep
from tools.demo.examples import render_prompt
from tools.demo.generate import held_out_texts

MOST_TOKENS = 64
LEAST_ACCEPTED = {1: 0.7, 3: 0.55}
"""Acceptance rate by the number of drafts per step. Drafts after an end token count as rejected, and answers are
short: in longer texts nine of ten are accepted (models/demo/README.md)."""


GREEDY = (SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS),)
SAMPLED = tuple(
    SamplingParams(max_tokens=MOST_TOKENS, seed=seed, **fields)
    for seed, fields in enumerate(
        [
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 0.0},
            {"temperature": 1.2, "top_k": 5, "presence_penalty": 0.7},
            {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.4},
            {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.3},
            {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": -0.3},
        ]
    )
)
SAMPLING = {"greedy": GREEDY, "sampled": SAMPLED}
SHAPES: dict[str, dict[str, Any]] = {
    "enough blocks": {"num_kvcache_blocks": 512},
    "few blocks": {"num_kvcache_blocks": 44},
    "chunks and a short context": {
        "scheduling_policy": "mixed",
        "max_num_batched_tokens": 64,
        "max_model_len": 208,
        "num_kvcache_blocks": 512,
    },
}


def questions(params: tuple[SamplingParams, ...] = GREEDY) -> list[Sequence]:
    """A held-out question of each category, with the parameters in turn."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    prompts = [render_prompt(text) for texts in held_out_texts(2, 1).values() for text in texts]
    return [Sequence(tokenizer.encode(each).ids, 16, params[i % len(params)], id=i) for i, each in enumerate(prompts)]


def steps(num_drafts: int) -> Steps:
    """Without drafts, or with the head, which is found by the method alone."""
    fields = {"speculative_config": {"num_speculative_tokens": num_drafts, "speculative_method": "eagle"}}
    return Steps(
        runner_for(
            CHECKPOINT_DIR, torch.bfloat16, max_model_len=2048, num_kvcache_blocks=2048, max_num_seqs=32, **fields
        )
    )


@cache
def answers() -> list[list[int]]:
    """Without drafts."""
    return steps(0).run(questions())


@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_most_drafts_of_the_head_are_what_the_model_says_to_held_out_questions(num_drafts: int) -> None:
    drafting = steps(num_drafts)
    assert drafting.run(questions()) == answers()
    assert len(drafting.drafted) > 100
    assert drafting.acceptance >= LEAST_ACCEPTED[num_drafts]


class Recorded(Steps):
    """Records the drafts of each step, and lets each sequence pause for 20 tokens of 40."""

    made: list[dict[int, list[int]] | None]

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        batch.num_next_drafts = [
            count if (seq.id + seq.num_tokens // 20) % 2 else 0
            for seq, count in zip(batch.sequences, batch.num_next_drafts, strict=True)
        ]
        output = super().forward(batch)
        self.made.append(output.draft_token_ids)
        return output


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
@sweep(drafter=["another model", "head"], sampling=[*SAMPLING], shape=["few blocks", "chunks and a short context"])
def test_drafts_made_in_one_call_are_those_made_pass_by_pass(
    drafter: str, sampling: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head, in the call that verifies its previous drafts, and a model that reads no hidden states.

    After a pause no entry may be missing: its memory would then contain entries of earlier rows, which differ.
    """
    monkeypatch.setattr(draft_states, "_MAX_STORED", 64)
    params, fields = SAMPLING[sampling], SHAPES[shape]
    speculative = {"num_speculative_tokens": 4, "speculative_method": "eagle"}
    if drafter == "another model":
        speculative |= {"speculative_method": "draft", "speculative_model": str(CHECKPOINT_DIR)}
    fields = {"max_num_seqs": 8, "max_model_len": 512, **fields, "speculative_config": speculative}
    made, answered, num_verified = [], [], 0
    verify = ModelDrafter.verify

    def counted(*arguments: Any) -> Any:
        nonlocal num_verified
        num_verified += 1
        return verify(*arguments)

    monkeypatch.setattr(ModelDrafter, "verify", counted)
    for is_at_once in (True, False):
        runner = runner_for(CHECKPOINT_DIR, torch.bfloat16, **fields)
        runner.config = runner.config.model_copy(update={"num_kvcache_blocks": fields["num_kvcache_blocks"]})
        assert runner.drafts is not None
        assert runner.drafts.drafter.is_recorded
        if not is_at_once:
            assert num_verified > 10 or drafter == "another model"
            runner.drafts.drafter._passes.chain = None
        recorded = Recorded(runner)
        recorded.made = []
        answered.append(recorded.run(questions(params)[:9]))
        made.append(recorded.made)
    assert answered[0] == answered[1]
    assert made[0] == made[1]
    assert {len(drafts) for each in made[0] if each for drafts in each.values()} >= {0, 1, 4}


class InRounds(Steps):
    """Steps of as many rounds as there may be, however long they take. Counts the rounds of each step."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.scheduler = Scheduler(runner.config, max_rounds=runner.max_rounds)
        self.scheduler.drafts._round_seconds = 1e-9
        self.rounds: list[int] = []

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        output = super().forward(batch)
        self.rounds.append(output.num_rounds)
        for seq_id, rounds in (output.verified_drafts or {}).items():
            assert sum(1 + accepted for _, accepted in rounds) == len(output.token_ids[seq_id])
        return output


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
@sweep(shape=[*SHAPES], sampling=[*SAMPLING])
def test_several_rounds_of_a_step_generate_the_tokens_of_plain_steps(sampling: str, shape: str) -> None:
    params, fields = SAMPLING[sampling], {"max_num_seqs": 8, "max_model_len": 512, **SHAPES[shape]}
    drafting = {"speculative_config": {"num_speculative_tokens": 4, "speculative_method": "eagle"}}
    found = []
    for more in ({}, drafting):
        runner = runner_for(CHECKPOINT_DIR, torch.bfloat16, **fields, **more)
        runner.config = runner.config.model_copy(update={"num_kvcache_blocks": fields["num_kvcache_blocks"]})
        steps = InRounds(runner)
        found.append(steps.run(questions(params)[:12]))
    assert found[0] == found[1]
    assert MOST_ROUNDS in steps.rounds
    assert steps.acceptance > 0.3


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
def test_drafts_that_leave_nan_in_a_later_round_fail_no_sequence(tmp_path: Path) -> None:
    """Tokens that are drafted, but in no prompt or answer, have an embedding of NaN."""
    target = shutil.copytree(CHECKPOINT_DIR, tmp_path / "target")
    [file] = target.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    edit_json(target / "config.json", tie_word_embeddings=False)
    save_file(tensors, file, {"format": "pt"})
    fields: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "num_kvcache_blocks": 512}
    head = {"speculative_method": "eagle", "speculative_model": str(DRAFT_HEAD_DIR), "num_speculative_tokens": 4}
    drafting = {"speculative_config": head}
    params = (SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True, seed=1),)

    def run(**more: Any) -> tuple[InRounds, list[list[int]]]:
        steps = InRounds(runner_for(target, torch.bfloat16, **fields, **more))
        return steps, steps.run(questions(params)[:8])

    _, expected = run()
    steps = InRounds(runner_for(target, torch.bfloat16, **fields, **drafting))
    made: set[int] = set()
    forward = steps.forward

    def noted(batch: ScheduledBatch) -> ScheduledBatchOutput:
        output = forward(batch)
        made.update(token for drafts in (output.draft_token_ids or {}).values() for token in drafts)
        return output

    steps.forward = noted  # type: ignore[method-assign]
    assert steps.run(questions(params)[:8]) == expected
    made.difference_update(*expected, *(seq.prompt_token_ids for seq in questions(params)[:8]))
    assert made
    tensors["model.embed_tokens.weight"][list(made)] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    broken, found = run(**drafting)
    assert found == expected
    assert broken.scheduler.stats("decode", 0.0).preemptions > 0


class InOneRound(InRounds):
    """All drafts are made, however few would pay, but every other sequence drafts only after `wait` tokens: until then
    its row lacks entries, so that a step cannot have further rounds."""

    wait = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        batch.num_next_drafts = [
            0 if seq.id % 2 and len(seq.completion_token_ids) < self.wait else 6 for seq in batch.sequences
        ]
        return super().forward(batch)


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
@pytest.mark.parametrize("wait", [0, 40], ids=["more drafts than fit", "rows without entries"])
def test_a_step_that_cannot_have_further_rounds_prepares_none(wait: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further round of 12 rows with 6 drafts each would have more tokens than its memory of 64.

    The rows that draft at once end before the others draft, so that a further round would have fewer tokens.
    """
    monkeypatch.setattr(draft_states, "_MAX_STORED", 64)
    lengths = (16 if wait else MOST_TOKENS, MOST_TOKENS)
    params = tuple(SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths)
    seqs = [questions(params)[: 8 if wait else 12] for _ in range(2)]
    fields: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512, "num_kvcache_blocks": 512}
    plain = Steps(runner_for(CHECKPOINT_DIR, torch.bfloat16, **fields)).run(seqs[0])
    drafts = {"speculative_config": {"num_speculative_tokens": 6, "speculative_method": "eagle"}}
    runner = runner_for(CHECKPOINT_DIR, torch.bfloat16, **fields, **drafts)
    assert runner.drafts is not None
    chain = runner.drafts.drafter._passes.chain
    assert chain is not None
    memory = np.full(4096, -7)
    chain._slots_of_tokens, after = np.split(memory, [len(chain._slots_of_tokens)])
    steps = InOneRound(runner)
    steps.wait = wait
    assert steps.run(seqs[1]) == plain
    assert (after == -7).all()


@pytest.mark.skipif(load_library() is None, reason="there are no compiled operators")
@pytest.mark.parametrize(
    ("fields", "drafts"),
    [
        ({}, ("eagle", 3)),
        ({"num_speculative_tokens": 0}, None),
        ({"num_speculative_tokens": 2}, ("ngram", 2)),
        ({"model": str(CHECKPOINT_DIR)}, None),
        ({"dtype": "float32"}, None),
        ({"cpu_operators": False}, None),
        ({"task": ("embed",)}, None),
    ],
)
def test_the_embedded_model_drafts_with_its_head_where_the_operators_compute_it(
    fields: dict[str, Any], drafts: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a setting names drafts, by any of their flags."""
    monkeypatch.setattr(build, "pin_torch_threads", lambda *_, **__: None)
    monkeypatch.setattr(build, "pin_operator_threads", lambda *_: frozenset())
    loaded = build.load_rank(Config.from_fields(device="cpu", **fields), CHECKPOINT_DIR).loaded
    found = loaded.config.speculative_config
    assert drafts == (None if found is None else (found.speculative_method, found.num_speculative_tokens))
    assert (loaded.drafter is not None) == (drafts is not None and drafts[0] == "eagle")


def test_the_head_takes_no_more_than_a_megabyte() -> None:
    assert sum(file.stat().st_size for file in DRAFT_HEAD_DIR.iterdir()) <= 1_000_000
