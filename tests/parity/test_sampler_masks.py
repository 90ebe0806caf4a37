"""Masks in the sampler: grammars, allowed tokens and bad words against plain NumPy, and rows left without a token."""

import numpy as np
import pytest
import torch

from engine.sampling.parameters import SamplingColumns
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling_params import ReasoningBudget, SamplingParams
from engine.sequence import Sequence
from engine.text.structured.matcher import TokenMasks, packed

VOCAB_SIZE = 333
EOS = 7


class Fixed:
    """A replacement of a matcher that allows the same tokens everywhere."""

    num_words = -(-VOCAB_SIZE // 32)
    eos_token_ids = (EOS,)

    def __init__(self, *tokens: int, error: str | None = None) -> None:
        self._mask = packed(tokens, VOCAB_SIZE)
        self.error = error

    @staticmethod
    def compute(matchers: list[tuple["Fixed", int]], masks: np.ndarray) -> None:
        for matcher, row in matchers:
            masks[row] = matcher._mask

    def settle(self, mask: np.ndarray, ends: list[int], withheld: list[int]) -> bool:
        self.seen = list(ends), list(withheld)
        return self.error is None


def sequence(matcher: Fixed | None = None, output: list[int] = (), **params: object) -> Sequence:
    seq = Sequence([1, 2, 3], 16, SamplingParams(**{"temperature": 0.0, **params}))
    seq.token_ids += output
    seq.matcher = matcher
    seq.end_tokens = frozenset() if params.get("ignore_eos") else frozenset({EOS})
    seq.end_tokens |= frozenset(params.get("stop_token_ids", ()))
    return seq


def sample(seqs: list[Sequence], logits: np.ndarray, sampler: Sampler | None = None) -> SampledTokens:
    columns = SamplingColumns(max_num_seqs=len(seqs), vocab_size=logits.shape[1], seed=0)
    tokens = np.zeros((len(seqs), 64), dtype=np.int32)
    for slot, seq in enumerate(seqs):
        tokens[slot, : len(seq.token_ids)] = seq.token_ids
        columns.write(slot, seq)
    lengths = np.array([len(seq.token_ids) for seq in seqs])
    rows = columns.rows(np.arange(len(seqs)), lengths, tokens)
    with torch.inference_mode():
        return (sampler or Sampler(TokenMasks(Fixed.compute))).sample(torch.tensor(logits, dtype=torch.float32), rows)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(0.0, 3.0, (4, VOCAB_SIZE)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 30, VOCAB_SIZE - 3])
def test_the_allowed_token_with_the_largest_logit_is_taken(logits: np.ndarray, count: int) -> None:
    tokens = np.random.default_rng(count).permutation(VOCAB_SIZE)[:count]
    expected = tokens[logits[1, tokens].argmax()]
    for seq in (sequence(Fixed(*tokens)), sequence(allowed_token_ids=tokens.tolist())):
        sampled = sample([sequence(), seq, sequence(), sequence()], logits)
        assert sampled.token_ids[1] == expected
        assert not sampled.refused


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.01}, {"top_k": 400}])
def test_draws_stay_within_the_mask_and_follow_its_distribution(params: dict[str, object]) -> None:
    tokens = [3, 40, 41, 200]
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    row = np.full(VOCAB_SIZE, 5.0)
    row[tokens] = np.log(weights)
    draws = [
        sample([sequence(Fixed(*tokens), temperature=1.0, seed=seed, **params)], row[None]).token_ids[0]
        for seed in range(400)
    ]
    shares = np.array([draws.count(token) for token in tokens]) / len(draws)
    assert set(draws) <= set(tokens)
    if params in ({}, {"top_k": 400}):
        assert np.abs(shares - weights).max() < 0.08


def test_neighbours_are_what_they_are_without_a_masked_row(logits: np.ndarray) -> None:
    others = [sequence(temperature=1.0, seed=1, logprobs=3), sequence(), sequence(temperature=2.0, seed=2, top_k=9)]
    alone = sample([sequence(), *others], logits)
    together = sample([sequence(Fixed(5, 6)), *others], logits)
    assert alone.token_ids[1:].tolist() == together.token_ids[1:].tolist()
    assert alone.logprobs[1] == together.logprobs[1]


def test_log_probabilities_are_those_of_the_unmodified_distribution(logits: np.ndarray) -> None:
    token = int(logits[0].argmin())
    sampled = sample([sequence(Fixed(token), logprobs=2)], logits[:1])
    logprobs = logits[0] - np.log(np.exp(logits[0]).sum())
    assert sampled.token_ids.tolist() == [token]
    assert sampled.logprobs[0].logprob == pytest.approx(logprobs[token], abs=1e-5)
    assert list(sampled.logprobs[0].top_ids) == np.argsort(-logprobs)[:2].tolist()


def test_bad_words_are_not_completed(logits: np.ndarray) -> None:
    first, second = np.argsort(-logits[0])[:2].tolist()
    bad = [[4, 5, first]]
    assert sample([sequence(output=[4, 5], bad_words=bad)], logits[:1]).token_ids[0] == second
    assert sample([sequence(output=[5], bad_words=bad)], logits[:1]).token_ids[0] == first
    assert sample([sequence(bad_words=[[first]])], logits[:1]).token_ids[0] == second


def test_a_prompt_is_no_beginning_of_a_bad_word(logits: np.ndarray) -> None:
    first = int(logits[0].argmax())
    assert sample([sequence(bad_words=[[2, 3, first]])], logits[:1]).token_ids[0] == first


@pytest.mark.parametrize(
    ("seq", "named"),
    [
        (sequence(Fixed(1, 2), allowed_token_ids=[3]), ["grammar", "allowed_token_ids"]),
        (sequence(Fixed(1), bad_words=[[1]]), ["grammar", "bad_words"]),
        (sequence(allowed_token_ids=[4, 5], bad_words=[[4], [5]]), ["allowed_token_ids", "bad_words"]),
        (sequence(allowed_token_ids=[EOS], min_tokens=3), ["allowed_token_ids", "min_tokens"]),
    ],
)
def test_a_request_that_forbids_every_token_is_refused_by_name(seq: Sequence, named: list[str], logits) -> None:
    sampled = sample([sequence(), seq, sequence()], logits[:3])
    assert list(sampled.refused) == [1]
    assert not sampled.non_finite
    assert all(field in sampled.refused[1] for field in named)
    free = sample([sequence()] * 3, logits[:3])
    assert sampled.token_ids[[0, 2]].tolist() == free.token_ids[[0, 2]].tolist()


def test_a_grammar_that_failed_refuses_its_row_with_its_reason(logits: np.ndarray) -> None:
    sampled = sample([sequence(Fixed(1, error="it is too costly"), logprobs=1), sequence()], logits[:2])
    assert sampled.refused == {0: "it is too costly"}
    assert 0 not in sampled.logprobs


def test_logits_that_are_not_finite_are_the_model_s_fault_beside_a_mask_too(logits: np.ndarray) -> None:
    logits[0] = np.nan
    sampled = sample([sequence(Fixed(1, 2)), sequence()], logits[:2])
    assert sampled.non_finite == [0]
    assert not sampled.refused


@pytest.mark.parametrize(
    ("params", "output", "ends", "withheld"),
    [
        ({}, [], set(), set()),
        ({"stop_token_ids": [9]}, [], {9}, set()),
        ({"ignore_eos": True}, [], set(), {EOS}),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [], set(), set()),
        ({"min_tokens": 2, "stop_token_ids": [9]}, [5], {9}, {EOS, 9}),
        ({"min_tokens": 2, "stop_token_ids": [9]}, [5, 5], {9}, set()),
    ],
)
def test_matchers_get_the_tokens_that_end_the_sequence_and_those_that_may_not_yet(
    params: dict[str, object], output: list[int], ends: set[int], withheld: set[int], logits: np.ndarray
) -> None:
    matcher = Fixed(1)
    sample([sequence(matcher, output, **params)], logits[:1])
    assert tuple(map(set, matcher.seen)) == (ends, withheld)


def test_masks_of_a_step_leave_no_trace_in_the_next(logits: np.ndarray) -> None:
    sampler = Sampler(TokenMasks(Fixed.compute))
    sample([sequence(Fixed(1)), sequence(Fixed(2))], logits[:2], sampler)
    assert sample([sequence(Fixed(9))], logits[:1], sampler).token_ids.tolist() == [9]
    assert sample([sequence()], logits[:1], sampler).token_ids[0] == logits[0].argmax()


OPEN, CLOSE, HEAD, FINAL, COMMENT = 50, 51, 52, 53, 54


def closing_tokens(budget: ReasoningBudget, output: list[int], logits: np.ndarray, **params: object) -> int:
    """The token that follows `output`, in a batch with sequences that have no budget."""
    seq = sequence(output=output, reasoning_budget=budget, **params)
    sampled = sample([sequence(), seq, sequence(), sequence()], logits)
    assert not sampled.refused
    return int(sampled.token_ids[1])


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}, {"logprobs": 1}])
def test_reasoning_is_closed_after_its_budget_and_nowhere_else(logits: np.ndarray, params: dict[str, object]) -> None:
    budget = ReasoningBudget(3, [[CLOSE]])
    free = int(sample([sequence(**params)] * 4, logits).token_ids[1])
    assert free != CLOSE
    for length in (0, 2):
        assert closing_tokens(budget, [9] * length, logits, **params) != CLOSE
    for output in ([9] * 3, [9] * 8):
        assert closing_tokens(budget, output, logits, **params) == CLOSE
    # Closed by the model earlier, or by the budget just now.
    for output in ([9, CLOSE, 9, 9], [9, 9, 9, CLOSE], [9, 9, 9, CLOSE, 9]):
        assert closing_tokens(budget, output, logits, temperature=0.0) == logits[1].argmax()


def test_only_reasoning_that_the_answer_opens_is_counted_and_closed(logits: np.ndarray) -> None:
    budget = ReasoningBudget(2, [[CLOSE]], OPEN)
    greedy = logits[1].argmax()
    assert closing_tokens(budget, [9, OPEN, 9], logits) == greedy
    assert closing_tokens(budget, [9, OPEN, 9, 9], logits) == CLOSE
    assert closing_tokens(budget, [9] * 6, logits) == greedy


def test_a_closing_of_several_tokens_is_sampled_one_after_the_other(logits: np.ndarray) -> None:
    budget = ReasoningBudget(1, [[CLOSE], [HEAD], [FINAL, COMMENT]])
    said: list[int] = [9]
    for _ in range(3):
        said.append(closing_tokens(budget, said, logits))
    assert said[1:] == [CLOSE, HEAD, max(FINAL, COMMENT, key=lambda token: logits[1, token])]
    assert closing_tokens(budget, said, logits) == logits[1].argmax()
    # Reasoning that the model closes before the budget is spent is not changed.
    assert closing_tokens(ReasoningBudget(5, budget.closing), [9, CLOSE], logits) == logits[1].argmax()


def test_the_closing_waits_where_the_grammar_does_not_allow_it(logits: np.ndarray) -> None:
    """For example inside a character."""
    for tokens, expected in (((80, 81), max((80, 81), key=lambda token: logits[1, token])), ((80, CLOSE), CLOSE)):
        seq = sequence(Fixed(*tokens), output=[9], reasoning_budget=ReasoningBudget(1, [[CLOSE]]))
        sampled = sample([sequence(), seq, sequence(), sequence()], logits)
        assert (sampled.token_ids[1], sampled.refused) == (expected, {})


def test_a_slot_forgets_its_budget_long_after_the_reasoning_has_ended() -> None:
    columns = SamplingColumns(max_num_seqs=1, vocab_size=VOCAB_SIZE, seed=0)
    tokens = np.full((1, 512), 9, dtype=np.int32)
    slot = np.zeros(1, dtype=np.int64)
    columns.write(0, sequence(reasoning_budget=ReasoningBudget(3, [[CLOSE]])))
    tokens[0, 6] = CLOSE
    for length, is_watched in ((10, True), (60, True), (90, False)):
        assert not columns.rows(slot, np.array([length]), tokens).masked
        assert columns.need_last_token(slot, np.array([length])) == is_watched


def test_a_budget_asks_for_the_last_token_only_once_it_is_spent() -> None:
    columns = SamplingColumns(max_num_seqs=1, vocab_size=VOCAB_SIZE, seed=0)
    columns.write(0, sequence(reasoning_budget=ReasoningBudget(3, [[CLOSE]])))
    slot = np.zeros(1, dtype=np.int64)
    assert [columns.need_last_token(slot, np.array([length])) for length in (3, 5, 6, 7)] == [False, False, True, True]
