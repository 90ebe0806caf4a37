"""A gated delta net between its projections, called by `GatedDeltaNet`.

In order: the host's plan of a step and the launchers' composition (`remember`, `gated_norm`), the short convolution,
the delta rule for one token of each sequence and the norm after it, and the delta rule over spans, chunk by chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of these kernels
from models.ops.memory import upload
from models.ops.triton.configs import WHOLE, Target, launch_of, target_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

# The short causal convolution, over each row's tokens and the last inputs of its slot.
#
# Channels are read where the projection left them, a key head's queries, keys and values side by side, and are
# written in the order of the convolution's weight: all queries, all keys, all values.


@triton.jit
def _channels(head, columns, num_key_heads, KEY: tl.constexpr, VALUES: tl.constexpr):
    """The convolution's channels of a key head's columns. # [COLUMNS]"""
    of_keys = tl.where(columns < KEY, head * KEY + columns, num_key_heads * KEY + head * KEY + columns - KEY)
    return tl.where(columns < 2 * KEY, of_keys, 2 * num_key_heads * KEY + head * VALUES + columns - 2 * KEY)


@triton.jit
def token_range(starts, row, HAS_STARTS: tl.constexpr):
    """The tokens of a row that goes token by token: one, or those between its starts. # first, past"""
    first, past = row, row + 1
    if HAS_STARTS:
        first, past = tl.load(starts + row), tl.load(starts + row + 1)
    return first, past


@jit
def delta_conv_step_kernel(
    projected,  # [T, num_key_heads * (2 * KEY + 2 * VALUES)]
    weight,  # [channels, 1, TAPS]
    inputs,  # [slots, channels, TAPS - 1]
    slots,  # [rows] int64, -1 for a row that is none
    starts,  # [rows + 1] int32, first token of each row
    after,  # [T] int64, slot of the inputs after each token, -1: it is left out
    out,  # [T, channels]
    stride,  # Of projected
    slot_stride,  # Of inputs
    num_key_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,  # A key head's value heads' dimensions together
    COLUMNS: tl.constexpr,  # 2 * KEY + VALUES, filled up to a power of two
    TAPS: tl.constexpr,
    HAS_STARTS: tl.constexpr,  # Whether rows verify drafts. If not, each has one token, and `after` is `slots`
):
    """The channels of one key head for a row's tokens, one by one. Grid: (rows, key heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < 2 * KEY + VALUES
    channels = _channels(head, columns, num_key_heads, KEY, VALUES)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    first, past = token_range(starts, row, HAS_STARTS)
    for index in range(past - first):
        token = first + index
        to = tl.load(after + token)
        if to >= 0:
            before = inputs + slot * slot_stride + channels * (TAPS - 1)
            kept = inputs + to * slot_stride + channels * (TAPS - 1)
            at = projected + token.to(tl.int64) * stride + head * (2 * KEY + 2 * VALUES) + columns
            summed = tl.zeros([COLUMNS], tl.float32)
            for tap in tl.static_range(TAPS):
                if tap < TAPS - 1:
                    x = tl.load(before + tap, mask=exists, other=0.0).to(projected.dtype.element_ty)
                else:
                    x = tl.load(at, mask=exists, other=0.0)
                if tap > 0:
                    tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
                    tl.store(kept + tap - 1, x.to(inputs.dtype.element_ty), mask=exists)
                share = tl.load(weight + channels * TAPS + tap, mask=exists, other=0.0)
                summed += x.to(tl.float32) * share.to(tl.float32)
            summed = summed * tl.sigmoid(summed)
            tl.store(out + token.to(tl.int64) * num_channels + channels, summed.to(out.dtype.element_ty), mask=exists)
            slot = to
            tl.debug_barrier()  # The row's next token reads what other threads have stored.
        else:
            tl.store(
                out + token.to(tl.int64) * num_channels + channels, tl.zeros([COLUMNS], out.dtype.element_ty), exists
            )


# What differs from step to step; the slots of spans may begin anywhere among those of a step.
@jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["slots"])
def delta_conv_kernel(
    projected,  # [T, num_key_heads * (2 * KEY + 2 * VALUES)]
    weight,  # [channels, 1, TAPS]
    inputs,  # [slots, channels, TAPS - 1], what came before
    slots,  # [rows] int64, -1 for a row that is none
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    token_rows,  # [T - first_token] int32
    out,  # [T, channels]
    first_token,  # Of the rows
    stride,  # Of projected
    slot_stride,  # Of inputs
    num_key_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,  # A key head's value heads' dimensions together
    COLUMNS: tl.constexpr,  # 2 * KEY + VALUES, filled up to a power of two
    TAPS: tl.constexpr,
):
    """The channels of one key head for one token. Grid: (tokens of the rows, key heads)."""
    token, head = first_token + tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < 2 * KEY + VALUES
    channels = _channels(head, columns, num_key_heads, KEY, VALUES)
    row = tl.load(token_rows + tl.program_id(0))
    start, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 3)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    before = inputs + slot * slot_stride + channels * (TAPS - 1)
    at = projected + token.to(tl.int64) * stride + head * (2 * KEY + 2 * VALUES) + columns
    position = token - start  # Among its row's tokens
    summed = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        # An input of this step, or one of the last of the steps before.
        is_here = position >= TAPS - 1 - tap
        x = tl.load(at - (TAPS - 1 - tap) * stride, mask=exists & is_here, other=0.0)
        if tap < TAPS - 1:
            was = exists & (is_here == 0) & (is_new == 0)
            x = tl.where(is_here, x, tl.load(before + position + tap, mask=was, other=0.0).to(x.dtype))
        share = tl.load(weight + channels * TAPS + tap, mask=exists, other=0.0)
        summed += x.to(tl.float32) * share.to(tl.float32)
    summed = summed * tl.sigmoid(summed)
    tl.store(out + token.to(tl.int64) * num_channels + channels, summed.to(out.dtype.element_ty), mask=exists)


@jit(do_not_specialize_on_alignment=["slots"])
def keep_inputs_kernel(
    projected,  # As above
    inputs,
    slots,
    spans,
    stride,
    slot_stride,
    num_key_heads,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """A row's last inputs into its slot, once every token was convolved. Grid: (rows, key heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < 2 * KEY + VALUES
    channels = _channels(head, columns, num_key_heads, KEY, VALUES)
    start, count, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 1), tl.load(spans + row * 4 + 3)
    at = projected + start.to(tl.int64) * stride + head * (2 * KEY + 2 * VALUES) + columns
    before = inputs + tl.load(slots + row) * slot_stride + channels * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):
        position = count - (TAPS - 1) + tap
        # A row of few tokens keeps some of the inputs before them; they lie behind where this tap's is written.
        x = tl.load(at + position.to(tl.int64) * stride, mask=exists & (position >= 0), other=0.0)
        was = tl.load(before + count + tap, mask=exists & (position < 0) & (is_new == 0), other=0.0)
        tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
        tl.store(before + tap, tl.where(position >= 0, x.to(was.dtype), was), mask=exists)


def delta_conv(
    projected: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    spans: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    key_dim: int,
    key_heads: int,
    first_token: int = 0,
    by_token: "ByToken | None" = None,
) -> None:
    """`silu` of the convolution of some rows' tokens, to their rows of `out`; `inputs` are brought up to date.

    # projected [T, key_heads * (2 * key_dim + 2 * values)], weight [channels, 1, taps], out [T, channels],
    # inputs [slots, channels, taps - 1], slots [rows] int64

    `spans`: the rows as `gated_delta_span.delta_spans` has them, and [T - first_token] int32, the row of each token
    from `first_token` on. None: the rows go token by token, as `by_token` says, or have one token each.
    """
    num_channels = out.shape[1]
    values = num_channels // key_heads - 2 * key_dim
    launch = launch_of("delta_conv", projected.device)
    shape = {
        "KEY": key_dim,
        "VALUES": values,
        "COLUMNS": next_power_of_2(2 * key_dim + values),
        "TAPS": weight.shape[-1],
    }
    if spans is None:
        starts, after = (slots, slots) if by_token is None else by_token
        delta_conv_step_kernel[(len(slots), key_heads)](
            projected,
            weight,
            inputs,
            slots,
            starts,
            after,
            out,
            projected.stride(0),
            inputs.stride(0),
            key_heads,
            num_channels,
            **shape,
            HAS_STARTS=by_token is not None,
            **launch.keywords,
        )
        return
    table, token_rows = spans
    delta_conv_kernel[(len(token_rows), key_heads)](
        projected,
        weight,
        inputs,
        slots,
        table,
        token_rows,
        out,
        first_token,
        projected.stride(0),
        inputs.stride(0),
        key_heads,
        num_channels,
        **shape,
        **launch.keywords,
    )
    keep_inputs_kernel[(len(slots), key_heads)](
        projected,
        inputs,
        slots,
        table,
        projected.stride(0),
        inputs.stride(0),
        key_heads,
        **shape,
        **launch.keywords,
    )


# The gated delta rule (Yang, Kautz and Hatamizadeh, 2025) for one token of each sequence, and the norm after it.
#
# The arithmetic is that of `models.ops.gated_delta_rule`. Queries and keys come from the convolution and get unit
# length here; decay and beta come from the projection. States are float32, in their slots, and updated in place.

LENGTH_EPS = tl.constexpr(1e-6)
"""Of the lengths of queries and keys."""


@triton.jit
def unit_rows(at, mask, scale):
    """Rows of unit length, times `scale`. # [n, KEY] or [KEY] float32"""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    axis: tl.constexpr = len(x.shape) - 1
    return x * (scale * tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + LENGTH_EPS))


@triton.jit
def gates(ba, ba_stride, a_log, dt_bias, tokens, head, mask, GROUP: tl.constexpr):
    """Logarithm of a value head's decay, and its share beta, at some tokens. # 2 x [tokens] float32"""
    at = ba + tokens.to(tl.int64) * ba_stride + head // GROUP * (2 * GROUP) + head % GROUP
    share = tl.sigmoid(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    x = tl.load(at + GROUP, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    # log(1 + e^x) without overflow.
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus, share


@jit
def gated_delta_step_kernel(
    convolved,  # [T, channels]: queries and keys of all key heads, values of all value heads
    ba,  # [T, key heads * 2 * GROUP]
    a_log,  # [value heads]
    dt_bias,  # [value heads]
    states,  # [slots, value heads, KEY, VALUE] float32
    slots,  # [B] int64, -1 for a row that is none
    starts,  # [B + 1] int32, first token of each row
    after,  # [T] int64, slot of the state after each token, -1: it is left out
    out,  # [T, value heads, VALUE]
    ba_stride,
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,  # Value heads of a key head
    KEY_TILE: tl.constexpr,  # KEY filled up to a power of two
    VALUES: tl.constexpr,  # Of one program
    HAS_STARTS: tl.constexpr,  # Whether rows verify drafts. If not, each has one token, and `after` is `slots`
):
    """A row's tokens, one by one, by a tile [KEY, VALUES] of a value head's state. Grid: (tiles, value heads, B)."""
    program, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + program)
    if slot < 0:
        return
    keys, values = tl.arange(0, KEY_TILE), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = keys < KEY, values < VALUE
    key_head, key_channels = head // GROUP, num_heads // GROUP * KEY
    mask = has_key[:, None] & has_value[None, :]
    at = head * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    state = tl.load(states + slot * num_heads * (KEY * VALUE) + at, mask=mask, other=0.0)
    first, past = token_range(starts, program, HAS_STARTS)
    for index in range(past - first):
        token = first + index
        to = tl.load(after + token)
        if to >= 0:
            row = convolved + token.to(tl.int64) * num_channels
            q = unit_rows(row + key_head * KEY + keys, has_key, KEY**-0.5)
            k = unit_rows(row + key_channels + key_head * KEY + keys, has_key, 1.0)
            v = tl.load(row + 2 * key_channels + head * VALUE + values, mask=has_value, other=0.0).to(tl.float32)
            decay, share = gates(ba, ba_stride, a_log, dt_bias, token, head, True, GROUP)
            state = state * tl.exp(decay)
            held = tl.sum(state * k[:, None], 0)
            state += k[:, None] * ((v - held) * share)[None, :]
            tl.store(states + to * num_heads * (KEY * VALUE) + at, state, mask=mask)
            read = tl.sum(state * q[:, None], 0)
            offset = (token.to(tl.int64) * num_heads + head) * VALUE
            tl.store(out + offset + values, read.to(out.dtype.element_ty), mask=has_value)
        else:
            offset = (token.to(tl.int64) * num_heads + head) * VALUE
            tl.store(out + offset + values, tl.zeros([VALUES], out.dtype.element_ty), mask=has_value)


@jit
def gated_norm_kernel(
    read,  # [T, value heads, VALUE]
    projected,  # [T, key heads * (2 * KEY + 2 * GROUP * VALUE)], the gates last in each key head's part
    weight,  # [VALUE]
    out,  # [T, value heads * VALUE]
    stride,  # Of projected
    num_heads,
    eps,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """`weight * rms_norm(read) * silu(gate)` of one value head. Grid: (T, value heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = tl.arange(0, VALUE_TILE)
    mask = values < VALUE
    offset = (token * num_heads + head) * VALUE + values
    x = tl.load(read + offset, mask=mask, other=0.0).to(tl.float32)
    part: tl.constexpr = 2 * KEY + 2 * GROUP * VALUE
    at = projected + token * stride + head // GROUP * part + 2 * KEY + (GROUP + head % GROUP) * VALUE + values
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE + eps)
    # Rounded between, as the norm's output is.
    x = x.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + values, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=mask)


def delta_step(
    convolved: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    by_token: "ByToken | None" = None,
) -> None:
    """Tokens of B sequences through their states, which are brought up to date; what queries read to `out`.

    # convolved [T, channels], ba [T, key heads * 2 * group], a_log and dt_bias [value heads],
    # states [slots, value heads, key_dim, value_dim] float32, slots [B] int64, -1 for a row that is none,
    # out [T, value heads, value_dim]

    `by_token`: None where each sequence has one token.
    """
    _, heads, key_dim, value_dim = states.shape
    launch = launch_of("gated_delta_step", convolved.device)
    starts, after = (slots, slots) if by_token is None else by_token
    gated_delta_step_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, len(slots))](
        convolved,
        ba,
        a_log,
        dt_bias,
        states,
        slots,
        starts,
        after,
        out,
        ba.stride(0),
        heads,
        convolved.shape[1],
        KEY=key_dim,
        VALUE=value_dim,
        GROUP=heads // key_heads_of(convolved, states),
        KEY_TILE=max(16, next_power_of_2(key_dim)),
        HAS_STARTS=by_token is not None,
        **launch.keywords,
    )


def key_heads_of(convolved: torch.Tensor, states: torch.Tensor) -> int:
    """How many there are next to the value heads of these channels."""
    _, heads, key_dim, value_dim = states.shape
    return int(convolved.shape[1] - heads * value_dim) // (2 * key_dim)


def gated_norm(
    read: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, eps: float, *, key_dim: int, group: int
) -> torch.Tensor:
    """The norm of what each head read, gated by its part of the projection. # [T, value heads, v] -> [T, all]"""
    num_tokens, heads, value_dim = read.shape
    out = read.new_empty(num_tokens, heads * value_dim)
    launch = launch_of("gated_norm", read.device)
    gated_norm_kernel[(num_tokens, heads)](
        read,
        projected,
        weight,
        out,
        projected.stride(0),
        heads,
        eps,
        KEY=key_dim,
        VALUE=value_dim,
        GROUP=group,
        VALUE_TILE=next_power_of_2(value_dim),
        **launch.keywords,
    )
    return out


# The gated delta rule over spans of tokens, chunk by chunk (Yang, Kautz and Hatamizadeh, 2025, section 3.3).
#
# The arithmetic is that of `models.ops.gated_delta_rule`. A chunk's corrections solve a unit lower triangular system
# that depends on its keys alone. Those inverses are computed first, for all chunks at once; the chunks of a span,
# which depend on one another, then need products only.


@jit
def delta_inverse_kernel(
    convolved,  # [T, channels]: queries and keys of all key heads, values of all value heads
    ba,  # [T, key heads * 2 * GROUP]
    a_log,  # [value heads]
    dt_bias,  # [value heads]
    chunks,  # [chunks, 2] int32, first token and tokens of each
    decays,  # [chunks, value heads, CHUNK] float32, logarithms from before the chunk to behind each token
    inverses,  # [chunks, value heads, CHUNK, CHUNK] float32, times the shares
    ba_stride,
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The inverse of I + L of one chunk and value head, by forward substitution. Grid: (chunks, value heads).

    L[t, j] = beta_t (k_t . k_j) times the decay from j to t. Column t of the inverse takes beta_t, which every
    right-hand side has.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    positions, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    exists = positions < count
    tokens = first + positions
    decay, share = gates(ba, ba_stride, a_log, dt_bias, tokens, head, exists, GROUP)
    decay = tl.cumsum(tl.where(exists, decay, 0.0), 0)
    share = tl.where(exists, share, 0.0)
    rows = convolved + tokens[:, None].to(tl.int64) * num_channels + (num_heads + head) // GROUP * KEY
    k = unit_rows(rows + keys[None, :], exists[:, None] & (keys < KEY)[None, :], 1.0)
    overlap = tl.dot(k, tl.trans(k), input_precision=PRECISION) * share[:, None]
    is_before = positions[:, None] > positions[None, :]
    # Where j is behind t the difference is positive and may overflow: it is hidden before it is raised.
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    overlap = overlap * between
    inverse = tl.where(positions[:, None] == positions[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        is_row = positions == row
        of_row = tl.sum(tl.where(is_row[:, None], overlap, 0.0), 0)  # [CHUNK], nothing from `row` on
        solved = tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None], inverse - solved[None, :], inverse)
    chunk_head = chunk.to(tl.int64) * num_heads + head
    tl.store(decays + chunk_head * CHUNK + positions, decay)
    at = inverses + (chunk_head * CHUNK + positions[:, None]) * CHUNK + positions[None, :]
    tl.store(at, inverse * share[None, :])


@triton.jit
def _unit_parts(rows, exists, scale, KEY: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """As `unit_rows`, in parts of PART keys. # pointers [CHUNK, 1], [CHUNK] -> PARTS x [CHUNK, PART] float32"""
    loaded = tl.tuple(())
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        x = tl.load(rows + keys[None, :], mask=exists[:, None] & (keys < KEY)[None, :], other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1, keep_dims=True)
        if part == 0:
            length = squares
        else:
            length += squares
        loaded += (x,)
    unit = scale * tl.rsqrt(length + LENGTH_EPS)
    parts = tl.tuple(())
    for part in tl.static_range(PARTS):
        parts += (loaded[part] * unit,)
    return parts


@jit(do_not_specialize_on_alignment=["slots"])  # They may begin anywhere among those of a step.
def gated_delta_span_kernel(
    convolved,  # As above
    decays,
    inverses,
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    slots,  # [rows] int64
    states,  # [slots, value heads, KEY, VALUE] float32
    out,  # [T, value heads, VALUE]
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # Keys that are multiplied at a time
):
    """A span's chunks, one after the other, for a tile [KEY, VALUES] of one state that stays in registers.

    Grid: (tiles of values, value heads, rows).
    """
    PART: tl.constexpr = DEPTH if DEPTH < KEY_TILE else KEY_TILE
    PARTS: tl.constexpr = KEY_TILE // PART
    head, span = tl.program_id(1), spans + tl.program_id(2) * 4
    first, count = tl.load(span), tl.load(span + 1)
    chunk, is_new = tl.load(span + 2), tl.load(span + 3)
    positions = tl.arange(0, CHUNK)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_value = values < VALUE
    key_head, key_channels = head // GROUP, num_heads // GROUP * KEY

    at_state = states + (tl.load(slots + tl.program_id(2)) * num_heads + head) * (KEY * VALUE)
    state = tl.tuple(())
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :] & (is_new == 0)
        state += (tl.load(at_state + keys[:, None] * VALUE + values[None, :], mask=in_state, other=0.0),)
    for start in range(0, count, CHUNK):
        tokens = (first + start + positions).to(tl.int64)
        exists = start + positions < count
        rows = convolved + tokens[:, None] * num_channels
        k = _unit_parts(rows + key_channels + key_head * KEY, exists, 1.0, KEY, PARTS, PART)
        in_values = exists[:, None] & has_value[None, :]
        v = tl.load(rows + 2 * key_channels + head * VALUE + values[None, :], mask=in_values, other=0.0)
        chunk_head = chunk.to(tl.int64) * num_heads + head
        decay = tl.load(decays + chunk_head * CHUNK + positions)
        inverse = tl.load(inverses + (chunk_head * CHUNK + positions[:, None]) * CHUNK + positions[None, :])

        shrunk = tl.exp(decay)[:, None]
        held = tl.zeros([CHUNK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            held = tl.dot(k[part], state[part], held, input_precision=PRECISION)
        wanted = v.to(tl.float32) - shrunk * held
        corrections = tl.dot(inverse, tl.where(in_values, wanted, 0.0), input_precision=PRECISION)
        q = _unit_parts(rows + key_head * KEY, exists, KEY**-0.5, KEY, PARTS, PART)
        seen = positions[:, None] >= positions[None, :]
        between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        read = tl.zeros([CHUNK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            overlap = tl.dot(q[part], tl.trans(k[part]), overlap, input_precision=PRECISION)
            read = tl.dot(q[part], state[part], read, input_precision=PRECISION)
        read = tl.dot(overlap * between, corrections, shrunk * read, input_precision=PRECISION)
        at = out + (tokens[:, None] * num_heads + head) * VALUE + values[None, :]
        tl.store(at, read.to(out.dtype.element_ty), mask=in_values)

        # Behind the last token the decay stays what it was there.
        to_end = tl.min(decay, 0)
        behind = tl.tuple(())
        for part in tl.static_range(PARTS):
            added = tl.trans(k[part] * tl.exp(to_end - decay)[:, None])
            behind += (tl.dot(added, corrections, state[part] * tl.exp(to_end), input_precision=PRECISION),)
        state = behind
        chunk += 1
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :]
        tl.store(at_state + keys[:, None] * VALUE + values[None, :], state[part], mask=in_state)


def delta_spans(
    convolved: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    spans: torch.Tensor,
    chunks: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Each row's tokens through its state, which is brought up to date; what queries read to `out`.

    As `delta_step`, of all the step's tokens; `slots` [rows] int64, `spans` [rows, 4] int32: first token, tokens,
    first chunk, whether it begins its sequence; `chunks` [chunks, 2] int32: first token and tokens, of `chunk_size`.
    """
    _, heads, key_dim, value_dim = states.shape
    device = convolved.device
    size = chunk_size(device)
    precision = dot_precision(target_of(device))
    decays = states.new_empty(len(chunks), heads, size)
    inverses = states.new_empty(len(chunks), heads, size, size)
    shape = {
        "KEY": key_dim,
        "GROUP": heads // key_heads_of(convolved, states),
        "KEY_TILE": max(16, next_power_of_2(key_dim)),
        "PRECISION": precision,
    }
    delta_inverse_kernel[(len(chunks), heads)](
        convolved,
        ba,
        a_log,
        dt_bias,
        chunks,
        decays,
        inverses,
        ba.stride(0),
        heads,
        convolved.shape[1],
        **shape,
        **launch_of("delta_inverse", device).keywords,
    )
    launch = launch_of("gated_delta_span", device)
    gated_delta_span_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, len(spans))](
        convolved,
        decays,
        inverses,
        spans,
        slots,
        states,
        out,
        heads,
        convolved.shape[1],
        VALUE=value_dim,
        **shape,
        **launch.keywords,
    )


def chunk_size(device: torch.device) -> int:
    """Tokens of a chunk, of which a span's last may have fewer."""
    return launch_of("gated_delta_span", device).blocks["CHUNK"]


def dot_precision(target: Target) -> str:
    """Of products of float32: NVIDIA's matrix units have no such, and round what goes in to 10 bits of mantissa."""
    return "tf32" if target.backend == "cuda" else "ieee"


class ByToken(NamedTuple):
    """Where the states after the tokens of rows that verify drafts go."""

    starts: torch.Tensor  # [rows + 1 or more] int32, first token of each row
    after: torch.Tensor  # [T] int64, slot of the state after each token, -1: the token is left out


class DeltaPlan(NamedTuple):
    """A step's rows as the kernels read them; the same for all layers."""

    num_decodes: int
    """Leading rows of one token, or that go token by token."""
    slots: torch.Tensor  # [B] int64
    spans: torch.Tensor | None = None
    """[rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence; None where all decode"""
    token_rows: torch.Tensor | None = None  # [T - first_token] int32
    chunks: torch.Tensor | None = None  # [chunks, 2] int32: first token and tokens
    first_token: int = 0
    """Of the spans."""
    by_token: ByToken | None = None


def make_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    slots: torch.Tensor,
    num_decodes: int,
    by_token: ByToken | None = None,
) -> DeltaPlan:
    """Of a step whose first `num_decodes` rows have one token each, unless `by_token` says more of them.

    `slots` [B] int64 lies on the device.
    """
    if num_decodes == len(query_lens):
        return DeltaPlan(num_decodes, slots, by_token=by_token)
    size = chunk_size(slots.device)
    spans: list[tuple[int, int, int, bool]] = []
    chunks: list[tuple[int, int]] = []
    first = first_token = sum(query_lens[:num_decodes])
    for count, length in zip(query_lens[num_decodes:], seq_lens[num_decodes:], strict=True):
        spans.append((first, count, len(chunks), count == length))
        chunks += [(first + start, min(size, count - start)) for start in range(0, count, size)]
        first += count
    token_rows = np.repeat(np.arange(len(spans)), [count for _, count, _, _ in spans])
    tables = [np.array(table, np.int32) for table in (spans, token_rows, chunks)]
    rows, rows_of_tokens, pieces = upload(tables, slots.device)
    return DeltaPlan(num_decodes, slots, rows, rows_of_tokens, pieces, first_token, by_token)


def remember(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the convolution gives of each token, and what it reads of its state: `delta_net` before its norm.

    # -> [T, channels], [T, value heads, value_dim]
    """
    _, heads, key_dim, value_dim = states.shape
    num_tokens = projected.shape[0]
    convolved = projected.new_empty(num_tokens, conv.shape[0])
    read = projected.new_empty(num_tokens, heads, value_dim)
    decodes, gates = plan.num_decodes, (ba, a_log, dt_bias)
    convolve = partial(delta_conv, projected, conv, inputs, key_dim=key_dim, key_heads=key_heads, out=convolved)
    if decodes:
        slots = plan.slots
        if plan.spans is not None:
            slots = slots[:decodes]
        convolve(slots, spans=None, by_token=plan.by_token)
        delta_step(convolved, *gates, states, slots, read, plan.by_token)
    if plan.spans is not None:
        assert plan.token_rows is not None
        assert plan.chunks is not None
        slots = plan.slots[decodes:]
        convolve(slots, spans=(plan.spans, plan.token_rows), first_token=plan.first_token)
        delta_spans(convolved, *gates, states, slots, plan.spans, plan.chunks, read)
    return convolved, read


def delta_net(
    projected: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    inputs: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
) -> torch.Tensor:
    """Each row's tokens through its convolution and its state, which are brought up to date, and a gated norm.

    # projected [T, key_heads * 2 * (key_dim + group * value_dim)], ba [T, key_heads * 2 * group],
    # conv [channels, 1, taps], a_log and dt_bias [value heads], inputs [slots, channels, taps - 1],
    # states [slots, value heads, key_dim, value_dim] float32 -> [T, value heads * value_dim]
    """
    _, heads, key_dim, _ = states.shape
    _, read = remember(projected, ba, conv, a_log, dt_bias, inputs, states, plan, key_heads=key_heads)
    return gated_norm(read, projected, *norm, key_dim=key_dim, group=heads // key_heads)
