"""Operations on logits in place, called by the device's sampler: penalties, biases, masks, argmax, log probabilities.

A history names a token as often as it occurs. Penalties that count once are applied by whichever entry finds the
token's bit unset, and all entries of a token write the same value: the result equals torch's, bit for bit.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

REPETITION, PRESENCE, FREQUENCY, BIAS = range(4)
_REPETITION, _PRESENCE, _FREQUENCY = tl.constexpr(REPETITION), tl.constexpr(PRESENCE), tl.constexpr(FREQUENCY)


@triton.jit
def order_of(values, ids):
    """Integers in the order of the values, of equal ones the first the largest; NaN is largest. # float32 -> int64"""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0.
    bits = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def id_of(order):
    """The id that `order_of` was given."""
    return 0xFFFFFFFF - (order & 0xFFFFFFFF)


@jit(do_not_specialize=["num_changes"])
def adjust_kernel(
    logits,  # [N, V] float32
    rows,  # [num_changes] int64
    ids,  # [num_changes] int64
    values,  # [num_changes] float32
    seen,  # [N, words] int32, zeros; any pointer where each entry counts
    num_changes,
    stride,
    words,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE changes to single logits. Grid: (tiles of changes,)."""
    entries = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = entries < num_changes
    row = tl.load(rows + entries, mask=inside, other=0)
    token = tl.load(ids + entries, mask=inside, other=0)
    value = tl.load(values + entries, mask=inside, other=0.0)
    at = logits + row * stride + token
    if KIND <= _PRESENCE:
        bit = tl.full([TILE], 1, tl.int32) << (token % 32).to(tl.int32)
        before = tl.atomic_or(seen + row * words + token // 32, bit, mask=inside, sem="relaxed")
        is_first = inside & ((before & bit) == 0)
        logit = tl.load(at, mask=is_first, other=0.0)
        if KIND == _REPETITION:
            changed = tl.where(logit > 0.0, tl.div_rn(logit, tl.where(inside, value, 1.0)), logit * value)
        else:
            changed = logit - value
        tl.store(at, changed, mask=is_first)
    else:
        tl.atomic_add(at, -value if KIND == _FREQUENCY else value, mask=inside, sem="relaxed")


def adjust(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int) -> None:
    """Changes single logits in place, a kind at a time. # [N, V], [num_changes] int64, int64, float32

    `REPETITION` divides positive logits by a penalty and multiplies others; `PRESENCE` subtracts: once a token of
    a row. `FREQUENCY` subtracts and `BIAS` adds for each entry; no token of a row may have more than one finite bias.
    """
    num_changes = len(ids)
    words = -(-logits.shape[1] // 32)
    seen = rows
    if kind <= PRESENCE:
        seen = torch.zeros(len(logits), words, dtype=torch.int32, device=logits.device)
    launch = launch_of("adjust", logits.device)
    adjust_kernel[(cdiv(num_changes, launch.blocks["TILE"]),)](
        logits, rows, ids, values, seen, num_changes, logits.stride(0), words, KIND=kind, **launch.keywords
    )


@jit
def mask_kernel(
    logits,  # [N, V] float32
    rows,  # [num_masks] int64
    masks,  # [num_masks, num_words] int32
    stride,
    mask_stride,
    num_words,
    vocab_size,
    WORDS: tl.constexpr,  # Of one program
):
    """A run of one mask: minus infinity where a bit is not set. Grid: (runs, masks)."""
    nth = tl.program_id(1)
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(masks + nth * mask_stride + words, mask=words < num_words, other=-1)
    lanes = tl.arange(0, 32)
    ids = words[:, None] * 32 + lanes[None, :]
    refused = ((bits[:, None] >> lanes[None, :]) & 1) == 0
    at = logits + tl.load(rows + nth) * stride + ids
    tl.store(at, tl.full([WORDS, 32], float("-inf"), tl.float32), mask=refused & (ids < vocab_size))


def mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Minus infinity for tokens whose bit is not set, in place. # [N, V], [masks] int64, [masks, V / 32] int32"""
    num_masks, num_words = masks.shape
    launch = launch_of("mask", logits.device)
    mask_kernel[(cdiv(num_words, launch.blocks["WORDS"]), num_masks)](
        logits, rows, masks, logits.stride(0), masks.stride(0), num_words, logits.shape[1], **launch.keywords
    )


@jit(do_not_specialize=["tiles"])
def argmax_tile_kernel(
    logits,  # [N, V] float32
    best,  # [N, tiles] int64, as order_of has it
    stride,
    vocab_size,
    tiles,
    TILE: tl.constexpr,
):
    """The first of the largest logits of one tile. Grid: (tiles, N).

    A row alone would otherwise be read by one program, of which one unit has the loads in flight.
    """
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    tl.store(best + row * tiles + tl.program_id(0), tl.max(order_of(values, ids), 0))


@jit(do_not_specialize=["tiles"])
def argmax_kernel(
    logits,  # [N, V] float32
    best,  # [N, tiles] int64, as order_of has it
    tokens,  # [N] int64
    peaks,  # [N] float32
    stride,
    tiles,
    TILES: tl.constexpr,  # A power of two, `tiles` or more
):
    """The argmax of one row, from those of its tiles. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, TILES)
    token = id_of(tl.max(tl.load(best + row * tiles + nth, mask=nth < tiles, other=-(2**63)), 0))
    tl.store(tokens + row, token)
    tl.store(peaks + row, tl.load(logits + row * stride + token))


class Argmax:
    """Tokens and the largest logits of N rows, in one buffer that is read at once."""

    __slots__ = ("both", "peaks", "tokens")

    def __init__(self, num_rows: int, device: torch.device) -> None:
        # Aligned to 16 bytes both, as the kernels are compiled for.
        width = num_rows + num_rows % 2
        self.both = torch.empty(2, width, dtype=torch.int64, device=device)
        """[2, N or one more]: tokens, and the words of the peaks, two to a word."""
        tokens, peaks = self.both.unbind()
        self.tokens = tokens if width == num_rows else tokens[:num_rows]  # [N] int64
        self.peaks = peaks.view(torch.float32)[:num_rows]  # [N] float32

    def read(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Both on the host, which waits for the device."""
        both = self.both.cpu().numpy()
        return both[0, : len(self.tokens)], both[1].view(np.float32)[: len(self.tokens)]


def argmax(logits: torch.Tensor) -> Argmax:
    """The argmax of each row, the first of equal logits, and its logit; a NaN counts as largest. # [N, V] float32"""
    num_rows, vocab_size = logits.shape
    found = Argmax(num_rows, logits.device)
    launch = launch_of("argmax_tile", logits.device)
    tiles = cdiv(vocab_size, launch.blocks["TILE"])
    best = found.tokens.new_empty(num_rows, tiles)
    argmax_tile_kernel[(tiles, num_rows)](logits, best, logits.stride(0), vocab_size, tiles, **launch.keywords)
    argmax_kernel[(num_rows,)](
        logits,
        best,
        found.tokens,
        found.peaks,
        logits.stride(0),
        tiles,
        TILES=next_power_of_2(tiles),
        **launch_of("argmax", logits.device).keywords,
    )
    return found


# Log probabilities of given tokens, their ranks, and the top-k tokens.
#
# Two passes: each tile of a row finds its own top-k, then one program merges a row's tiles in their order.

MAX_TOP_LOGPROBS = 32
"""Most top log probabilities that the kernels find; each takes a pass over the tile."""
_NOTHING = tl.constexpr(-(2**63))


class Logprobs(NamedTuple):
    """Of R rows."""

    chosen: torch.Tensor  # [R] float32, the log probability of the row's token
    ranks: torch.Tensor  # [R] int64, from 1; equal tokens rank by id
    top_ids: torch.Tensor  # [R, count] int64
    top_logprobs: torch.Tensor  # [R, count] float32


@triton.jit
def _value_of(order):
    """The value that `order_of` was given."""
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit(do_not_specialize=["count"])
def logprobs_tile_kernel(
    logits,  # [R, V] float32
    token_ids,  # [R] int64
    peaks,  # [R, tiles] float32
    sums,  # [R, tiles] float32, the weight of the tile relative to its peak
    better,  # [R, tiles] int32, tokens that rank before the row's
    best,  # [R, tiles, count] int64, as order_of has it
    stride,
    vocab_size,
    count,
    TILE: tl.constexpr,
):
    """A tile of one row, kept in registers. Grid: (R, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row)
    own = tl.load(logits + row * stride + token)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    values = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    tile_index = row * tl.num_programs(1) + tl.program_id(1)
    peak = tl.max(values, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + tile_index, shift)
    tl.store(sums + tile_index, tl.sum(tl.exp(values - shift), 0))
    is_better = inside & ((values > own) | ((values == own) & (ids < token)))
    tl.store(better + tile_index, tl.sum(is_better.to(tl.int32), 0))
    order = tl.where(inside, order_of(values, ids), _NOTHING)
    for nth in range(count):
        first = tl.max(order, 0)
        tl.store(best + tile_index * count + nth, first)
        order = tl.where(order == first, _NOTHING, order)


@jit(do_not_specialize=["count"])
def logprobs_row_kernel(
    logits,
    token_ids,
    peaks,
    sums,
    better,
    best,
    chosen,  # [R] float32
    ranks,  # [R] int64
    top_ids,  # [R, count] int64
    top_logprobs,  # [R, count] float32
    stride,
    tiles,
    count,
    TILES: tl.constexpr,  # `tiles` filled up to a power of two
    CANDIDATES: tl.constexpr,  # A power of two, `tiles * count` or more
):
    """One row. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    inside = lanes < tiles
    of_tiles = row * tiles + lanes
    shifts = tl.load(peaks + of_tiles, mask=inside, other=float("-inf"))
    highest = tl.max(shifts, 0)
    total = tl.sum(tl.load(sums + of_tiles, mask=inside, other=0.0) * tl.exp(shifts - highest), 0)
    normaliser = highest + tl.log(total)
    tl.store(chosen + row, tl.load(logits + row * stride + tl.load(token_ids + row)) - normaliser)
    tl.store(ranks + row, 1 + tl.sum(tl.load(better + of_tiles, mask=inside, other=0).to(tl.int64), 0))
    entries = tl.arange(0, CANDIDATES)
    order = tl.load(best + row * tiles * count + entries, mask=entries < tiles * count, other=_NOTHING)
    for nth in range(count):
        first = tl.max(order, 0)
        tl.store(top_ids + row * count + nth, id_of(first))
        tl.store(top_logprobs + row * count + nth, _value_of(first) - normaliser)
        order = tl.where(order == first, _NOTHING, order)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """`logits - log(sum(exp(logits)))` of each row's token and of its `count` largest logits.

    These are in descending order, equal ones by id.

    # [R, V] float32, [R] int64; `count` is 0 to the lesser of V and `MAX_TOP_LOGPROBS`
    """
    num_rows, vocab_size = logits.shape
    tile = launch_of("logprobs_tile", logits.device)
    tiles = cdiv(vocab_size, tile.blocks["TILE"])
    peaks, sums = logits.new_empty(num_rows, tiles), logits.new_empty(num_rows, tiles)
    better = logits.new_empty(num_rows, tiles, dtype=torch.int32)
    best = logits.new_empty(num_rows * tiles * count, dtype=torch.int64)
    out = Logprobs(
        logits.new_empty(num_rows),
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty(num_rows, count, dtype=torch.int64),
        logits.new_empty(num_rows, count),
    )
    stride = logits.stride(0)
    partial = (logits, token_ids, peaks, sums, better, best)
    logprobs_tile_kernel[(num_rows, tiles)](*partial, stride, vocab_size, count, **tile.keywords)
    logprobs_row_kernel[(num_rows,)](
        *partial,
        *out,
        stride,
        tiles,
        count,
        TILES=next_power_of_2(tiles),
        CANDIDATES=next_power_of_2(tiles * MAX_TOP_LOGPROBS),  # One form for any count
        **launch_of("logprobs_row", logits.device).keywords,
    )
    return out
