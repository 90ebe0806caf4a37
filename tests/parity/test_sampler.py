"""The sampler against a reference that treats one row at a time, in float64, in the simplest way."""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import parameters
from engine.sampling.filters import FILTERS, Filter
from engine.sampling.parameters import SamplingColumns
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.top_k import index_of_rank, sorted_descending, stable_topk
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.ops.counter_rng import request_key, server_key
from models.ops.cpu import runtime
from tests.parity.gumbel_reference import noise, row_key

SERVER_SEED = 7


@pytest.fixture(scope="module", autouse=True, params=["torch", "operators"])
def chooser(request: pytest.FixtureRequest) -> Iterator[None]:
    """The sampling code: torch, and the CPU's operators if they are built."""
    if request.param == "operators" and runtime.start(2) is None:
        pytest.skip("the operators were not built: install again where there is a C compiler")
    yield
    if request.param == "operators":
        runtime.start(1)
        runtime.stop()


def named(params: SamplingParams) -> str:
    return msgspec.json.encode(params).decode()


def sequence(params: SamplingParams, prompt: list[int], output: list[int] = (), *, id: int = 0, ends=()) -> Sequence:
    seq = Sequence(prompt, 16, params, id=id)
    seq.token_ids += output
    seq.end_tokens = frozenset(ends)
    return seq


def sample(seqs: list[Sequence], logits: np.ndarray) -> SampledTokens:
    """Sample the next token of each sequence, each in a slot of its own, from one row of `logits` each."""
    columns = SamplingColumns(max_num_seqs=len(seqs) + 3, vocab_size=logits.shape[1], seed=SERVER_SEED)
    slots = np.arange(len(seqs))[::-1] + 3
    tokens = np.zeros((len(seqs) + 3, max(len(seq.token_ids) for seq in seqs)), dtype=np.int32)
    for slot, seq in zip(slots, seqs, strict=True):
        tokens[slot, : len(seq.token_ids)] = seq.token_ids
        columns.write(int(slot), seq)
    lengths = np.array([len(seq.token_ids) for seq in seqs])
    with torch.inference_mode():
        return Sampler().sample(torch.tensor(logits, dtype=torch.float32), columns.rows(slots, lengths, tokens))


def sample_one(params: SamplingParams, logits: list[float], **kwargs) -> int:
    return int(sample([sequence(params, [0], **kwargs)], np.array([logits])).token_ids[0])


# -- the reference ----------------------------------------------------------------------------------------------


def adjusted(seq: Sequence, logits: np.ndarray) -> np.ndarray:
    params, logits = seq.sampling_params, logits.astype(np.float64).copy()
    for token in set(seq.token_ids):
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(seq.completion_token_ids):
        logits[token] -= params.presence_penalty + params.frequency_penalty * seq.completion_token_ids.count(token)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if seq.num_completion_tokens < params.min_tokens:
        for token in seq.end_tokens:
            logits[token] = -math.inf
    return logits


def distribution(params: SamplingParams, logits: np.ndarray) -> np.ndarray:
    """Probabilities by token id, after temperature and filters."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    kept = list(order[: params.top_k] if params.top_k > 0 else order)
    if params.top_p < 1.0:
        mass, nucleus = weights[kept].sum(), []
        for token in kept:
            if sum(weights[nucleus]) < params.top_p * mass:
                nucleus.append(token)
        kept = nucleus
    kept = [token for token in kept if weights[token] >= params.min_p * weights.max()]
    probabilities = np.zeros_like(weights)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def best(probabilities: np.ndarray, key: int, position: int) -> tuple[int, float]:
    """The token with the largest score, and the distance to the next one's score."""
    kept = np.flatnonzero(probabilities)
    of_row = row_key(key, position)
    scores = sorted((math.log(probabilities[token]) + noise(of_row, int(token)), int(token)) for token in kept)
    return scores[-1][1], scores[-1][0] - scores[-2][0] if len(scores) > 1 else math.inf


def nearest_cut(params: SamplingParams, logits: np.ndarray) -> float:
    """The smallest distance of the filters' bounds to any token's, as probabilities."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    ordered = np.sort(weights)[::-1]
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    running = np.cumsum(ordered) / ordered.sum()
    by_p = np.abs(running - params.top_p).min() if params.top_p < 1.0 else math.inf
    by_min_p = np.abs(weights - params.min_p)[weights < 1.0].min(initial=math.inf) if params.min_p else math.inf
    return float(min(by_p, by_min_p))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 70, 10**6]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, 3.0, 100.0]), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.sampled_from([0, 1, 5]),
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            PARAMS, st.lists(st.integers(0, 39), min_size=1, max_size=8), st.lists(st.integers(0, 39), max_size=8)
        ),
        min_size=1,
        max_size=9,
    ),
    vocab_size=st.sampled_from([40, 300, 3001]),
    step=st.sampled_from([0.0, 1e-3, 0.5]),
    seed=st.integers(0, 99),
)
def test_every_row_gets_the_token_that_the_reference_gives_it(rows, vocab_size: int, step: float, seed: int):
    # `step` rounds the logits, so that many are equal.
    logits = np.random.default_rng(seed).normal(size=(len(rows), vocab_size)) * 3
    logits = (np.round(logits / step) * step if step else logits).astype(np.float32)
    seqs = [sequence(*row, id=i, ends=(1, 2)) for i, row in enumerate(rows)]
    tokens = sample(seqs, logits).token_ids
    for token, seq, row in zip(tokens, seqs, logits, strict=True):
        params, row = seq.sampling_params, adjusted(seq, row)
        if params.temperature == 0.0:
            assert row[token] == pytest.approx(row.max(), abs=1e-4)
            continue
        key = server_key(SERVER_SEED, seq.id) if params.seed is None else request_key(params.seed)
        expected, distance = best(distribution(params, row), key, len(seq.token_ids))
        # float32 rounds the penalised logits, so that scores and bounds at this distance may be decided either way.
        is_near = min(distance, nearest_cut(params, row)) < 1e-4
        assert token == expected or is_near or params.temperature == 1e-5


def fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's chi-square test at the 0.1 % level, by Wilson and Hilferty's approximation of the quantile."""
    degrees = len(counts) - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()) < quantile


# -- frequencies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        pytest.param(SamplingParams(temperature=0.5), marks=pytest.mark.slow),
        pytest.param(SamplingParams(temperature=2.0, top_k=5), marks=pytest.mark.slow),
        SamplingParams(top_p=0.8),
        pytest.param(SamplingParams(min_p=0.2), marks=pytest.mark.slow),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=named,
)
def test_twenty_thousand_samples_are_distributed_as_asked(params: SamplingParams):
    row = np.random.default_rng(3).normal(size=30)
    seqs = [sequence(params, [0], id=id) for id in range(20_000)]
    counts = np.bincount(sample(seqs, np.tile(row, (len(seqs), 1))).token_ids, minlength=30)
    expected = distribution(params, row)
    assert counts[expected == 0].sum() == 0
    assert fits(counts[expected > 0], expected[expected > 0] * len(seqs))


@pytest.mark.parametrize("count", [2500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_rounding_errors_of_the_logits_change_no_token(count: int):
    kinds = [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.95), SamplingParams(min_p=0.05)]
    kinds.append(SamplingParams(top_k=20, top_p=0.8))
    rng = np.random.default_rng(4)
    flips = 0
    for first in range(0, count, 2500):
        logits = (rng.normal(size=(2500, 512)) * 2).astype(np.float32)
        noisy = logits + rng.uniform(-1e-6, 1e-6, size=logits.shape).astype(np.float32)
        for params in kinds:
            seqs = [sequence(params, [0], id=first + id) for id in range(2500)]
            flips += int((sample(seqs, logits).token_ids != sample(seqs, noisy).token_ids).sum())
    assert flips <= len(kinds) * count / 100_000


# -- repeatable -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [257, 2048, 20_011])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=40, top_p=0.95),
        SamplingParams(seed=1, top_p=0.999, temperature=2.0),
        SamplingParams(top_k=3, presence_penalty=1.0, repetition_penalty=1.2, logprobs=3),
        SamplingParams(temperature=0.0, logprobs=0),
    ],
    ids=named,
)
def test_a_row_gets_the_same_alone_and_among_neighbours_of_every_kind(params: SamplingParams, vocab_size: int):
    rng = np.random.default_rng(11)
    logits = np.round(rng.normal(size=(33, vocab_size)) * 3, 1)
    kinds = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=900), SamplingParams(top_p=0.5)]
    kinds += [SamplingParams(frequency_penalty=1.0, min_tokens=9, logit_bias={3: 5.0}), SamplingParams(logprobs=20)]
    seqs = [sequence(kinds[i % 6], [5, 6, 6], [7, 7], id=i, ends=(1,)) for i in range(32)]
    mine = sequence(params, [5, 6, 6], [7, 8], id=32)
    alone = sample([mine], logits[32:])
    for place in (0, 13, 32):
        among = sample(
            [*seqs[:place], mine, *seqs[place:]], np.concatenate((logits[:place], logits[32:], logits[place:32]))
        )
        assert among.token_ids[place] == alone.token_ids[0]
        assert among.logprobs.get(place) == alone.logprobs.get(0)


def test_a_seed_repeats_and_another_seed_or_position_or_request_differs():
    logits = np.zeros((1, 50_000))

    def token(seed: int | None, length: int = 1, id: int = 0) -> int:
        return int(sample([sequence(SamplingParams(seed=seed), [0] * length, id=id)], logits).token_ids[0])

    assert token(5) == token(5, id=99)
    assert token(None, id=3) == token(None, id=3)
    answers = [token(5), token(6), token(-5), token(5, length=2), token(None), token(None, id=1)]
    assert len(set(answers)) == len(answers)


# -- edges ------------------------------------------------------------------------------------------------------


def test_equal_logits_are_taken_in_the_order_of_their_ids():
    assert sample_one(SamplingParams(temperature=0.0), [1.0] * 500) == 0
    assert all(sample_one(SamplingParams(top_k=1, seed=seed), [0.0, -0.0, *[0.0] * 500]) == 0 for seed in range(20))
    assert {sample_one(SamplingParams(top_k=3, seed=seed), [0.0] * 500) for seed in range(50)} == {0, 1, 2}
    assert {sample_one(SamplingParams(top_p=0.01, seed=seed), [0.0] * 500) for seed in range(80)} == set(range(5))


def test_equal_logits_at_the_cut_of_a_wide_row_are_taken_in_the_order_of_their_ids():
    logits = [0.0] * 40_000
    logits[30_000] = 1.0
    kept = {sample_one(SamplingParams(top_k=3, seed=seed), logits) for seed in range(50)}
    assert kept == {30_000, 0, 1}


def test_min_p_one_keeps_only_the_argmax_and_its_equals():
    kept = {sample_one(SamplingParams(min_p=1.0, seed=seed), [3.0, 1.0, 3.0, 2.9]) for seed in range(30)}
    assert kept == {0, 2}


def test_a_tiny_top_p_keeps_one_token():
    assert {sample_one(SamplingParams(top_p=1e-300, seed=s), [0.0, 0.1, 0.0]) for s in range(20)} == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy_and_not_a_number_nowhere(temperature: float):
    for filters in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}):
        found = sample(
            [sequence(SamplingParams(temperature=temperature, **filters), [0])], np.array([[1e30, -3e38, 2e30]])
        )
        assert (found.token_ids.tolist(), found.non_finite) == ([2], [])


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_the_only_token_with_a_finite_logit_is_taken(filters: dict):
    logits = [-math.inf] * 600
    logits[517] = -4.0
    assert {sample_one(SamplingParams(seed=seed, **filters), logits) for seed in range(20)} == {517}


class ParamsWithMaxGap(SamplingParams, frozen=True):
    """With a filter of this test: tokens whose scaled logit is further from the peak are excluded; 0 is off."""

    max_gap: float = 0.0


def test_a_filter_of_the_table_masks_before_the_draw(monkeypatch: pytest.MonkeyPatch):
    def keep(scaled: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return scaled >= -values[:, None]

    max_gap = Filter("max_gap", np.float32, lambda values, _: values == 0.0, keep)
    monkeypatch.setattr(parameters, "FILTERS", (*FILTERS, max_gap))
    logits = [3.0, 2.6, 1.6, 2.9, -math.inf]
    for filters in ({}, {"top_p": 0.95}):
        for gap, expected in ((0.3, {0, 3}), (1.0, {0, 1, 3}), (0.0, {0, 1, 2, 3} if not filters else {0, 1, 3})):
            params = [ParamsWithMaxGap(seed=seed, max_gap=gap, temperature=0.5, **filters) for seed in range(200)]
            seqs = [sequence(each, [0], id=id) for id, each in enumerate(params)]
            assert set(sample(seqs, np.array([logits] * 200)).token_ids.tolist()) == expected


def test_a_bias_of_a_hundred_forces_and_forbids():
    assert {sample_one(SamplingParams(logit_bias={2: 100.0}, seed=s), [9.0, 0.0, -9.0]) for s in range(20)} == {2}
    banned = SamplingParams(logit_bias={0: -100.0}, temperature=0.0)
    assert sample_one(banned, [9.0, 0.0, -9.0]) == 1


def test_end_tokens_are_not_sampled_before_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=2)
    for output, token in (([], 2), ([2], 2), ([2, 2], 0)):
        assert sample_one(params, [9.0, 8.0, 1.0], output=output, ends=(0, 1, None, 10**6)) == token


def test_repetition_lowers_logits_of_either_sign():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert sample_one(params, [1.0, 0.9]) == 1
    assert sample_one(params, [-1.0, -1.1]) == 1


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not():
    logits = np.array([[1.0, 0.9, 0.5]])
    for params, token in (
        (SamplingParams(temperature=0.0, repetition_penalty=1.5), 1),
        (SamplingParams(temperature=0.0, presence_penalty=2.0), 0),
        (SamplingParams(temperature=0.0, frequency_penalty=2.0), 0),
    ):
        assert sample([sequence(params, [0])], logits).token_ids[0] == token
    once_each = sequence(SamplingParams(temperature=0.0, frequency_penalty=0.3), [2], [0, 1])
    assert sample([once_each], logits).token_ids[0] == 0
    twice = sequence(SamplingParams(temperature=0.0, frequency_penalty=0.3), [2], [0, 1, 0])
    assert sample([twice], logits).token_ids[0] == 1


# -- log probabilities and broken logits ------------------------------------------------------------------------


def test_log_probabilities_are_of_the_unmodified_distribution():
    logits = np.random.default_rng(0).normal(size=(3, 1000))
    params = SamplingParams(temperature=0.3, logit_bias={4: 100.0}, presence_penalty=1.0, logprobs=5)
    seqs = [sequence(params, [0], [4]), sequence(SamplingParams(), [0]), sequence(SamplingParams(logprobs=0), [0])]
    found = sample(seqs, logits)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert sorted(found.logprobs) == [0, 2]
    first, last = found.logprobs[0], found.logprobs[2]
    assert first.token_id == found.token_ids[0] == 4
    assert first.logprob == pytest.approx(expected[0, 4], abs=1e-5)
    assert list(first.top_ids) == np.argsort(-expected[0])[:5].tolist()
    assert first.top_logprobs == pytest.approx(np.sort(expected[0])[::-1][:5].tolist(), abs=1e-5)
    assert last.token_id == found.token_ids[2]
    assert last.logprob == pytest.approx(expected[2, last.token_id], abs=1e-5)
    assert (last.top_ids, last.top_logprobs) == ((), ())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(logprobs=2), SamplingParams(top_k=2), SamplingParams(top_p=0.5)],
    ids=named,
)
def test_a_row_with_broken_logits_is_named_and_its_neighbours_are_served(params: SamplingParams, value: float):
    logits = np.random.default_rng(1).normal(size=(3, 700))
    seqs = [sequence(params, [0], id=id) for id in range(3)]
    intact = sample(seqs, logits).token_ids
    logits[1, 333] = value
    found = sample(seqs, logits)
    assert found.non_finite == [1]
    assert 1 not in found.logprobs
    assert found.token_ids[[0, 2]].tolist() == intact[[0, 2]].tolist()


def test_a_row_without_any_possible_token_is_named():
    assert sample([sequence(SamplingParams(), [0])], np.full((1, 20), -math.inf)).non_finite == [0]


def test_a_rank_among_all_tokens_is_that_of_top_k_in_order():
    values = torch.tensor([[0.0, -3.0, 2.0, -0.0, 2.0, -math.inf, -3.0, 0.0], [1.0] * 8])
    ordered = sorted_descending(values)
    in_order = stable_topk(values, 8)[1]
    for rank in range(8):
        assert index_of_rank(values, ordered, torch.tensor([rank, rank])).tolist() == in_order[:, rank].tolist()
