"""Sampling by the argmax of scores, in the simplest way: one row and one number at a time, in float64."""

import math

import numpy as np

_WORD = (1 << 32) - 1
_LONG = (1 << 64) - 1


def mixed(x: int) -> int:
    """SplitMix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)


def row_key(key: int, position: int) -> int:
    return mixed((key + (position + 1) * 0x9E3779B97F4A7C15) & _LONG)


def random_word(key: int, token: int) -> int:
    """The 64 random bits of a token in a row."""
    first, second = key & _WORD, key >> 32
    x = (token + first) & _WORD
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & _WORD
    x ^= second
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & _WORD
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _WORD
    high = x ^ (x >> 14)
    x = high ^ first
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return high << 32 | x ^ (x >> 16)


def noise(key: int, token: int) -> float:
    bits = random_word(key, token)
    # Both ends of (0, 1) are exact to the last bit.
    if bits < 1 << 63:
        return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-64))
    return -math.log(-math.log((_LONG - bits + 0.5) * 2.0**-64))


def noises(key: int, width: int) -> np.ndarray:
    return np.array([noise(key, token) for token in range(width)])


def kept_tokens(scaled: np.ndarray, *, top_k: int, top_p: float, min_p: float, slack: float = 0.0) -> np.ndarray:
    """The tokens within the filters of scaled logits. `slack`: a probability, added to the mass at which top-p
    cuts."""
    weights = np.exp(scaled.astype(np.float64))
    order = np.lexsort((np.arange(len(scaled)), -scaled))[:top_k]
    cdf = np.cumsum(weights[order])
    kept = len(order)
    if top_p < 1.0:
        kept = min(kept, 1 + int(np.searchsorted(cdf, top_p * cdf[-1] * (1 + slack))))
    return order[: min(kept, int((weights[order] >= min_p).sum()))]


def best_tokens(scaled: np.ndarray, kept: np.ndarray, noise: np.ndarray, tolerance: float = 0.0) -> set[int]:
    """The filtered tokens whose scores are within `tolerance` of the largest."""
    scores = scaled[kept].astype(np.float64) + noise[kept]
    return {int(token) for token in kept[scores >= scores.max() - tolerance]}
