"""Recurrences that go token by token in prompts too: the delta rule by key, and Mamba's selective scan.

A program holds a part of one row's state and updates it with the row's tokens. A step's rows are those of
`models.ops.triton.gated_delta.DeltaPlan`.
"""

import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of these kernels
from models.ops.triton.configs import launch_of
from models.ops.triton.gated_delta import DeltaPlan, token_range, unit_rows
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.triton.specializations import in_one_form


@triton.jit
def _softplus(x):
    """log(1 + e^x) without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _row_tokens(starts, spans, row, IS_SPAN: tl.constexpr, HAS_STARTS: tl.constexpr):
    """The indices of a row's first token and past its last token, and whether the row begins its sequence."""
    is_new = 0
    if IS_SPAN:
        first, count, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 1), tl.load(spans + row * 4 + 3)
        past = first + count
    else:
        first, past = token_range(starts, row, HAS_STARTS)
    return first, past, is_new


@jit(do_not_specialize_on_alignment=["slots"])  # They may begin anywhere among those of a step.
def delta_rule_kernel(
    x,  # [T, channels]: all queries, all keys, all values
    a,  # [T, num_heads * DECAYS], the inputs of decays
    b,  # [T, num_heads], the inputs of beta
    a_log,  # [num_heads] float32
    dt_bias,  # [num_heads * DECAYS] float32
    states,  # [slots, num_heads, KEY, VALUE] float32
    slots,  # [rows] int64, -1 for a row that is none
    starts,  # [rows + 1] int32, first token of each row
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    after,  # [T] int64, slot of the state after each token, -1: it is left out
    out,  # [T, num_heads, VALUE]
    x_stride,
    a_stride,
    b_stride,
    num_heads,
    most,  # What beta is at most
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,  # Value heads of a key head
    DECAYS: tl.constexpr,  # Of a head: 1, or one for each dimension of its key
    KEY_TILE: tl.constexpr,  # KEY filled up to a power of two
    VALUES: tl.constexpr,  # Of one program
    IS_SPAN: tl.constexpr,  # Whether rows are spans, whose state is stored once
    HAS_STARTS: tl.constexpr,  # Whether rows verify drafts. If neither, each has one token, and `after` is `slots`
):
    """A row's tokens, one by one, by a tile [KEY, VALUES] of a value head's state.

    Grid: (tiles of values, value heads, rows).
    """
    program, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + program)
    if slot < 0:
        return
    keys, values = tl.arange(0, KEY_TILE), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = keys < KEY, values < VALUE
    key_head, key_channels = head // GROUP, num_heads // GROUP * KEY
    mask = has_key[:, None] & has_value[None, :]
    at = head * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    first, past, is_new = _row_tokens(starts, spans, program, IS_SPAN, HAS_STARTS)
    state = tl.load(states + slot * num_heads * (KEY * VALUE) + at, mask=mask & (is_new == 0), other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    of_decays = head * DECAYS + (keys if DECAYS > 1 else keys * 0)
    bias = tl.load(dt_bias + of_decays, mask=has_key, other=0.0)
    for index in range(past - first):
        token = first + index
        to = slot
        if not IS_SPAN:
            to = tl.load(after + token)
        out_at = out + (token.to(tl.int64) * num_heads + head) * VALUE + values
        if to >= 0:
            row = x + token.to(tl.int64) * x_stride
            q = unit_rows(row + key_head * KEY + keys, has_key, KEY**-0.5)
            k = unit_rows(row + key_channels + key_head * KEY + keys, has_key, 1.0)
            v = tl.load(row + 2 * key_channels + head * VALUE + values, mask=has_value, other=0.0).to(tl.float32)
            raw = tl.load(a + token.to(tl.int64) * a_stride + of_decays, mask=has_key, other=0.0).to(tl.float32)
            share = most * tl.sigmoid(tl.load(b + token.to(tl.int64) * b_stride + head).to(tl.float32))
            state = state * tl.exp(-rate * _softplus(raw + bias))[:, None]
            held = tl.sum(state * k[:, None], 0)
            state += k[:, None] * ((v - held) * share)[None, :]
            tl.store(out_at, tl.sum(state * q[:, None], 0).to(out.dtype.element_ty), mask=has_value)
            if not IS_SPAN:
                tl.store(states + to * num_heads * (KEY * VALUE) + at, state, mask=mask)
        else:
            tl.store(out_at, tl.zeros([VALUES], out.dtype.element_ty), mask=has_value)
    if IS_SPAN:
        tl.store(states + slot * num_heads * (KEY * VALUE) + at, state, mask=mask)


def delta_rule(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    key_heads: int,
    most: float,
) -> torch.Tensor:
    """Update each row's state with the row's tokens in order; returns each token's output.

    # x [T, key_heads * 2 * key_dim + heads * value_dim], a [T, heads * decays], b [T, heads], a_log [heads] and
    # dt_bias [heads * decays] float32, states [slots, heads, key_dim, value_dim] float32 -> [T, heads * value_dim]
    """
    _, heads, key_dim, value_dim = states.shape
    out = x.new_empty(len(x), heads * value_dim)
    launch = launch_of("delta_rule", x.device)
    sizes = x.stride(0), a.stride(0), b.stride(0), heads, most
    shape = {
        "KEY": key_dim,
        "VALUE": value_dim,
        "GROUP": heads // key_heads,
        "DECAYS": len(dt_bias) // heads,
        "KEY_TILE": max(16, next_power_of_2(key_dim)),
    }
    tiles = cdiv(value_dim, launch.blocks["VALUES"])
    for slots, tables, flags in _rows_of(plan):
        delta_rule_kernel[(tiles, heads, len(slots))](
            *(x, a, b, a_log, dt_bias, states, slots, *tables, out, *sizes), **shape, **flags, **launch.keywords
        )
    return out


@jit(do_not_specialize_on_alignment=["slots"])
def selective_scan_kernel(
    x,  # [T, num_channels]
    dt,  # [T, num_channels]
    b,  # [T, STATE]
    c,  # [T, STATE]
    a_log,  # [STATE, num_channels] float32
    d,  # [num_channels] float32
    dt_bias,  # [num_channels] float32
    states,  # [slots, STATE, num_channels] float32
    slots,  # As above
    starts,
    spans,
    after,
    out,  # [T, num_channels]
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    num_channels,
    STATE: tl.constexpr,
    STATE_TILE: tl.constexpr,  # STATE filled up to a power of two
    CHANNELS: tl.constexpr,  # Of one program
    IS_SPAN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """A row's tokens, one by one, by a tile [STATE, CHANNELS] of its state. Grid: (tiles, rows)."""
    program = tl.program_id(1)
    slot = tl.load(slots + program)
    if slot < 0:
        return
    keys, channels = tl.arange(0, STATE_TILE), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    has_key, exists = keys < STATE, channels < num_channels
    mask = has_key[:, None] & exists[None, :]
    at = keys[:, None] * num_channels + channels[None, :]
    of_slot = STATE * num_channels
    first, past, is_new = _row_tokens(starts, spans, program, IS_SPAN, HAS_STARTS)
    state = tl.load(states + slot * of_slot + at, mask=mask & (is_new == 0), other=0.0)
    rates = -tl.exp(tl.load(a_log + at, mask=mask, other=0.0))
    skip = tl.load(d + channels, mask=exists, other=0.0)
    bias = tl.load(dt_bias + channels, mask=exists, other=0.0)
    for index in range(past - first):
        token = first + index
        to = slot
        if not IS_SPAN:
            to = tl.load(after + token)
        out_at = out + token.to(tl.int64) * num_channels + channels
        if to >= 0:
            value = tl.load(x + token.to(tl.int64) * x_stride + channels, mask=exists, other=0.0).to(tl.float32)
            raw = tl.load(dt + token.to(tl.int64) * dt_stride + channels, mask=exists, other=0.0).to(tl.float32)
            step = _softplus(raw + bias)
            under = tl.load(b + token.to(tl.int64) * b_stride + keys, mask=has_key, other=0.0).to(tl.float32)
            query = tl.load(c + token.to(tl.int64) * c_stride + keys, mask=has_key, other=0.0).to(tl.float32)
            state = state * tl.exp(rates * step[None, :]) + under[:, None] * (step * value)[None, :]
            read = tl.sum(state * query[:, None], 0) + skip * value
            tl.store(out_at, read.to(out.dtype.element_ty), mask=exists)
            if not IS_SPAN:
                tl.store(states + to * of_slot + at, state, mask=mask)
        else:
            tl.store(out_at, tl.zeros([CHANNELS], out.dtype.element_ty), mask=exists)
    if IS_SPAN:
        tl.store(states + slot * of_slot + at, state, mask=mask)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
) -> torch.Tensor:
    """Update each row's state with the row's tokens in order; returns each token's output.

    # x and dt [T, channels], b and c [T, N], a_log [N, channels], d and dt_bias [channels] float32,
    # states [slots, N, channels] float32 -> [T, channels]
    """
    _, size, num_channels = states.shape
    out, b, c = x.new_empty(len(x), num_channels), in_one_form(b), in_one_form(c)
    launch = launch_of("selective_scan", x.device)
    sizes = x.stride(0), dt.stride(0), b.stride(0), c.stride(0), num_channels
    tile = max(16, next_power_of_2(size))
    for slots, tables, flags in _rows_of(plan):
        selective_scan_kernel[(cdiv(num_channels, launch.blocks["CHANNELS"]), len(slots))](
            *(x, dt, b, c, a_log, d, dt_bias, states, slots, *tables, out, *sizes),
            STATE=size,
            STATE_TILE=tile,
            **flags,
            **launch.keywords,
        )
    return out


def _rows_of(plan: DeltaPlan) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, bool]]]:
    """The decodes and the spans of a step: their slots; starts, spans and slots after; and the kernels' flags."""
    found: list[tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, bool]]] = []
    decodes = plan.num_decodes
    if decodes:
        slots = plan.slots if plan.spans is None else plan.slots[:decodes]
        starts, after = (slots, slots) if plan.by_token is None else plan.by_token
        flags = {"IS_SPAN": False, "HAS_STARTS": plan.by_token is not None}
        found.append((slots, (starts, starts, after), flags))
    if plan.spans is not None:
        slots = plan.slots[decodes:]
        # Slots after tokens are not read, and those of all rows begin at the same address whatever the decodes.
        found.append((slots, (plan.spans, plan.spans, plan.slots), {"IS_SPAN": True, "HAS_STARTS": False}))
    return found
