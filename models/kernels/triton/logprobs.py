"""Log probabilities of given tokens, their ranks, and the likeliest tokens. Called by the device's sampler.

Two passes: tiles of a row each find their own best, and one program puts a row's tiles together in their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.triton.sampling import id_of, order_of

MAX_LIKELIEST = 32
"""Likeliest tokens that the kernels find; a search for more takes a pass over the tile for each."""
_NOTHING = tl.constexpr(-(2**63))


class Logprobs(NamedTuple):
    """Of R rows."""

    chosen: torch.Tensor  # [R] float32, the log probability of the row's token
    ranks: torch.Tensor  # [R] int64, from 1; equal tokens rank by id
    likeliest_ids: torch.Tensor  # [R, count] int64
    likeliest: torch.Tensor  # [R, count] float32


@triton.jit
def _value_of(order):
    """The value that `order_of` was given."""
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def logprobs_tile_kernel(
    logits,  # [R, V] float32
    token_ids,  # [R] int64
    peaks,  # [R, tiles] float32
    sums,  # [R, tiles] float32, of what the tile weighs beside its peak
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
    place = row * tl.num_programs(1) + tl.program_id(1)
    peak = tl.max(values, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + place, shift)
    tl.store(sums + place, tl.sum(tl.exp(values - shift), 0))
    is_better = inside & ((values > own) | ((values == own) & (ids < token)))
    tl.store(better + place, tl.sum(is_better.to(tl.int32), 0))
    order = tl.where(inside, order_of(values, ids), _NOTHING)
    for nth in range(count):
        first = tl.max(order, 0)
        tl.store(best + place * count + nth, first)
        order = tl.where(order == first, _NOTHING, order)


@triton.jit(do_not_specialize=["count"])
def logprobs_row_kernel(
    logits,
    token_ids,
    peaks,
    sums,
    better,
    best,
    chosen,  # [R] float32
    ranks,  # [R] int64
    likeliest_ids,  # [R, count] int64
    likeliest,  # [R, count] float32
    stride,
    tiles,
    count,
    TILES: tl.constexpr,  # `tiles` filled up to a power of two
    CANDIDATES: tl.constexpr,  # A power of two, `tiles * count` or more
):
    """One row. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILES)
    inside = places < tiles
    of_tiles = row * tiles + places
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
        tl.store(likeliest_ids + row * count + nth, id_of(first))
        tl.store(likeliest + row * count + nth, _value_of(first) - normaliser)
        order = tl.where(order == first, _NOTHING, order)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """`logits - log(sum(exp(logits)))` of each row's token and of the `count` likeliest, descending, equal ones by id.

    # [R, V] float32, [R] int64; `count` is 0 to the lesser of V and `MAX_LIKELIEST`
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
        CANDIDATES=next_power_of_2(tiles * MAX_LIKELIEST),  # One form for any count
        **launch_of("logprobs_row", logits.device).keywords,
    )
    return out


COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        variant="",
        target=target,
        config=config_of(kernel.__name__.removesuffix("_kernel"), target),
        signature={
            **dict.fromkeys(("logits", "peaks", "sums", "chosen", "likeliest"), "*fp32"),
            **dict.fromkeys(("token_ids", "best", "ranks", "likeliest_ids"), "*i64"),
            "better": "*i32",
            **dict.fromkeys(("stride", "vocab_size", "count", "tiles"), "i32"),
        },
        constexprs=constexprs,
        divisible=frozenset({"stride", "vocab_size"}),
        has_wide_loads=kernel is logprobs_tile_kernel,
    )
    for target in TARGETS.values()
    for kernel, constexprs in (
        (logprobs_tile_kernel, {}),
        (logprobs_row_kernel, {"TILES": 64, "CANDIDATES": 2048}),
    )
)
