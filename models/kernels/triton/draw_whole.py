"""A draw from what filters keep of a whole row, without ordering it, and what its tokens weigh. Used by `draw`.

Where a prefix of the order ends is found by bisection of its last token's key: a pass over the row for each bit. It is
for the few rows of which the likeliest thousand tokens do not tell.
"""

import triton
import triton.language as tl

from models.kernels.triton.counter_rng import share_of

_ONE = tl.constexpr(2.0**40)
_NEVER = tl.constexpr(0x7F800000)  # Key of minus infinity


@triton.jit
def key_of(logits, peak, temperature):
    """How far tokens are from the likeliest, as the bits of a float32: 0 for that, larger for less likely ones."""
    return tl.div_rn(logits - peak, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weight_of(key):
    """What a token weighs. # int32 -> int64"""
    return (tl.exp(-key.to(tl.float32, bitcast=True)) * _ONE).to(tl.int64)


@triton.jit
def needed_mass(top_p, mass):
    """The least whole number that is not less than a share of `mass`. # float64, int64 -> int64"""
    exact = top_p * mass.to(tl.float64)
    whole = exact.to(tl.int64)
    return tl.where(whole.to(tl.float64) < exact, whole + 1, whole)


@triton.jit
def _tally(logits, peak, temperature, vocab_size, key, TILE: tl.constexpr):
    """How many tokens of a row are as likely as `key` or likelier, and what they weigh. # int64, int64"""
    number, mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        keys = key_of(values, peak, temperature)
        counted = (keys <= key) & (ids < vocab_size)
        number += counted.to(tl.int32)
        mass += tl.where(counted, weight_of(keys), 0)
    return tl.sum(number, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit
def _find(logits, peak, temperature, vocab_size, number, mass, TILE: tl.constexpr):
    """The shortest prefix, by descending weight and equal ones by id, of so many tokens and of so much mass.

    Its last token's key, which of the tokens with that key it is, and the prefix's number of tokens and mass.
    """
    least, most = tl.full([], 0, tl.int32), tl.full([], _NEVER, tl.int32)
    while least < most:
        middle = least + (most - least) // 2
        number_to, mass_to = _tally(logits, peak, temperature, vocab_size, middle, TILE)
        is_reached = (number_to >= number) & (mass_to >= mass)
        most = tl.where(is_reached, middle, most)
        least = tl.where(is_reached, least, middle + 1)
    number_before, mass_before = _tally(logits, peak, temperature, vocab_size, least - 1, TILE)
    weight = weight_of(least)
    by_mass = (mass - mass_before + tl.maximum(weight, 1) - 1) // tl.maximum(weight, 1)
    rank = tl.maximum(tl.maximum(number - number_before, by_mass), 1)
    return least, rank, number_before + rank, mass_before + rank * weight


@triton.jit
def draw_from_whole(logits, peak, temperature, vocab_size, top_k, top_p, least_likely, bits, TILE: tl.constexpr):
    """The token that the filters and the number choose, of one row. # -> int64"""
    by_min_p, _ = _tally(logits, peak, temperature, vocab_size, least_likely, TILE)
    key, rank = tl.full([], 0, tl.int32), tl.full([], 1, tl.int64)
    number, mass, kept = top_k, tl.full([], 0, tl.int64), tl.minimum(top_k, by_min_p)
    # What top-k leaves; of that, what top-p does; what is kept in the end; and of that, what the number says.
    for step in range(4):
        key, rank, number_to, mass_to = _find(logits, peak, temperature, vocab_size, number, mass, TILE)
        if step == 0:
            number, mass = number * 0, needed_mass(top_p, mass_to)
        elif step == 1:
            number, mass = tl.where(top_p < 1.0, tl.minimum(kept, number_to), kept), mass * 0
        else:
            number, mass = number * 0, share_of(bits, mass_to) + 1
    token = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        is_equal = (key_of(values, peak, temperature) == key) & (ids < vocab_size)
        ranks = seen + tl.cumsum(is_equal.to(tl.int64), 0)
        token += tl.sum(tl.where(is_equal & (ranks == rank), ids, 0).to(tl.int64), 0)
        seen += tl.sum(is_equal.to(tl.int64), 0)
    return token
