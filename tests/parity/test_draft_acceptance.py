"""Tokens of rows that verify drafts follow the target's distribution, for every drafter and way of acceptance.

The model is a table: the logits of a token depend on the previous token, and on penalties and masks over all of them.
Each sequence is a slot with a seed of its own, and gets two tokens: the first position's, and the second's from the
same step if the first draft was accepted, or from a step without drafts if not. Drafts follow a request's masks, as
the runner's do, except those of the adversarial drafter.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.sampling.parameters import Proposals, SamplingColumns, SamplingRows
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.text.structured.matcher import Matcher, Matchers
from engine.text.structured.spec import GrammarSpec, lark_of
from models.ops.counter_rng import DRAFT
from models.ops.cpu import runtime
from tests.parity.test_sampler import adjusted, distribution, fits, sequence

WIDTH = 7
PROMPT = [0, 1]
TABLE = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) * 1.5
Q = np.random.default_rng(2).normal(size=(WIDTH, WIDTH)) * 1.5

PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-p": SamplingParams(top_p=0.8),
    "top-k": SamplingParams(temperature=1.3, top_k=3),
    "min-p": SamplingParams(min_p=0.15),
    "penalties": SamplingParams(presence_penalty=1.0, frequency_penalty=0.8, repetition_penalty=1.3),
    "bias": SamplingParams(logit_bias={2: 1.5, 4: -2.0}),
    "allowed tokens": SamplingParams(allowed_token_ids=[0, 2, 3, 5]),
    "grammar": SamplingParams(temperature=0.9),
    "grammar, top-p, penalties": SamplingParams(top_p=0.7, presence_penalty=0.6, repetition_penalty=1.2),
}
EOS = 6
GRAMMAR = "a[bc]?|b[abf]+|d[ef]c|f(a|e)*d"
FOLLOWERS = {None: [0, 1, 3, 5], 0: [1, 2, EOS], 1: [0, 1, 5], 3: [4, 5], 5: [0, 3, 4]}
"""The tokens that `GRAMMAR` allows first, and after each of these, with `a` as token 0."""
DRAFTERS: dict[str, np.ndarray] = {
    "random": Q,
    "perfect": TABLE,
    "adversarial": -3 * TABLE,
    "certain": np.where(np.arange(WIDTH) == 3, 60.0, 0.0) * np.ones((WIDTH, 1)),
}


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    runtime.start(2)
    yield
    runtime.start(1)
    runtime.stop()


class Letters:
    """Each token is a letter, and one is special."""

    special_ids = frozenset({EOS})

    def token(self, token_id: int) -> str | None:
        return "<|end|>" if token_id == EOS else None

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else b"abcdef"[token_id : token_id + 1]


@functools.cache
def grammar() -> tuple[Matchers, str]:
    matchers = Matchers(Letters, WIDTH, (EOS,))  # type: ignore[arg-type, return-value]
    matchers.load()
    return matchers, lark_of(GrammarSpec("regex", GRAMMAR))


def matcher() -> Matcher:
    matchers, text = grammar()
    return matchers.matcher(text)


class Slots:
    """`count` sequences with the same prompt and parameters, each in a slot."""

    def __init__(self, params: SamplingParams, count: int, *, has_grammar: bool = False) -> None:
        self.columns = SamplingColumns(max_num_seqs=count, vocab_size=WIDTH, seed=1)
        self.tokens = np.zeros((count, len(PROMPT) + 2), dtype=np.int32)
        self.tokens[:, : len(PROMPT)] = PROMPT
        self.slots = np.arange(count)
        for slot in self.slots.tolist():
            seq = sequence(_with_seed(params, slot), PROMPT, id=slot, ends=[EOS] if has_grammar else [])
            seq.matcher = matcher() if has_grammar else None
            self.columns.write(slot, seq)

    def rows(self, slots: np.ndarray, depth: int | np.ndarray) -> SamplingRows:
        return self.columns.rows(slots, np.full(len(slots), len(PROMPT)) + depth, self.tokens)

    def logits(self, table: np.ndarray, slots: np.ndarray, depth: int | np.ndarray) -> torch.Tensor:
        before = self.tokens[slots, np.full(len(slots), len(PROMPT)) + depth - 1]
        return torch.from_numpy(table[before].astype(np.float32))


@functools.cache
def slots_of(params: str, count: int) -> Slots:
    return Slots(PARAMS[params], count, has_grammar=params.startswith("grammar"))


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "seed": seed})


def propose(
    slots: Slots, table: np.ndarray, *, by_rejection: bool, ignores_masks: bool = False
) -> tuple[np.ndarray, torch.Tensor]:
    """Two drafts of each slot, written to the table, and the distributions of their samples. # [slots, 2], [slots, 2,
    V]"""
    drafts, probabilities = np.zeros((len(slots.slots), 2), dtype=np.int64), []
    for depth in range(2):
        rows = slots.rows(slots.slots, depth)
        assert rows.random is not None
        stream = DRAFT if by_rejection else 0
        rows = dataclasses.replace(rows, random=rows.random.of_stream(stream))
        if ignores_masks:
            rows = dataclasses.replace(rows, masked=None)
        launched, of_rows = Sampler().launch_from(slots.logits(table, slots.slots, depth), rows)
        assert of_rows is not None
        probabilities.append(of_rows)
        drafts[:, depth] = slots.tokens[:, len(PROMPT) + depth] = launched.read().token_ids
    return drafts, torch.stack(probabilities, 1)


def answer(slots: Slots, drafts: np.ndarray, probabilities: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The two tokens of each slot, and the number of accepted drafts among those reached. # [slots, 2], [2]"""
    count = len(slots.slots)
    at, depths = np.repeat(slots.slots, 2), np.tile([0, 1], count)
    slots.tokens[:, len(PROMPT) :] = drafts
    rows = slots.rows(at, depths)
    if probabilities is not None:
        proposals = Proposals(np.arange(2 * count), at, drafts.reshape(-1), probabilities.flatten(0, 1))
        rows = dataclasses.replace(rows, proposals=proposals)
    tokens = Sampler().sample(slots.logits(TABLE, at, depths), rows).token_ids.reshape(count, 2).copy()
    is_rejected = tokens[:, 0] != drafts[:, 0]
    slots.tokens[:, len(PROMPT)] = tokens[:, 0]
    if is_rejected.any():
        again = slots.slots[is_rejected]
        tokens[again, 1] = Sampler().sample(slots.logits(TABLE, again, 1), slots.rows(again, 1)).token_ids
    is_second = (tokens[:, 1] == drafts[:, 1])[~is_rejected]
    return tokens, np.array([(~is_rejected).mean(), is_second.mean() if len(is_second) else math.nan])


def expected_pairs(params: SamplingParams, *, has_grammar: bool = False) -> np.ndarray:
    """The probability of each pair of tokens. # [V, V]"""

    def of(before: int, output: list[int]) -> np.ndarray:
        row = adjusted(sequence(params, PROMPT, output), TABLE[before])
        allowed = params.allowed_token_ids
        if has_grammar:
            allowed = FOLLOWERS[output[0] if output else None]
        if allowed is not None:
            row[[token for token in range(WIDTH) if token not in allowed]] = -math.inf
        return distribution(params, row)

    first = of(PROMPT[-1], [])
    return np.stack([first[token] * of(token, [token]) if first[token] else 0 * first for token in range(WIDTH)])


def pairs_of(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens[:, 0] * WIDTH + tokens[:, 1], minlength=WIDTH * WIDTH).astype(np.float64)


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    expected = expected.reshape(-1) * counts.sum()
    assert counts[expected == 0].sum() == 0
    # Rare pairs are merged, as the test's approximation requires.
    is_rare = (expected < 5) & (expected > 0)
    kept = (expected > 0) & ~is_rare
    observed, wanted = [*counts[kept], counts[is_rare].sum()], [*expected[kept], expected[is_rare].sum()]
    if wanted[-1] < 5:
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    assert fits(np.array(observed), np.array(wanted))


def _cases() -> list[object]:
    every = [
        (params, drafter, acceptance)
        for params in PARAMS
        for drafter in DRAFTERS
        for acceptance in ("coupled", "rejection")
    ]
    # One of each parameter, drafter and way of acceptance, with fewer samples; all of them with 20,000 samples are
    # slow.
    short = [pytest.param(*case, 4000) for number, case in enumerate(every) if number % 7 == 1]
    return [*short, *(pytest.param(*case, 20_000, marks=pytest.mark.slow) for case in every)]


@pytest.mark.parametrize(("params", "drafter", "acceptance", "count"), _cases())
def test_pairs_of_tokens_are_distributed_as_the_targets(
    params: str, drafter: str, acceptance: str, count: int
) -> None:
    slots = slots_of(params, count)
    by_rejection = acceptance == "rejection"
    drafts, probabilities = propose(
        slots, DRAFTERS[drafter], by_rejection=by_rejection, ignores_masks=drafter == "adversarial"
    )
    tokens, _ = answer(slots, drafts, probabilities if by_rejection else None)
    expected = expected_pairs(PARAMS[params], has_grammar=params.startswith("grammar"))
    assert_distributed(pairs_of(tokens), expected)


@pytest.mark.parametrize("params", [name for name in PARAMS if name in ("temperature", "penalties", "grammar")])
def test_coupled_answers_are_those_without_drafts(params: str) -> None:
    slots = slots_of(params, 500)
    drafts, _ = propose(slots, DRAFTERS["random"], by_rejection=False)
    with_drafts, _ = answer(slots, drafts, None)
    without, _ = answer(slots, np.full_like(drafts, 6) - with_drafts, None)
    assert with_drafts.tolist() == without.tolist()


def test_rejection_accepts_as_much_as_the_distributions_have_in_common() -> None:
    params, slots = PARAMS["temperature"], slots_of("temperature", 4000)
    accepted: dict[str, np.ndarray] = {}
    for drafter, table in DRAFTERS.items():
        drafts, probabilities = propose(slots, table, by_rejection=True)
        _, accepted[drafter] = answer(slots, drafts, probabilities)
        p, q = (distribution(params, each[PROMPT[-1]]) for each in (TABLE, table))
        assert accepted[drafter][0] == pytest.approx(np.minimum(p, q).sum(), abs=0.03)
    assert accepted["perfect"].tolist() == [1.0, 1.0]
    drafts, _ = propose(slots, DRAFTERS["random"], by_rejection=False)
    _, coupled = answer(slots, drafts, None)
    assert coupled[0] < accepted["random"][0]


def test_a_draft_without_a_distribution_is_accepted_as_often_as_the_target_samples_it() -> None:
    """For lookup drafts both ways of acceptance are equal: p / q is p if q is 1."""
    params, slots = PARAMS["temperature"], slots_of("temperature", 4000)
    _, accepted = answer(slots, np.full((4000, 2), 3), None)
    assert accepted[0] == pytest.approx(distribution(params, TABLE[PROMPT[-1]])[3], abs=0.03)


def test_a_broken_row_keeps_its_peak_for_the_report_of_it() -> None:
    slots = slots_of("temperature", 4)
    drafts, probabilities = propose(slots, Q, by_rejection=True)
    rows = slots.rows(slots.slots, 0)
    rows = dataclasses.replace(rows, proposals=Proposals(slots.slots, slots.slots, drafts[:, 0], probabilities[:, 0]))
    logits = slots.logits(TABLE, slots.slots, 0)
    logits[1, 4], logits[2] = torch.nan, -torch.inf
    assert Sampler().sample(logits, rows).non_finite == [1, 2]


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """P-value of Pearson's test, by Wilson and Hilferty's approximation."""
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("num_groups", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_p_values_are_uniform_over_seeds(acceptance: str, num_groups: int) -> None:
    params = SamplingParams(temperature=1.5)
    size = 100
    slots = Slots(params, num_groups * size)
    drafts, probabilities = propose(slots, Q, by_rejection=acceptance == "rejection")
    tokens, _ = answer(slots, drafts, probabilities if acceptance == "rejection" else None)
    expected = expected_pairs(params).sum(1) * size
    values = [
        p_value(np.bincount(group, minlength=WIDTH).astype(np.float64), expected)
        for group in tokens[:, 0].reshape(num_groups, size)
    ]
    # Kolmogorov and Smirnov's distance, at the 0.1 % level.
    distance = np.abs(np.sort(values) - (np.arange(num_groups) + 0.5) / num_groups).max() + 0.5 / num_groups
    assert distance < 1.95 / math.sqrt(num_groups)
