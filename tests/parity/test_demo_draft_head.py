"""The committed head drafts for the demo model, in the form in which it is served."""

from functools import cache

import pytest
import torch
from tokenizers import Tokenizer

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.demo import CHECKPOINT_DIR, DRAFT_HEAD_DIR
from tests.parity.test_model_drafters import Steps
from tests.parity.test_worker_model_runner import runner_for
from tools.demo.examples import render_prompt
from tools.demo.generate import held_out_texts

MOST_TOKENS = 64
LEAST_ACCEPTED = {1: 0.7, 3: 0.55}
"""By most drafts a step, the share that is accepted. Drafts beyond an end token count as rejected, and answers are
short: of others nine in ten are accepted (models/demo/README.md)."""


def questions() -> list[Sequence]:
    """A held-out question of each category."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    prompts = [render_prompt(text) for texts in held_out_texts(2, 1).values() for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    return [Sequence(tokenizer.encode(each).ids, 16, params, id=i) for i, each in enumerate(prompts)]


def steps(num_drafts: int) -> Steps:
    """Without drafts, or by the head, which the method alone names."""
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


@pytest.mark.parametrize("num_drafts", LEAST_ACCEPTED)
def test_most_drafts_of_the_head_are_what_the_model_says_to_held_out_questions(num_drafts: int) -> None:
    drafting = steps(num_drafts)
    assert drafting.run(questions()) == answers()
    assert len(drafting.drafted) > 100
    assert drafting.acceptance >= LEAST_ACCEPTED[num_drafts]


def test_the_head_takes_no_more_than_a_megabyte() -> None:
    assert sum(file.stat().st_size for file in DRAFT_HEAD_DIR.iterdir()) <= 1_000_000
