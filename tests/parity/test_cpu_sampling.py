"""The CPU's sampling operators against references in NumPy and torch."""

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from engine.sampling.parameters import Proposals, RandomRows, SamplingRows
from engine.sampling.sampler import Sampler
from engine.sampling.top_k import stable_topk
from engine.sampling.torch_ops import CPUOps, TorchOps
from models.ops.counter_rng import DRAFT, gumbel_noise, request_key
from models.ops.cpu import runtime, structures
from models.ops.cpu import runtime as library
from models.ops.cpu import sampling as sampling_ops
from tests.parity.gumbel_reference import best_tokens, kept_tokens, noises, row_key

pytestmark = pytest.mark.skipif(
    library.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)
THREADS = (1, 2, 3)
WIDE = 3 * 8192 + 7  # rows are divided if there are more threads than rows


@pytest.fixture(params=THREADS, ids="{} threads".format)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    runtime.start(request.param)
    yield
    runtime.start(1)
    runtime.stop()


def _rounded(step: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, width: np.round(rng.normal(size=width) * 3 / step) * step


def _falling(rng: np.random.Generator, width: int) -> np.ndarray:
    del rng
    return -np.arange(width) * 1e-3


def _rising(rng: np.random.Generator, width: int) -> np.ndarray:
    return -_falling(rng, width)


def _forbidden(rng: np.random.Generator, width: int) -> np.ndarray:
    row = np.full(width, -np.inf)
    row[rng.integers(width, size=max(1, width // 50))] = 1.5
    return row


def _close_to_zero(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.choice([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-7], size=width)


def _far_apart(rng: np.random.Generator, width: int) -> np.ndarray:
    return rng.choice([3e38, -3e38, 1e30, 0.0, 2.999e38], size=width)


def _with_one_above(rng: np.random.Generator, width: int) -> np.ndarray:
    row = rng.normal(size=width)
    row[rng.integers(width)] = 30
    return row


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "random": lambda rng, width: rng.normal(size=width) * 3,
    "as of bfloat16": lambda rng, width: torch.tensor(rng.normal(size=width) * 3).bfloat16().double().numpy(),
    "many equal": _rounded(0.5),
    "all equal": lambda rng, width: np.full(width, -2.25),
    "nearly equal": lambda rng, width: 5 + rng.normal(size=width) * 1e-6,
    "falling": _falling,
    "rising": _rising,
    "forbidden": _forbidden,
    "close to zero": _close_to_zero,
    "far apart": _far_apart,
    "one above": _with_one_above,
}


def row_of(kind: str, width: int, seed: int = 0) -> np.ndarray:
    return KINDS[kind](np.random.default_rng(seed), width).astype(np.float32)


def rows_of(width: int, seed: int = 0) -> torch.Tensor:
    """One row of each kind, with a row stride."""
    rows = torch.from_numpy(np.stack([row_of(kind, width, seed) for kind in KINDS]))
    return torch.nn.functional.pad(rows, (0, 5), value=math.nan)[:, :width]


# -- the k largest ----------------------------------------------------------------------------------------------


def in_order(row: np.ndarray, k: int) -> list[int]:
    """Descending, equal values by index, a NaN before all numbers."""
    key = np.where(np.isnan(row), np.inf, row).astype(np.float64)
    return np.lexsort((np.arange(len(row)), -key, ~np.isnan(row)))[:k].tolist()


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("width", [1, 15, 16, 63, 64, 65, 257, 1500, WIDE])
def test_the_largest_are_found_in_order(width: int) -> None:
    values = rows_of(width)
    for k in {min(width, most) for most in (1, 2, 17, 64, 100, structures.MAX_LARGEST)}:
        found = sampling_ops.largest(values, k)
        for row, ids in zip(values.numpy(), found.tolist(), strict=True):
            assert ids == in_order(row, k)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_number_that_is_none_counts_as_largest(rows: int) -> None:
    values = rows_of(WIDE)[:rows].clone()
    values[:, [3, 8192, 20_000]] = math.nan
    values[:, 5] = math.inf
    assert sampling_ops.largest(values, 4).tolist() == [[3, 8192, 20_000, 5]] * rows


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("width", [40, 700, WIDE])
def test_the_sampler_gets_the_same_top_tokens_as_from_torch(width: int) -> None:
    values = rows_of(width)
    for k in (1, 20, width if width < 1000 else 2000):
        by_operators = stable_topk(values, k)
        threads = library.load_library().threads
        runtime.stop()
        by_torch = stable_topk(values, k)
        runtime.start(threads)
        for found, expected in zip(by_operators, by_torch, strict=True):
            assert found.tolist() == expected.tolist()


# -- samples ----------------------------------------------------------------------------------------------------

FILTERS = [
    {"top_k": 1},
    {"top_k": 20, "temperature": 1000.0},
    {"top_k": 48, "temperature": 1.0},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.7},
    {"top_k": 900, "top_p": 0.95, "min_p": 1e-3},
    {"top_k": 5000},
    {"top_k": 5000, "top_p": 0.5},
    {"top_k": 5000, "top_p": 0.99, "min_p": 0.02},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-300},
    {"top_p": 1 - 2**-53},
    {"top_p": 0.999999, "min_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {},
]
SEEDS = range(6)
POSITION = 5


@functools.cache
def noise_of(seed: int) -> np.ndarray:
    return noises(row_key(request_key(seed), POSITION), WIDE)


def random_rows(
    count: int, width: int, seed: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature=0.8
) -> RandomRows:
    """`count` rows with one kind of parameters."""
    top_k = min(top_k, width) if top_k else width
    return RandomRows(
        rows=np.arange(count),
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int64),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
        key=np.full(count, request_key(seed), np.uint64),
        position=np.full(count, POSITION),
        filtered=np.full(count, top_k < width or top_p < 1.0 or min_p > 0.0),
    )


def draw(logits: torch.Tensor, random: RandomRows) -> list[int]:
    return Sampler().sample(logits, SamplingRows(random=random)).token_ids.tolist()


def is_best(token: int, row: np.ndarray, random: RandomRows, noise: np.ndarray, slack: float = 1e-12) -> bool:
    """Whether the token has the largest score among the filtered ones, up to the last bits of top-p's sums."""
    with np.errstate(over="ignore"):
        scaled = ((row - row.max()) / random.temperature[0]).astype(np.float32)
    for more in (0.0, slack, -slack):
        filters = {name: getattr(random, name)[0] for name in ("top_k", "top_p", "min_p")}
        kept = kept_tokens(scaled, **filters, slack=more) if random.filtered[0] else np.arange(len(row))
        if token in best_tokens(scaled, kept, noise, tolerance=1e-13):
            return bool(row[token] > -np.inf)
    return False


def test_the_reference_refuses_other_tokens() -> None:
    row, random = row_of("falling", 300), random_rows(1, 300, 3, top_p=0.9)
    assert sum(is_best(token, row, random, noise_of(3)[:300]) for token in range(300)) == 1


WIDTHS = (1, 17, 64, 65, 300, 2049, WIDE)
EACH_PAIR = [
    pytest.param(threads, filters, width, marks=() if (number + place) % 3 == which else pytest.mark.slow)
    for which, threads in enumerate(THREADS)
    for number, filters in enumerate(FILTERS)
    for place, width in enumerate(WIDTHS)
]
"""All threads, filters and widths; in the short form, every pair of them."""


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("operators", "filters", "width"), EACH_PAIR, indirect=["operators"])
def test_the_token_has_the_largest_score_of_those_that_filters_keep(filters: dict, width: int) -> None:
    logits = rows_of(width)
    for seed in SEEDS:
        random = random_rows(len(logits), width, seed, **filters)
        for token, row in zip(draw(logits.clone(), random), logits.numpy(), strict=True):
            assert is_best(token, row, random, noise_of(seed)[:width])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_row_gets_the_same_alone_among_others_and_on_any_number_of_threads(filters: dict) -> None:
    logits = rows_of(WIDE)
    found = set()
    for threads in THREADS:
        runtime.start(threads)
        together = draw(logits.clone(), random_rows(len(logits), WIDE, 61, **filters))
        alone = [draw(row[None].clone(), random_rows(1, WIDE, 61, **filters))[0] for row in logits]
        found |= {tuple(together), tuple(alone)}
    runtime.start(1)
    runtime.stop()
    assert len(found) == 1


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    "operators", [pytest.param(each, marks=() if each == 2 else pytest.mark.slow) for each in THREADS], indirect=True
)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_torch_samples_the_same(filters: dict) -> None:
    logits = rows_of(2049, seed=3)
    threads = library.load_library().threads
    for seed in SEEDS:
        random = random_rows(len(logits), 2049, seed, **filters)
        by_operators = draw(logits.clone(), random)
        runtime.stop()
        by_torch = draw(logits.clone(), random)
        runtime.start(threads)
        for found, expected, row in zip(by_operators, by_torch, logits.numpy(), strict=True):
            # Sums in another order may end top-p's prefix one token later.
            assert found == expected or is_best(expected, row, random, noise_of(seed)[:2049])


def test_rows_that_are_wider_than_the_operators_take_are_torchs() -> None:
    runtime.start(2)
    widest = torch.zeros(1, structures.MAX_DRAWN)
    assert sampling_ops.chooses(widest)
    keys = torch.from_numpy(random_rows(1, 1, 1).row_keys.view(np.int64))
    expected = gumbel_noise(keys, torch.arange(structures.MAX_DRAWN)).argmax().tolist()
    for filters in ({}, {"top_p": 1 - 1e-15}):
        assert draw(widest.clone(), random_rows(1, structures.MAX_DRAWN, 1, **filters)) == [expected]
    assert not sampling_ops.chooses(torch.zeros(1, structures.MAX_DRAWN + 1))
    assert not sampling_ops.chooses(widest.double())
    runtime.start(1)
    runtime.stop()
    assert not sampling_ops.chooses(widest)


# -- rejection sampling ------------------------------------------------------------------------------------------


VERIFIED_FILTERS = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "wide top-p": {"top_p": 0.999},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 1100, "top_p": 0.97, "min_p": 1e-3},
}


def verified_rows(count: int, width: int, stream: int = 0, **filters: float) -> RandomRows:
    top_k = min(int(filters.get("top_k", width)), width)
    return RandomRows(
        rows=np.arange(count),
        temperature=np.full(count, 0.8, dtype=np.float32),
        top_k=np.full(count, top_k),
        top_p=np.full(count, filters.get("top_p", 1.0)),
        min_p=np.full(count, filters.get("min_p", 0.0)),
        key=np.arange(count, dtype=np.uint64) + np.uint64(7),
        position=np.arange(count) + 3,
        filtered=np.full(count, bool(filters)),
    ).of_stream(stream)


VERIFIED_WIDTHS = (1, 15, 64, 257, 1500, WIDE)


@pytest.mark.parametrize(
    ("operators", "filters", "width"),
    [
        pytest.param(threads, filters, width, marks=() if (number + place) % 3 == which else pytest.mark.slow)
        for which, threads in enumerate(THREADS)
        for number, filters in enumerate(VERIFIED_FILTERS)
        for place, width in enumerate(VERIFIED_WIDTHS)
    ],
    indirect=["operators"],
)
@pytest.mark.usefixtures("operators")
def test_drafts_are_verified_as_torch_does_up_to_the_first_rejected_one(width: int, filters: str) -> None:
    for seed in range(1 if width == WIDE else 3):
        # Drafts of three positions of each sequence, and a fourth position.
        target = rows_of(width, seed).contiguous().repeat_interleave(4, 0)
        near = target + torch.from_numpy(np.random.default_rng(seed).normal(size=target.shape)).float() * 0.7
        drafter = torch.where(target.isfinite(), near, -0.5)
        random = verified_rows(len(target), width, DRAFT, **VERIFIED_FILTERS[filters])
        ops = CPUOps()
        drafts = ops.argmax(drafter)
        probabilities = ops.sample_with_probabilities(drafter, drafts, random, [])
        # Torch's softmax is wrong by 2e-5 in wide rows: it shows which tokens are within the filters.
        is_left = TorchOps().probabilities(drafter, drafts.peaks, random) > 0
        scaled = (drafter - drafts.peaks[:, None]) / torch.tensor(0.8)
        expected = scaled.double().masked_fill(~is_left, -torch.inf).softmax(-1)
        torch.testing.assert_close(probabilities.double(), expected, rtol=1e-6, atol=1e-9)
        at = np.flatnonzero(np.arange(len(target)) % 4 < 3)
        proposals = Proposals(at, at // 4, drafts.tokens.numpy()[at], probabilities[torch.from_numpy(at)])
        random = verified_rows(len(target), width, **VERIFIED_FILTERS[filters])
        found, wanted = ops.argmax(target), ops.argmax(target)
        ops.sample_verified(target, found, random, [], proposals)
        TorchOps.sample_verified(ops, target, wanted, random, [], proposals)
        is_accepted = (wanted.tokens == drafts.tokens).view(-1, 4)[:, :3]
        is_used = torch.nn.functional.pad(is_accepted.long().cumprod(1), (1, 0), value=1).bool().flatten()
        assert found.tokens[is_used].tolist() == wanted.tokens[is_used].tolist()


@pytest.mark.usefixtures("operators")
def test_drafts_of_equal_distributions_are_accepted_and_others_replaced_by_what_is_left() -> None:
    width = 300
    logits = rows_of(width)[:1].contiguous().repeat(2, 1)
    random = verified_rows(2, width)
    ops = CPUOps()
    drafts = ops.argmax(logits)
    same = ops.sample_with_probabilities(logits, drafts, random.of_stream(DRAFT), [])
    found = ops.argmax(logits)
    ops.sample_verified(logits, found, random, [], Proposals(np.arange(2), np.arange(2), drafts.tokens.numpy(), same))
    assert found.tokens.tolist() == drafts.tokens.tolist()
    # The drafter gives one token probability 1, the target gives it 0.
    logits[:, 4] = -math.inf
    certain = torch.zeros(2, width)
    certain[:, 4] = 1.0
    ops.sample_verified(logits, found, random, [], Proposals(np.arange(2), np.arange(2), np.array([4, 4]), certain))
    wanted = ops.argmax(logits)
    TorchOps.sample(
        ops, logits, wanted, random, [torch.from_numpy(each) for each in TorchOps().sampling_arrays(random, width)]
    )
    assert found.tokens.tolist() == wanted.tokens.tolist(), "the noise is that of a plain sample"
