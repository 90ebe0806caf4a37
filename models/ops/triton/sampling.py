"""Sampling from logits on the device: temperature, top-k, top-p and min-p, one random number a row, no host transfer.

Weights are integers, the argmax token's being 2^40, so that sums are exact in any order. The random number inverts the
cumulative distribution over token ids, or over descending weights where filters keep a prefix of that order, which is
the rule of the torch sampler. A seed gives the same tokens as there, except where exponentials are rounded across the
edge of a token's interval.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2

# Random numbers: `models.ops.counter_rng` on the device, SplitMix64 (Steele, Lea and Flood, 2014).

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser. # uint64"""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def random_bits(key, position):
    """The number of (key, position), which is in [0, 1), times 2^64. # int64 -> uint64, the lowest 11 bits are 0"""
    at = (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN_GAMMA
    return (_mix(key.to(tl.uint64, bitcast=True) + at) >> 11) << 11


@triton.jit
def acceptance_number(key, position):
    """A number in [0, 1) for whether a draft is accepted, of a stream of its own. # int64 -> float64"""
    of_stream = _mix(key.to(tl.uint64, bitcast=True) ^ _GOLDEN_GAMMA).to(tl.int64, bitcast=True)
    return (random_bits(of_stream, position) >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def share_of(bits, total):
    """`bits / 2^64` of a whole number, rounded down. # uint64, int64 -> int64"""
    return tl.umulhi(bits, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


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
def draw_from_whole(logits, peak, temperature, vocab_size, top_k, top_p, max_gap, bits, TILE: tl.constexpr):
    """The token that the filters and the number choose, of one row. # -> int64"""
    by_min_p, _ = _tally(logits, peak, temperature, vocab_size, max_gap, TILE)
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


NUM_COLUMNS = 8
ROW, TEMPERATURE, TOP_K, TOP_P, MAX_GAP, KEY, POSITION, IS_FILTERED = range(NUM_COLUMNS)
"""Columns of a draw, 64 bits each."""
_ROW, _TEMPERATURE, _TOP_K, _TOP_P = (tl.constexpr(column) for column in (ROW, TEMPERATURE, TOP_K, TOP_P))
_MAX_GAP, _KEY, _POSITION = (tl.constexpr(column) for column in (MAX_GAP, KEY, POSITION))
_IS_FILTERED = tl.constexpr(IS_FILTERED)

RUN = 256
"""Tokens whose weights are added up before a draw looks for the run it falls into."""
BUCKETS = 512
_PER_UNIT = tl.constexpr(16.0)  # Buckets; the last begins where tokens weigh nothing, at e^-31.9.


@triton.jit
def _bucket_of(key, BUCKETS: tl.constexpr):
    return tl.minimum(key.to(tl.float32, bitcast=True) * _PER_UNIT, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _temperature_of(columns, num_draws, draw):
    return tl.load(columns + _TEMPERATURE * num_draws + draw).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(peak):
    """False for NaN too."""
    return tl.abs(peak) < float("inf")


@triton.jit(do_not_specialize=["num_draws"])
def weigh_kernel(
    logits,  # [N, V] float32
    peaks,  # [N] float32
    columns,  # [NUM_COLUMNS, num_draws] int64
    masses,  # [num_draws, runs] int64, what each RUN of tokens weighs
    counts,  # [num_draws, BUCKETS] int32, zeros: number of tokens by distance from the largest logit
    stride,
    vocab_size,
    num_draws,
    RUN: tl.constexpr,
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
    of_runs = tl.sum(tl.reshape(weight_of(key), [TILE // RUN, RUN]), 1)
    runs = tl.num_programs(0) * (TILE // RUN)
    first_run = draw.to(tl.int64) * runs + tl.program_id(0) * (TILE // RUN)
    tl.store(masses + first_run + tl.arange(0, TILE // RUN), of_runs)
    if tl.load(columns + _IS_FILTERED * num_draws + draw) != 0:
        found = tl.histogram(_bucket_of(key, BUCKETS), BUCKETS)
        buckets = tl.arange(0, BUCKETS)
        # The last bucket's are never looked at: tokens that weigh nothing.
        counted = (found > 0) & (buckets < BUCKETS - 1)
        tl.atomic_add(counts + draw * BUCKETS + buckets, found, mask=counted, sem="relaxed")


@triton.jit
def gathered_buckets(counts, draw, BUCKETS: tl.constexpr, ROOM: tl.constexpr):
    """How many of the first buckets have room together, and how many tokens they hold."""
    buckets = tl.arange(0, BUCKETS)
    running = tl.cumsum(tl.load(counts + draw * BUCKETS + buckets), 0)
    fits = (running <= ROOM) & (buckets < BUCKETS - 1)
    return tl.sum(fits.to(tl.int32), 0), tl.max(tl.where(fits, running, 0), 0)


@triton.jit(do_not_specialize=["num_draws"])
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
def _draw_by_id(logits, masses, peak, temperature, runs, vocab_size, bits, RUN: tl.constexpr, RUNS: tl.constexpr):
    """Finds the run into which the number falls, and then the token in it. `logits` are the row's."""
    places = tl.arange(0, RUNS)
    running = tl.cumsum(tl.load(masses + places, mask=places < runs, other=0), 0)
    target = share_of(bits, tl.max(running, 0))
    run = tl.sum((running <= target).to(tl.int32), 0)
    below = tl.max(tl.where(running <= target, running, 0), 0)
    ids = run * RUN + tl.arange(0, RUN)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = weight_of(key_of(values, peak, temperature))
    is_passed = (weights > 0) & (tl.cumsum(weights, 0) + below > target)
    return tl.min(tl.where(is_passed, ids, vocab_size - 1), 0).to(tl.int64)


@triton.jit
def _draw_from_candidates(candidates, held, top_k, top_p, max_gap, total, bits, is_all, ROOM: tl.constexpr):
    """The token that the filters and the number choose; -1 where more than the candidates would be kept."""
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
    target = share_of(bits, tl.max(tl.where(ranks < kept, running, 0), 0))
    drawn = tl.sum((running <= target).to(tl.int32), 0)
    token = tl.sum(tl.where(ranks == drawn, entries & 0xFFFFFFFF, 0), 0)
    return tl.where((kept <= held) | is_all, token, -1)


@triton.jit(do_not_specialize=["num_draws"])
def draw_kernel(
    logits,
    peaks,
    columns,
    masses,  # [num_draws, runs] int64
    counts,  # [num_draws, BUCKETS] int32
    candidates,  # [num_draws, ROOM] int64
    tokens,  # [N] int64, replaced for rows that are drawn
    stride,
    vocab_size,
    num_draws,
    runs,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,  # `runs` filled up to a power of two
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
    temperature = _temperature_of(columns, num_draws, draw)
    of_row = logits + row * stride
    bits = random_bits(tl.load(columns + _KEY * num_draws + draw), tl.load(columns + _POSITION * num_draws + draw))
    of_draw = masses + draw.to(tl.int64) * runs
    is_filtered = False
    if HAS_FILTERED:
        is_filtered = tl.load(columns + _IS_FILTERED * num_draws + draw) != 0
    if is_filtered:
        top_k = tl.load(columns + _TOP_K * num_draws + draw)
        top_p = tl.load(columns + _TOP_P * num_draws + draw).to(tl.float64, bitcast=True)
        max_gap = tl.load(columns + _MAX_GAP * num_draws + draw).to(tl.int32)
        buckets, held = gathered_buckets(counts, draw, BUCKETS, ROOM)
        is_all = buckets == BUCKETS - 1  # Of the tokens that weigh anything.
        places = tl.arange(0, RUNS)
        total = tl.sum(tl.load(of_draw + places, mask=places < runs, other=0), 0)
        found = candidates + draw.to(tl.int64) * ROOM
        held = held.to(tl.int64)
        token = _draw_from_candidates(found, held, top_k, top_p, max_gap, total, bits, is_all, ROOM)
        if token < 0:
            token = draw_from_whole(of_row, peak, temperature, vocab_size, top_k, top_p, max_gap, bits, TILE)
    else:
        token = _draw_by_id(of_row, of_draw, peak, temperature, runs, vocab_size, bits, RUN, RUNS)
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
    `MAX_GAP` those of the largest float32 that is not more than `-log(min_p)`, `KEY` and `POSITION` the
    generator's. Rows whose peak is not finite keep their tokens. `has_filtered`: whether any row `IS_FILTERED`.
    """
    num_draws, vocab_size = columns.shape[1], logits.shape[1]
    pieces, choice = launch_of("weigh", logits.device), launch_of("draw", logits.device)
    tile, room = pieces.blocks["TILE"], choice.blocks["ROOM"]
    tiles = cdiv(vocab_size, tile)
    runs = tiles * (tile // RUN)
    masses = logits.new_empty(num_draws * runs, dtype=torch.int64)
    # Of the buckets, and then of each row's candidates.
    counts = logits.new_zeros(num_draws * (BUCKETS + 1), dtype=torch.int32)
    candidates = logits.new_empty(num_draws * room if has_filtered else 1, dtype=torch.int64)
    of_logits = (logits, peaks, columns)
    sizes = (logits.stride(0), vocab_size, num_draws)
    weigh_kernel[(tiles, num_draws)](*of_logits, masses, counts, *sizes, RUN=RUN, BUCKETS=BUCKETS, **pieces.keywords)
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
        masses,
        counts,
        candidates,
        tokens,
        *sizes,
        runs,
        RUN=RUN,
        RUNS=next_power_of_2(runs),
        BUCKETS=BUCKETS,
        HAS_FILTERED=has_filtered,
        **choice.keywords,
    )
