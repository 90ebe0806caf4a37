"""In float32, where rows of other lengths are rounded differently, seeded answers do not depend on the batch."""

from pathlib import Path
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import prompt
from tests.parity.test_model_drafters import Steps
from tests.parity.test_worker_model_runner import runner_for

VOCAB_SIZE = 4000
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.95}, {"min_p": 0.02}, {"top_k": 500, "top_p": 0.9})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def seeded(i: int, tokens: int) -> Sequence:
    params = SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True, **FILTERS[i % len(FILTERS)])
    return Sequence(prompt(3 + i, seed=i, vocab_size=VOCAB_SIZE), 16, params, id=i)


@pytest.mark.parametrize("tokens", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_forty_seeded_requests_get_the_same_alone_and_in_company(wide: Path, tokens: int) -> None:
    how: dict[str, Any] = {"max_num_seqs": 40}
    together = Steps(runner_for(wide, **how)).run([seeded(i, tokens) for i in range(40)])
    alone = Steps(runner_for(wide, **how))
    assert [alone.run([seeded(i, tokens)])[0] for i in range(40)] == together
    in_chunks = Steps(runner_for(wide, **how, scheduling_policy="mixed", max_num_batched_tokens=48))
    assert in_chunks.run([seeded(i, tokens) for i in range(40)]) == together


def test_three_choices_of_a_prompt_are_those_of_three_requests_with_their_seeds(wide: Path) -> None:
    """The server gives choice `i` of a request the seed of the request plus `i`."""

    def choice(i: int) -> Sequence:
        params = SamplingParams(seed=7 + i, max_tokens=12, ignore_eos=True)
        return Sequence(prompt(40, vocab_size=VOCAB_SIZE), 16, params, id=i)

    together = Steps(runner_for(wide, max_num_seqs=40)).run([choice(i) for i in range(3)])
    alone = Steps(runner_for(wide, max_num_seqs=40))
    assert [alone.run([choice(i)])[0] for i in range(3)] == together
