"""The device's sampler gives the tokens and the log probabilities of the sampler in torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.sampling.parameters import Adjustments, RandomRows, SamplingColumns, SamplingRows
from engine.sampling.sampler import SampledTokens, Sampler
from engine.sampling.triton_ops import TritonOps
from engine.sampling_params import SamplingParams
from engine.text.structured.matcher import MaskedRow, packed
from models.ops import triton as kernels
from models.ops.counter_rng import gumbel_noise, random_words, request_key, row_keys
from models.ops.cpu import runtime
from models.ops.memory import upload
from models.ops.triton import logits as logprobs
from models.ops.triton import logits as sampling
from models.ops.triton import sampling as draw
from models.ops.triton.cases import sampling as logprobs_reference
from models.ops.triton.cases import sampling as sampling_reference
from tests.parity.gumbel_reference import best_tokens
from tests.parity.test_sampler import SERVER_SEED, sequence
from tests.parity.triton_interpreter import DEVICE

SEEDS = range(6)


def logits_of(count: int, width: int, *, step: float = 0.0, spread: float = 3.0) -> torch.Tensor:
    """`step` rounds them, so that many are equal."""
    generator = torch.Generator().manual_seed(count * width)
    logits = torch.randn(count, width, generator=generator) * spread
    return (logits / step).round() * step if step else logits


def both(logits: torch.Tensor, rows: SamplingRows) -> tuple[SampledTokens, SampledTokens]:
    """By the kernels, and by torch."""
    runtime.stop()
    with torch.inference_mode():
        by_torch = Sampler().sample(logits.clone(), rows)
        reason = kernels.start(DEVICE)
        assert reason is None, reason
        by_kernels = Sampler().sample(logits.clone().to(DEVICE), rows)
        kernels.stop()
    return by_kernels, by_torch


def random_rows(count: int, width: int, keys: list[int], **filters: float) -> RandomRows:
    top_k = int(filters.get("top_k", 0)) or width
    top_p, min_p = filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    return RandomRows(
        rows=np.arange(count)[::-1].copy(),
        temperature=np.full(count, filters.get("temperature", 0.8), np.float32),
        top_k=np.full(count, min(top_k, width), np.int64),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
        key=np.array(keys, np.uint64),
        position=np.zeros(count, np.int64),
        filtered=np.full(count, top_k < width or top_p < 1.0 or min_p > 0.0),
    )


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 200},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-300},
    {"top_p": 1 - 2**-53},
    {"top_k": 20, "top_p": 0.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 30, "temperature": 1e-4},
    {"top_p": 0.9, "temperature": 5.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("width", "step", "seeds"), [(40, 0.0, SEEDS), (700, 0.5, SEEDS[:2])])
def test_drawn_tokens_are_those_of_torch(filters: dict[str, float], width: int, step: float, seeds: range) -> None:
    logits = logits_of(len(seeds), width, step=step)
    rows = SamplingRows(random=random_rows(len(seeds), width, [request_key(seed) for seed in seeds], **filters))
    by_kernels, by_torch = both(logits, rows)
    assert by_kernels.token_ids.tolist() == by_torch.token_ids.tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 333}, {"min_p": 1.0}], ids=str)
def test_of_equal_tokens_any_may_be_drawn(filters: dict[str, float]) -> None:
    logits = torch.zeros(2, 1000)
    rows = SamplingRows(random=random_rows(2, 1000, [request_key(seed) for seed in (7, 8)], **filters))
    by_kernels, by_torch = both(logits, rows)
    assert by_kernels.token_ids.tolist() == by_torch.token_ids.tolist()


@triton.jit
def _noise_kernel(keys, positions, words, noise, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    for row in range(ROWS):
        row_key = draw.row_key_of(tl.load(keys + row), tl.load(positions + row))
        at = row * WIDTH + tl.arange(0, WIDTH)
        high, low = draw.random_words(row_key, tl.arange(0, WIDTH))
        tl.store(words + at, (high.to(tl.int64) << 32) | low.to(tl.int64))
        tl.store(noise + at, draw.noise_of(row_key, tl.arange(0, WIDTH)))


def test_noise_has_the_bits_of_the_generator_and_is_within_its_tolerance() -> None:
    keys = np.array([request_key(seed) for seed in (0, 1, 2**63 - 1, -5)], np.uint64)
    positions = np.array([0, 7, 131071, 12])
    words = torch.zeros(4, 4096, dtype=torch.int64, device=DEVICE)
    noise = torch.zeros(4, 4096, device=DEVICE)
    sent = torch.from_numpy(keys.view(np.int64)).to(DEVICE), torch.from_numpy(positions).to(DEVICE)
    _noise_kernel[(1,)](*sent, words, noise, ROWS=4, WIDTH=4096)
    made, ids = torch.from_numpy(row_keys(keys, positions).view(np.int64))[:, None], torch.arange(4096)[None]
    high, low = random_words(made, ids)
    assert torch.equal(words.cpu(), (high << 32) | low)
    torch.testing.assert_close(noise.cpu().double(), gumbel_noise(made, ids), rtol=0, atol=3e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = logits_of(3, 700)
    keys = [request_key(seed) for seed in range(3)]
    together, _ = both(logits, SamplingRows(random=random_rows(3, 700, keys, top_p=0.9)))
    for row in range(3):
        alone, _ = both(logits[row : row + 1], SamplingRows(random=random_rows(1, 700, [keys[2 - row]], top_p=0.9)))
        assert alone.token_ids[0] == together.token_ids[row]


def test_the_argmax_is_the_first_of_equal_tokens_and_invalid_rows_are_reported() -> None:
    logits = logits_of(6, 300, step=2.0)
    logits[1, 7] = torch.nan
    logits[2, 250] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 0.0
    logits[4, :9] = -0.0
    by_kernels, by_torch = both(logits, SamplingRows())
    assert by_kernels.non_finite == by_torch.non_finite == [1, 2, 3]
    assert [by_kernels.token_ids[row] for row in (0, 4, 5)] == [by_torch.token_ids[row] for row in (0, 4, 5)]
    random = random_rows(6, 300, [request_key(seed) for seed in range(6)])
    by_kernels, by_torch = both(logits, SamplingRows(random=random))
    assert by_kernels.non_finite == by_torch.non_finite == [1, 2, 3]
    assert [by_kernels.token_ids[row] for row in (0, 4, 5)] == [by_torch.token_ids[row] for row in (0, 4, 5)]


PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.9, logit_bias={3: 4.0, 9: -100.0}),
    SamplingParams(temperature=1.0, seed=4, repetition_penalty=0.6, frequency_penalty=-0.5, top_p=0.9),
    SamplingParams(temperature=0.7, seed=5, presence_penalty=-1.0, min_tokens=20, top_k=10),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.1),
]


def test_penalties_and_biases_are_those_of_torch() -> None:
    width = 90
    logits = logits_of(len(PARAMS), width, step=0.5)
    columns = SamplingColumns(max_num_seqs=len(PARAMS), vocab_size=width, seed=SERVER_SEED)
    tokens = np.zeros((len(PARAMS), 40), dtype=np.int32)
    history = np.random.default_rng(1)
    lengths = []
    for slot, params in enumerate(PARAMS):
        seq = sequence(
            params,
            history.integers(0, 12, 7).tolist(),
            history.integers(0, 12, 3 + 5 * slot).tolist(),
            id=slot,
            ends=(1, 2),
        )
        columns.write(slot, seq)
        tokens[slot, : len(seq.token_ids)] = seq.token_ids
        lengths.append(len(seq.token_ids))
    rows = columns.rows(np.arange(len(PARAMS)), np.array(lengths), tokens)
    by_kernels, by_torch = both(logits, rows)
    assert by_kernels.token_ids.tolist() == by_torch.token_ids.tolist()


@pytest.mark.parametrize("width", [64, 130])
def test_masked_rows_sample_what_is_allowed_and_exhausted_ones_are_refused(width: int) -> None:
    logits = logits_of(4, width)
    masked = [
        MaskedRow(0, allowed=packed([5, 63], width)),
        MaskedRow(2, allowed=packed(range(width), width)),
        MaskedRow(3, allowed=packed([7], width)),
    ]
    forbidden = Adjustments(np.array([3]), np.array([7]), np.array([-np.inf], dtype=np.float32))
    by_kernels, by_torch = both(logits, SamplingRows(masked=masked, bias=forbidden))
    assert by_kernels.token_ids[:3].tolist() == by_torch.token_ids[:3].tolist()
    assert by_kernels.refused == by_torch.refused
    assert list(by_kernels.refused) == [3]
    assert by_kernels.non_finite == by_torch.non_finite == []


@pytest.mark.parametrize("most", [0, 3, 20, 40])
@pytest.mark.parametrize("width", [50, 300])
def test_log_probabilities_and_ranks_are_those_of_torch(width: int, most: int) -> None:
    logits = logits_of(4, width, step=0.5)
    logits[2, 3:] = -torch.inf
    random = random_rows(4, width, [request_key(seed) for seed in range(4)])
    by_kernels, by_torch = both(logits, SamplingRows(random=random, num_logprobs={0: most, 2: 1, 3: 2}))
    assert list(by_kernels.logprobs) == list(by_torch.logprobs) == [0, 2, 3]
    for row, expected in by_torch.logprobs.items():
        found = by_kernels.logprobs[row]
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        assert list(found.top_ids) == list(expected.top_ids)
        assert list(found.top_logprobs) == pytest.approx(list(expected.top_logprobs), abs=1e-5)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)


def reference_draw(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    max_gap: float,
    row_key: int,
    is_filtered: bool,
) -> set[int]:
    """The tokens of a row with a finite maximum that may be sampled, one except for equal scores. # [V] float32

    Weights are integers. `max_gap`: the largest distance of a token from the peak.
    """
    distance = (logits.max() - logits) / torch.tensor(temperature, dtype=torch.float32)
    weights = (torch.exp(-distance) * 2.0**40).to(torch.int64)
    order = torch.arange(len(logits))
    if is_filtered:
        order = distance.sort(stable=True).indices
        running = weights[order].cumsum(0)
        kept = min(top_k, int((distance <= max_gap).sum()))
        if top_p < 1.0:
            needed = torch.tensor(top_p, dtype=torch.float64) * running[top_k - 1].double()
            kept = min(kept, 1 + int((running.double() < needed.ceil()).sum()))
        order = order[:kept]
    noise = gumbel_noise(torch.tensor([row_key]), torch.arange(len(logits)))
    return best_tokens(-distance.numpy(), order.numpy(), noise.numpy(), tolerance=1e-5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draw_is_that_of_its_reference(filters: dict[str, float]) -> None:
    # Equal tokens.
    logits = torch.cat((logits_of(1, 200, step=1.0), torch.zeros(1, 200)))
    random = random_rows(2, 200, [request_key(seed) for seed in (99, 75)], **filters)
    columns = torch.from_numpy(TritonOps().sampling_arrays(random, 200)[0]).to(DEVICE)
    found = sampling.argmax(logits.to(DEVICE))
    has_filtered = bool(random.filtered[0])
    draw.draw(logits.to(DEVICE), found.peaks, found.tokens, columns, has_filtered=has_filtered)
    for nth, row in enumerate(random.rows):
        expected = reference_draw(
            logits[row],
            temperature=float(random.temperature[nth]),
            top_k=int(random.top_k[nth]),
            top_p=float(random.top_p[nth]),
            max_gap=float(columns[draw.MAX_GAP, nth].int().view(torch.float32)),
            row_key=int(random.row_keys.view(np.int64)[nth]),
            is_filtered=has_filtered,
        )
        assert int(found.tokens[row]) in expected


@pytest.mark.parametrize("kind", [sampling.REPETITION, sampling.PRESENCE, sampling.FREQUENCY, sampling.BIAS])
def test_changes_of_single_logits(kind: int) -> None:
    logits = logits_of(3, 70)
    generator = torch.Generator().manual_seed(kind)
    rows = torch.randint(3, (50,), generator=generator)
    ids = torch.randint(70, (50,), generator=generator)
    values = torch.tensor([1.3, 0.5, -0.25])[rows]
    if kind == sampling.BIAS:
        rows, ids, values = torch.tensor([0, 0, 2]), torch.tensor([5, 69, 5]), torch.tensor([4.0, -torch.inf, -9.0])
    expected, found = logits.clone(), logits.to(DEVICE)
    sampling_reference.reference_adjust(expected, rows, ids, values, kind)
    sampling.adjust(found, rows.to(DEVICE), ids.to(DEVICE), values.to(DEVICE), kind)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("width", [64, 77])
def test_masks(width: int) -> None:
    logits = logits_of(4, width)
    masks = torch.randint(-(2**31), 2**31, (2, -(-width // 32)), generator=torch.Generator().manual_seed(1)).int()
    rows = torch.tensor([3, 1])
    expected, found = logits.clone(), logits.to(DEVICE)
    sampling_reference.reference_mask(expected, rows, masks)
    sampling.mask(found, rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


def test_the_argmax_and_log_probabilities_are_those_of_the_references() -> None:
    logits = logits_of(5, 400, step=1.0)
    logits[1, 30] = torch.nan
    logits[2, :] = -torch.inf
    found = sampling.argmax(logits.to(DEVICE))
    tokens, peaks = sampling_reference.reference_argmax(logits)
    assert torch.equal(found.tokens.cpu(), tokens)
    torch.testing.assert_close(found.peaks.cpu(), peaks, rtol=0, atol=0, equal_nan=True)
    chosen = torch.tensor([0, 7, 399])
    by_kernels = logprobs.logprobs(logits[[0, 3, 4]].to(DEVICE), chosen.to(DEVICE), 9)
    for one, expected in zip(
        by_kernels, logprobs_reference.reference_logprobs(logits[[0, 3, 4]], chosen, 9), strict=True
    ):
        torch.testing.assert_close(one.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_warming_up_runs_every_kernel() -> None:
    Sampler().warm_up(50, DEVICE)


def test_arrays_arrive_in_one_buffer_each_of_them_aligned() -> None:
    arrays = [
        np.arange(3),
        np.zeros((4, 0)),
        np.linspace(0, 1, 5, dtype=np.float32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:],
    ]
    arrived = upload(arrays, DEVICE)
    for array, tensor in zip(arrays, arrived, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)
        assert tensor.data_ptr() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
