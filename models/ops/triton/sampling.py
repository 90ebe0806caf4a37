"""Sampling from logits on the device: temperature, top-k, top-p and min-p, and Gumbel noise, no host transfer.

A token is the argmax of scaled logits plus noise among those that the filters keep. The noise is a function of (key,
position, token id), as `models.ops.counter_rng` defines it: the same bits, of which the logarithms are computed in
float32. For top-p, weights are integers, the argmax token's being 2^40, so that sums are exact in any order.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

# Noise: `models.ops.counter_rng` on the device.

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_HALF = tl.constexpr(0x80000000)
_EXCLUDED = tl.constexpr(-0x8000000000000000)  # Less than the rating of any token.


@triton.jit
def _mix(x):
    """SplitMix64's finaliser. # uint64"""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def row_key_of(key, position):
    """What, with a token id, determines the noise. # int64 -> uint64"""
    at = (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_GAMMA
    return _mix(key.to(tl.uint64, bitcast=True) + at)


@triton.jit
def random_words(row_key, ids):
    """Two random words of tokens. # uint64, int32 -> 2 x uint32"""
    first, second = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32, bitcast=True) + first
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x ^= second
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    high = x ^ (x >> 14)
    x = high ^ first
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return high, x ^ (x >> 16)


@triton.jit
def noise_of(row_key, ids):
    """Gumbel noise of tokens. # uint64, int32 -> float32"""
    high, low = random_words(row_key, ids)
    # How far v is from the nearer end of (0, 1), which the sign of the high word's bits decides.
    is_above = high >= _HALF
    whole = tl.where(is_above, high ^ 0xFFFFFFFF, high).to(tl.int32, bitcast=True).to(tl.float32)
    part = (tl.where(is_above, low ^ 0xFFFFFFFF, low) >> 8).to(tl.int32, bitcast=True).to(tl.float32)
    v = (whole + (part + 0.5) * (2.0**-24)) * (2.0**-32)
    # -log(1 - v) by its series where the logarithm of a number near 1 would lose bits.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * (0.2 + v * (1.0 / 6 + v * (1.0 / 7)))))))
    near_zero = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(tl.where(is_above, -tl.log(v), near_zero))


@triton.jit
def rated(scores, ids, is_kept):
    """Numbers in the order of scores, of equal ones the lower id the larger. # float32, int32 -> int64"""
    order = scores.to(tl.int32, bitcast=True)
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    return tl.where(is_kept, (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), _EXCLUDED)


@triton.jit
def rated_token(rating):
    """The token of a rating. # int64 -> int64"""
    return 0x7FFFFFFF - (rating & 0x7FFFFFFF)


# Sampling from all of a row without sorting it, for the few rows whose filters keep more than the top thousand tokens.
#
# The end of the kept prefix is found by bisection of its last token's key: one pass over the row for each bit.

_ONE = tl.constexpr(2.0**40)
_NEVER = tl.constexpr(0x7F800000)  # Key of minus infinity


@triton.jit
def key_of(logits, peak, temperature):
    """The distance of logits from the largest, over the temperature, as the bits of a float32; 0 for the largest."""
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
    """The number and the mass of a row's tokens whose key is at most `key`. # int64, int64"""
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
def draw_from_whole(logits, peak, temperature, vocab_size, top_k, top_p, max_gap, row_key, TILE: tl.constexpr):
    """The token with the largest score among those that the filters keep, of one row. # -> int64"""
    by_min_p, _ = _tally(logits, peak, temperature, vocab_size, max_gap, TILE)
    key, rank = tl.full([], 0, tl.int32), tl.full([], 1, tl.int64)
    number, mass, kept = top_k, tl.full([], 0, tl.int64), tl.minimum(top_k, by_min_p)
    # What top-k leaves; of that, what top-p does; and what is kept in the end.
    for step in range(3):
        key, rank, number_to, mass_to = _find(logits, peak, temperature, vocab_size, number, mass, TILE)
        if step == 0:
            number, mass = number * 0, needed_mass(top_p, mass_to)
        else:
            number, mass = tl.where(top_p < 1.0, tl.minimum(kept, number_to), kept), mass * 0
    best = tl.full([], _EXCLUDED, tl.int64)
    seen = tl.full([], 0, tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        keys = key_of(values, peak, temperature)
        is_equal = (keys == key) & (ids < vocab_size)
        ranks = seen + tl.cumsum(is_equal.to(tl.int64), 0)
        is_kept = ((keys < key) | (is_equal & (ranks <= rank))) & (ids < vocab_size)
        scores = noise_of(row_key, ids) - keys.to(tl.float32, bitcast=True)
        best = tl.maximum(best, tl.max(rated(scores, ids, is_kept), 0))
        seen += tl.sum(is_equal.to(tl.int64), 0)
    return rated_token(best)


NUM_COLUMNS = 8
ROW, TEMPERATURE, TOP_K, TOP_P, MAX_GAP, KEY, POSITION, IS_FILTERED = range(NUM_COLUMNS)
"""Columns of a draw, 64 bits each."""
_ROW, _TEMPERATURE, _TOP_K, _TOP_P = (tl.constexpr(column) for column in (ROW, TEMPERATURE, TOP_K, TOP_P))
_MAX_GAP, _KEY, _POSITION = (tl.constexpr(column) for column in (MAX_GAP, KEY, POSITION))
_IS_FILTERED = tl.constexpr(IS_FILTERED)

BUCKETS = 512
_PER_UNIT = tl.constexpr(16.0)  # Buckets; the last begins where tokens weigh nothing, at e^-31.9.


@triton.jit
def _bucket_of(key, BUCKETS: tl.constexpr):
    return tl.minimum(key.to(tl.float32, bitcast=True) * _PER_UNIT, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _temperature_of(columns, num_draws, draw):
    return tl.load(columns + _TEMPERATURE * num_draws + draw).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _row_key(columns, num_draws, draw):
    key, position = tl.load(columns + _KEY * num_draws + draw), tl.load(columns + _POSITION * num_draws + draw)
    return row_key_of(key, position)


@triton.jit
def is_finite(peak):
    """False for NaN too."""
    return tl.abs(peak) < float("inf")


@jit(do_not_specialize=["num_draws"])
def weigh_kernel(
    logits,  # [N, V] float32
    peaks,  # [N] float32
    columns,  # [NUM_COLUMNS, num_draws] int64
    parts,  # [num_draws, tiles] int64, what a tile weighs of a filtered row; of another its best rating
    counts,  # [num_draws, BUCKETS] int32, zeros: number of tokens by distance from the largest logit
    stride,
    vocab_size,
    num_draws,
    BUCKETS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of one row. Grid: (tiles, draws)."""
    draw = tl.program_id(1)
    row = tl.load(columns + _ROW * num_draws + draw)
    peak = tl.load(peaks + row)
    if not is_finite(peak):
        return
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    key = key_of(values, peak, _temperature_of(columns, num_draws, draw))
    part = parts + draw.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if tl.load(columns + _IS_FILTERED * num_draws + draw) != 0:
        tl.store(part, tl.sum(weight_of(key), 0))
        found = tl.histogram(_bucket_of(key, BUCKETS), BUCKETS)
        buckets = tl.arange(0, BUCKETS)
        # The last bucket's are never looked at: tokens that weigh nothing.
        counted = (found > 0) & (buckets < BUCKETS - 1)
        tl.atomic_add(counts + draw * BUCKETS + buckets, found, mask=counted, sem="relaxed")
    else:
        row_key = _row_key(columns, num_draws, draw)
        scores = noise_of(row_key, ids) - key.to(tl.float32, bitcast=True)
        tl.store(part, tl.max(rated(scores, ids, ids < vocab_size), 0))


@triton.jit
def gathered_buckets(counts, draw, BUCKETS: tl.constexpr, ROOM: tl.constexpr):
    """How many of the first buckets have room together, and how many tokens they hold."""
    buckets = tl.arange(0, BUCKETS)
    running = tl.cumsum(tl.load(counts + draw * BUCKETS + buckets), 0)
    fits = (running <= ROOM) & (buckets < BUCKETS - 1)
    return tl.sum(fits.to(tl.int32), 0), tl.max(tl.where(fits, running, 0), 0)


@jit(do_not_specialize=["num_draws"])
def gather_kernel(
    logits,
    peaks,
    columns,
    counts,  # [num_draws, BUCKETS] int32
    candidates,  # [num_draws, ROOM] int64, key and id of the tokens with the largest logits
    found,  # [num_draws] int32, zeros
    stride,
    vocab_size,
    num_draws,
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Appends a tile's tokens with the largest logits to its row's candidates, unordered. Grid: (tiles, draws)."""
    draw = tl.program_id(1)
    row = tl.load(columns + _ROW * num_draws + draw)
    peak = tl.load(peaks + row)
    if (tl.load(columns + _IS_FILTERED * num_draws + draw) == 0) | (not is_finite(peak)):
        return
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    key = key_of(values, peak, _temperature_of(columns, num_draws, draw))
    taken_buckets, _ = gathered_buckets(counts, draw, BUCKETS, ROOM)
    is_taken = _bucket_of(key, BUCKETS) < taken_buckets
    taken = is_taken.to(tl.int32)
    number = tl.sum(taken, 0)
    if number > 0:
        first = tl.atomic_add(found + draw, number, sem="relaxed")
        at = candidates + draw.to(tl.int64) * ROOM + first + tl.cumsum(taken, 0) - taken
        tl.store(at, (key.to(tl.int64) << 32) | ids, mask=is_taken)


@triton.jit
def _draw_from_candidates(candidates, held, top_k, top_p, max_gap, total, row_key, is_all, ROOM: tl.constexpr):
    """The token with the largest score that the filters keep; -1 where more than the candidates would be kept."""
    ranks = tl.arange(0, ROOM)
    # The least likely of all fill the rest: they are last in order, and weigh nothing.
    entries = tl.load(candidates + ranks, mask=ranks < held, other=0x7F800000FFFFFFFF)
    entries = tl.sort(entries)
    keys = (entries >> 32).to(tl.int32)
    running = tl.cumsum(weight_of(keys), 0)
    # Top-p is a share of what top-k leaves: of the whole distribution where it leaves everything.
    mass = tl.where((top_k <= held) | is_all, tl.max(tl.where(ranks < top_k, running, 0), 0), total)
    by_p = 1 + tl.sum((running < needed_mass(top_p, mass)).to(tl.int64), 0)
    by_min_p = tl.sum(((keys <= max_gap) & (ranks < held)).to(tl.int64), 0)
    by_min_p = tl.where(by_min_p == held, top_k, by_min_p)
    kept = tl.minimum(tl.minimum(top_k, by_min_p), tl.where(top_p < 1.0, by_p, top_k))
    ids = (entries & 0x7FFFFFFF).to(tl.int32)
    scores = noise_of(row_key, ids) - keys.to(tl.float32, bitcast=True)
    token = rated_token(tl.max(rated(scores, ids, (ranks < kept) & (ranks < held)), 0))
    return tl.where((kept <= held) | is_all, token, -1)


@jit(do_not_specialize=["num_draws"])
def draw_kernel(
    logits,
    peaks,
    columns,
    parts,  # [num_draws, tiles] int64
    counts,  # [num_draws, BUCKETS] int32
    candidates,  # [num_draws, ROOM] int64
    tokens,  # [N] int64, replaced for rows that are drawn
    stride,
    vocab_size,
    num_draws,
    tiles,
    TILES: tl.constexpr,  # `tiles` filled up to a power of two
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row's token. Grid: (draws,)."""
    draw = tl.program_id(0)
    row = tl.load(columns + _ROW * num_draws + draw)
    peak = tl.load(peaks + row)
    if not is_finite(peak):
        return
    lanes = tl.arange(0, TILES)
    of_draw = parts + draw.to(tl.int64) * tiles + lanes
    is_filtered = False
    if HAS_FILTERED:
        is_filtered = tl.load(columns + _IS_FILTERED * num_draws + draw) != 0
    if is_filtered:
        row_key = _row_key(columns, num_draws, draw)
        top_k = tl.load(columns + _TOP_K * num_draws + draw)
        top_p = tl.load(columns + _TOP_P * num_draws + draw).to(tl.float64, bitcast=True)
        max_gap = tl.load(columns + _MAX_GAP * num_draws + draw).to(tl.int32)
        buckets, held = gathered_buckets(counts, draw, BUCKETS, ROOM)
        is_all = buckets == BUCKETS - 1  # Of the tokens that weigh anything.
        total = tl.sum(tl.load(of_draw, mask=lanes < tiles, other=0), 0)
        found = candidates + draw.to(tl.int64) * ROOM
        held = held.to(tl.int64)
        token = _draw_from_candidates(found, held, top_k, top_p, max_gap, total, row_key, is_all, ROOM)
        if token < 0:
            temperature = _temperature_of(columns, num_draws, draw)
            of_row = logits + row * stride
            token = draw_from_whole(of_row, peak, temperature, vocab_size, top_k, top_p, max_gap, row_key, TILE)
    else:
        token = rated_token(tl.max(tl.load(of_draw, mask=lanes < tiles, other=_EXCLUDED), 0))
    tl.store(tokens + row, token)


def pack_columns(
    *,
    rows: npt.NDArray[np.int64],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    key: npt.NDArray[np.uint64],
    position: npt.NDArray[np.int64],
    filtered: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """The columns that `draw` reads, of rows of logits. # [D] each -> [NUM_COLUMNS, D]"""
    columns = np.empty((NUM_COLUMNS, len(rows)), dtype=np.int64)
    columns[ROW] = rows
    columns[TEMPERATURE] = temperature.view(np.int32)
    columns[TOP_K] = top_k
    columns[TOP_P] = top_p.view(np.int64)
    columns[MAX_GAP] = _max_logit_gap(min_p)
    columns[KEY] = key.view(np.int64)
    columns[POSITION] = position
    columns[IS_FILTERED] = filtered
    return columns


def _max_logit_gap(min_p: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """The bits of the largest float32 that is at most `-log(min_p)`: min-p excludes tokens further from the peak.

    # [D] -> [D]
    """
    with np.errstate(divide="ignore"):
        exact = np.abs(np.log(min_p))
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest).view(np.int32)


def draw(
    logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, columns: torch.Tensor, *, has_filtered: bool
) -> None:
    """Replaces the tokens of rows that are drawn. # [N, V] float32, [N] float32, [N] int64, [NUM_COLUMNS, D] int64

    `columns` by row: `TEMPERATURE` the bits of a float32, `TOP_K` 1 to V, `TOP_P` the bits of a float64,
    `MAX_GAP` those of the largest float32 that is not more than `-log(min_p)`, `KEY` and `POSITION`
    those of the noise. Rows whose peak is not finite keep their tokens. `has_filtered`: whether any row `IS_FILTERED`.
    """
    num_draws, vocab_size = columns.shape[1], logits.shape[1]
    pieces, choice = launch_of("weigh", logits.device), launch_of("draw", logits.device)
    tile, room = pieces.blocks["TILE"], choice.blocks["ROOM"]
    tiles = cdiv(vocab_size, tile)
    parts = logits.new_empty(num_draws * tiles, dtype=torch.int64)
    # Of the buckets, and then of each row's candidates.
    counts = logits.new_zeros(num_draws * (BUCKETS + 1), dtype=torch.int32)
    candidates = logits.new_empty(num_draws * room if has_filtered else 1, dtype=torch.int64)
    of_logits = (logits, peaks, columns)
    sizes = (logits.stride(0), vocab_size, num_draws)
    weigh_kernel[(tiles, num_draws)](*of_logits, parts, counts, *sizes, BUCKETS=BUCKETS, **pieces.keywords)
    if has_filtered:
        gather_kernel[(tiles, num_draws)](
            *of_logits,
            counts,
            candidates,
            counts[num_draws * BUCKETS :],
            *sizes,
            BUCKETS=BUCKETS,
            ROOM=room,
            **pieces.keywords,
        )
    draw_kernel[(num_draws,)](
        *of_logits,
        parts,
        counts,
        candidates,
        tokens,
        *sizes,
        tiles,
        TILES=next_power_of_2(tiles),
        BUCKETS=BUCKETS,
        HAS_FILTERED=has_filtered,
        **choice.keywords,
    )
