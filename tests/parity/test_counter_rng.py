"""The generator of noise: equal in NumPy, torch and a plain reference, and random in each of its arguments."""

import math

import numpy as np
import pytest
import torch

from models.ops.counter_rng import (
    approximate_noise,
    gumbel_noise,
    random_words,
    request_key,
    row_keys,
    server_key,
)
from tests.parity.gumbel_reference import noise, random_word, row_key


def is_uniform(numbers: np.ndarray) -> bool:
    """Pearson's chi-square test of 100 bins at the 0.1 % level, whose quantile for 99 degrees of freedom is 148.2."""
    counts, expected = np.histogram(numbers, bins=100, range=(0, 1))[0], len(numbers) / 100
    return float(((counts - expected) ** 2 / expected).sum()) < 148.2


def test_random_bits_are_those_of_the_reference():
    rng = np.random.default_rng(1)
    keys, positions = rng.integers(1 << 63, size=50).astype(np.uint64) * 2 + 1, rng.integers(1 << 17, size=50)
    tokens = rng.integers(1 << 18, size=50)
    made = row_keys(keys, positions)
    assert made.tolist() == [row_key(int(key), int(at)) for key, at in zip(keys, positions, strict=True)]
    high, low = random_words(torch.from_numpy(made.view(np.int64)), torch.from_numpy(tokens))
    expected = [random_word(int(key), int(token)) for key, token in zip(made, tokens, strict=True)]
    assert (high * 2**32 + low).numpy().view(np.uint64).tolist() == expected
    found = gumbel_noise(torch.from_numpy(made.view(np.int64)), torch.from_numpy(tokens)).tolist()
    assert found == pytest.approx([noise(int(k), int(t)) for k, t in zip(made, tokens, strict=True)], abs=1e-13)


def along(what: str, count: int) -> np.ndarray:
    """Random numbers of neighbouring tokens, positions, seeds, or requests without seeds. # [count], in [0, 1)"""
    index = np.arange(count)
    match what:
        case "seeds":
            seeds = [request_key(seed) for seed in range(count)]
        case "requests":
            seeds = [server_key(7, request) for request in range(count)]
        case _:
            seeds = [request_key(5)] * count
    keys = row_keys(np.array(seeds, dtype=np.uint64), index if what == "positions" else np.full(count, 9))
    tokens = index if what == "tokens" else np.full(count, 77)
    high, low = random_words(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(tokens))
    return ((high.double() + low.double() * 2.0**-32) * 2.0**-32).numpy()


def test_random_numbers_are_uniform_over_tokens_positions_seeds_and_requests():
    streams = [along(what, 20_000) for what in ("tokens", "positions", "seeds", "requests")]
    for numbers in streams:
        assert 0.0 <= numbers.min() < numbers.max() < 1.0
        assert is_uniform(numbers)
        # The ends of the interval decide most samples, and low bits decide the ends.
        for end in (numbers * 100 % 1.0, numbers * 2.0**20 % 1.0, numbers * 2.0**40 % 1.0):
            assert is_uniform(end)
        for lag in (1, 2, 16, 64, 256):
            assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 0.03
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.03


def test_each_bit_of_seed_position_and_token_changes_half_of_the_bits():
    rng = np.random.default_rng(2)
    keys, positions = rng.integers(1 << 63, size=64).astype(np.uint64), rng.integers(1 << 17, size=64)
    tokens = rng.integers(1 << 17, size=64)

    def bits(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        words = random_words(torch.from_numpy(row_keys(keys, positions).view(np.int64)), torch.from_numpy(tokens))
        return np.unpackbits(np.stack([word.numpy().astype(np.uint32) for word in words], 1).view(np.uint8), axis=1)

    whole = bits(keys, positions, tokens)
    for bit in range(17):
        one = np.int64(1 << bit)
        for other in (
            (keys ^ np.uint64(one), positions, tokens),
            (keys, positions ^ one, tokens),
            (keys, positions, tokens ^ one),
        ):
            changed = (bits(*other) != whole).mean()
            assert 0.45 < changed < 0.55


def test_noise_follows_gumbels_distribution():
    keys = torch.from_numpy(row_keys(np.full(50, request_key(3), dtype=np.uint64), np.arange(50)).view(np.int64))
    found = gumbel_noise(keys[:, None], torch.arange(4000)[None]).flatten().numpy()
    # Its distribution function makes it uniform; its maximum over a row is Gumbel-distributed again, log(4000) higher.
    assert is_uniform(np.exp(-np.exp(-found)))
    maxima = found.reshape(50, 4000).max(1) - math.log(4000)
    assert abs(maxima.mean() - np.euler_gamma) < 4 * math.sqrt(math.pi**2 / 6 / 50)


def test_noise_of_high_words_alone_is_near_enough():
    keys = torch.from_numpy(row_keys(np.full(20, request_key(4), dtype=np.uint64), np.arange(20)).view(np.int64))
    ids = torch.arange(5000)
    high = random_words(keys[:, None], ids[None])[0].double()
    error = (approximate_noise(keys, 5000) - gumbel_noise(keys[:, None], ids[None])).abs()
    assert (error <= 1 / high + 2.0**-24 / (1 - high / 2.0**32) + 3e-6).all()
