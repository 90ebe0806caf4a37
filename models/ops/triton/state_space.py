"""Short convolutions and Mamba-2's state space, called by `ShortConvolution` and `Mamba2Mixer`.

In order: the short convolution, the state space for one token of each sequence and over spans of tokens, chunk by
chunk, and the gated norm after it. A step's rows are those of `models.ops.triton.gated_delta.DeltaPlan`.
"""

import torch
import triton
import triton.language as tl

import models.ops.triton.configs  # noqa: F401, the rows of these kernels
from models.ops.triton.configs import WHOLE, launch_of, target_of
from models.ops.triton.gated_delta import DeltaPlan, dot_precision, token_range
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit

# The short causal convolution, over each row's tokens and the last inputs of its slot.


@triton.jit
def _load_input(x, before, at, gate_at, mask, IS_GATED: tl.constexpr):
    """Some channels of a token as they are convolved, in the type that they are kept in."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if IS_GATED:
        gate = tl.load(before + gate_at, mask=mask, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _finish(
    summed,
    after,
    bias,
    gate_at,
    channels,
    exists,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """What is written of a token's sums."""
    if HAS_BIAS:
        summed += tl.load(bias + channels, mask=exists, other=0.0).to(tl.float32)
    if HAS_SILU:
        summed = summed * tl.sigmoid(summed)
    if IS_GATED:
        gate = tl.load(after + gate_at, mask=exists, other=0.0)
        summed = summed * gate.to(tl.float32)
    return summed


@jit
def short_conv_step_kernel(
    x,  # [T, num_channels]
    before,  # [T, num_channels], what x is multiplied by; any pointer where not IS_GATED
    after,  # [T, num_channels], what the output is multiplied by; any pointer where not IS_GATED
    weight,  # [TAPS, num_channels]
    bias,  # [num_channels], any pointer where not HAS_BIAS
    inputs,  # [slots, TAPS - 1, num_channels], the last
    slots,  # [rows] int64, -1 for a row that is none
    starts,  # [rows + 1] int32, first token of each row
    slots_after,  # [T] int64, slot of the inputs after each token, -1: it is left out
    out,  # [T, num_channels]
    stride,  # Of x
    gate_stride,  # Of before and after
    slot_stride,  # Of inputs
    num_channels,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,  # Channels of one program
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    HAS_STARTS: tl.constexpr,  # Whether rows verify drafts. If not, each has one token, and slots_after is slots
):
    """Some channels of a row's tokens, one by one. Grid: (rows, blocks of channels)."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = channels < num_channels
    slot = tl.load(slots + row)
    if slot < 0:
        return
    first, past = token_range(starts, row, HAS_STARTS)
    for index in range(past - first):
        token = first + index
        wide = token.to(tl.int64)
        to = tl.load(slots_after + token)
        if to >= 0:
            was = inputs + slot * slot_stride + channels
            kept = inputs + to * slot_stride + channels
            gate_at = wide * gate_stride + channels
            summed = tl.zeros([COLUMNS], tl.float32)
            for tap in tl.static_range(TAPS):
                if tap < TAPS - 1:
                    value = tl.load(was + tap * num_channels, mask=exists, other=0.0).to(x.dtype.element_ty)
                else:
                    value = _load_input(x, before, wide * stride + channels, gate_at, exists, IS_GATED)
                if tap > 0:
                    tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
                    tl.store(kept + (tap - 1) * num_channels, value.to(inputs.dtype.element_ty), mask=exists)
                factor = tl.load(weight + tap * num_channels + channels, mask=exists, other=0.0)
                summed += value.to(tl.float32) * factor.to(tl.float32)
            summed = _finish(summed, after, bias, gate_at, channels, exists, IS_GATED, HAS_BIAS, HAS_SILU)
            tl.store(out + wide * num_channels + channels, summed.to(out.dtype.element_ty), mask=exists)
            slot = to
            tl.debug_barrier()  # The row's next token reads what other threads have stored.
        else:
            tl.store(out + wide * num_channels + channels, tl.zeros([COLUMNS], out.dtype.element_ty), mask=exists)


# What differs from step to step; the slots of spans may begin anywhere among those of a step.
@jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["slots"])
def short_conv_kernel(
    x,  # As above
    before,
    after,
    weight,
    bias,
    inputs,
    slots,
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    token_rows,  # [T - first_token] int32
    out,
    first_token,  # Of the rows
    stride,
    gate_stride,
    slot_stride,
    num_channels,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Some channels of one token. Grid: (tokens of the rows, blocks of channels)."""
    token = first_token + tl.program_id(0)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = channels < num_channels
    row = tl.load(token_rows + tl.program_id(0))
    start, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 3)
    kept = inputs + tl.load(slots + row) * slot_stride + channels
    wide = token.to(tl.int64)
    index = token - start  # Among its row's tokens
    summed = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        # An input of this step, or one of the last of the steps before.
        back = TAPS - 1 - tap
        is_here = index >= back
        at, gate_at = (wide - back) * stride + channels, (wide - back) * gate_stride + channels
        value = _load_input(x, before, at, gate_at, exists & is_here, IS_GATED)
        if tap < TAPS - 1:
            was = exists & (is_here == 0) & (is_new == 0)
            old = tl.load(kept + (index + tap) * num_channels, mask=was, other=0.0)
            value = tl.where(is_here, value, old.to(value.dtype))
        factor = tl.load(weight + tap * num_channels + channels, mask=exists, other=0.0)
        summed += value.to(tl.float32) * factor.to(tl.float32)
    gate_at = wide * gate_stride + channels
    summed = _finish(summed, after, bias, gate_at, channels, exists, IS_GATED, HAS_BIAS, HAS_SILU)
    tl.store(out + wide * num_channels + channels, summed.to(out.dtype.element_ty), mask=exists)


@jit(do_not_specialize_on_alignment=["slots"])
def keep_last_inputs_kernel(
    x,  # As above
    before,
    inputs,
    slots,
    spans,
    stride,
    gate_stride,
    slot_stride,
    num_channels,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """A row's last inputs into its slot, once every token was convolved. Grid: (rows, blocks of channels)."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = channels < num_channels
    start, count, is_new = tl.load(spans + row * 4), tl.load(spans + row * 4 + 1), tl.load(spans + row * 4 + 3)
    kept = inputs + tl.load(slots + row) * slot_stride + channels
    for tap in tl.static_range(TAPS - 1):
        index = count - (TAPS - 1) + tap
        token = (start + index).to(tl.int64)
        at, gate_at = token * stride + channels, token * gate_stride + channels
        # A row of few tokens keeps some of the inputs before them, which lie after the one that this tap replaces.
        value = _load_input(x, before, at, gate_at, exists & (index >= 0), IS_GATED)
        old = tl.load(kept + (count + tap) * num_channels, mask=exists & (index < 0) & (is_new == 0), other=0.0)
        tl.debug_barrier()  # A thread may hold the same channel as another, which still reads it.
        tl.store(kept + tap * num_channels, tl.where(index >= 0, value.to(old.dtype), old), mask=exists)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    plan: DeltaPlan,
    *,
    gates: tuple[torch.Tensor, torch.Tensor] | None,
    has_silu: bool,
) -> torch.Tensor:
    """A causal depthwise convolution of each row's tokens; `inputs` are brought up to date.

    # x [T, channels], weight [taps, channels], bias [channels], inputs [slots, taps - 1, channels] -> [T, channels]

    `gates`: what `x` is multiplied by before, and the output after. # 2 x [T, channels], of one stride
    """
    num_tokens, taps, channels = len(x), *weight.shape
    out = x.new_empty(num_tokens, channels)
    before, after = (x, x) if gates is None else gates
    launch = launch_of("short_conv", x.device)
    blocks = cdiv(channels, launch.blocks["COLUMNS"])
    strides = x.stride(0), before.stride(0), inputs.stride(0)
    shape = {"TAPS": taps, "IS_GATED": gates is not None}
    flags = {"HAS_BIAS": bias is not None, "HAS_SILU": has_silu}
    weights = weight, x if bias is None else bias
    decodes = plan.num_decodes
    if decodes:
        slots = plan.slots if plan.spans is None else plan.slots[:decodes]
        starts, slots_after = (slots, slots) if plan.by_token is None else plan.by_token
        short_conv_step_kernel[(decodes, blocks)](
            *(x, before, after, *weights, inputs, slots, starts, slots_after, out, *strides, channels),
            **shape,
            **flags,
            HAS_STARTS=plan.by_token is not None,
            **launch.keywords,
        )
    if plan.spans is not None:
        assert plan.token_rows is not None
        slots, spans, rows = plan.slots[decodes:], plan.spans, plan.token_rows
        short_conv_kernel[(len(rows), blocks)](
            *(x, before, after, *weights, inputs, slots, spans, rows, out, plan.first_token, *strides, channels),
            **shape,
            **flags,
            **launch.keywords,
        )
        keep_last_inputs_kernel[(len(slots), blocks)](
            x, before, inputs, slots, spans, *strides, channels, **shape, **launch.keywords
        )
    return out


# The selective state space of Mamba-2 (Dao and Gu, 2024).
#
# The arithmetic is that of `models.ops.state_space`. States are float32, in their slots, and updated in place.


@triton.jit
def _time_steps(dt, dt_stride, dt_bias, tokens, head, mask, least, most):
    """A head's time steps at some tokens, 0 where masked. # [tokens] float32"""
    x = tl.load(dt + tokens.to(tl.int64) * dt_stride + head, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head)
    # log(1 + e^x) without overflow.
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.where(mask, tl.minimum(tl.maximum(softplus, least), most), 0.0)


@jit
def state_space_step_kernel(
    x,  # [T, num_channels]: values of all heads, keys and queries of all groups
    dt,  # [T, num_heads]
    a_log,  # [num_heads] float32, as d and dt_bias
    d,
    dt_bias,
    states,  # [slots, num_heads, KEY, VALUE] float32
    slots,  # [B] int64, -1 for a row that is none
    starts,  # [B + 1] int32, first token of each row
    after,  # [T] int64, slot of the state after each token, -1: it is left out
    out,  # [T, num_heads, VALUE]
    dt_stride,
    num_heads,
    num_channels,
    least,
    most,
    KEY: tl.constexpr,  # The state's dimensions
    VALUE: tl.constexpr,  # A head's dimensions
    GROUP: tl.constexpr,  # Heads of a group
    KEY_TILE: tl.constexpr,  # KEY filled up to a power of two
    VALUES: tl.constexpr,  # Of one program
    HAS_STARTS: tl.constexpr,  # Whether rows verify drafts. If not, each has one token, and `after` is `slots`
):
    """A row's tokens, one by one, by a tile [KEY, VALUES] of a head's state. Grid: (tiles of values, heads, B)."""
    program, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + program)
    if slot < 0:
        return
    keys, values = tl.arange(0, KEY_TILE), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = keys < KEY, values < VALUE
    mask = has_key[:, None] & has_value[None, :]
    rate, skip = -tl.exp(tl.load(a_log + head)), tl.load(d + head)
    at = head * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    state = tl.load(states + slot * num_heads * (KEY * VALUE) + at, mask=mask, other=0.0)
    first, past = token_range(starts, program, HAS_STARTS)
    for index in range(past - first):
        token = first + index
        to = tl.load(after + token)
        offset = (token.to(tl.int64) * num_heads + head) * VALUE
        if to >= 0:
            row = x + token.to(tl.int64) * num_channels
            at_keys = row + num_heads * VALUE + head // GROUP * KEY + keys
            b = tl.load(at_keys, mask=has_key, other=0.0).to(tl.float32)
            c = tl.load(at_keys + num_heads // GROUP * KEY, mask=has_key, other=0.0).to(tl.float32)
            v = tl.load(row + head * VALUE + values, mask=has_value, other=0.0).to(tl.float32)
            step = _time_steps(dt, dt_stride, dt_bias, token, head, True, least, most)
            state = state * tl.exp(rate * step) + b[:, None] * (v * step)[None, :]
            tl.store(states + to * num_heads * (KEY * VALUE) + at, state, mask=mask)
            read = tl.sum(state * c[:, None], 0) + skip * v
            tl.store(out + offset + values, read.to(out.dtype.element_ty), mask=has_value)
        else:
            tl.store(out + offset + values, tl.zeros([VALUES], out.dtype.element_ty), mask=has_value)


@triton.jit
def _load_part(rows, exists, first, KEY: tl.constexpr, PART: tl.constexpr):
    """Keys of a chunk's tokens from the first on. # pointers [CHUNK, 1], [CHUNK] -> [CHUNK, PART] float32"""
    keys = first + tl.arange(0, PART)
    loaded = tl.load(rows + keys[None, :], mask=exists[:, None] & (keys < KEY)[None, :], other=0.0)
    return loaded.to(tl.float32)


@jit(do_not_specialize_on_alignment=["slots"])  # They may begin anywhere among those of a step.
def state_space_span_kernel(
    x,  # As above
    dt,
    a_log,
    d,
    dt_bias,
    spans,  # [rows, 4] int32: first token, tokens, first chunk, whether it begins its sequence
    slots,  # [rows] int64
    states,  # [slots, num_heads, KEY, VALUE] float32
    out,  # [T, num_heads, VALUE]
    dt_stride,
    num_heads,
    num_channels,
    least,
    most,
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

    Grid: (tiles of values, heads, rows).
    """
    PART: tl.constexpr = DEPTH if DEPTH < KEY_TILE else KEY_TILE
    PARTS: tl.constexpr = KEY_TILE // PART
    head, span = tl.program_id(1), spans + tl.program_id(2) * 4
    first, count, is_new = tl.load(span), tl.load(span + 1), tl.load(span + 3)
    positions = tl.arange(0, CHUNK)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_value = values < VALUE
    rate, skip = -tl.exp(tl.load(a_log + head)), tl.load(d + head)
    group_keys, all_keys = num_heads * VALUE + head // GROUP * KEY, num_heads // GROUP * KEY
    seen = positions[:, None] >= positions[None, :]

    at_state = states + (tl.load(slots + tl.program_id(2)) * num_heads + head) * (KEY * VALUE)
    state = tl.tuple(())
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :] & (is_new == 0)
        state += (tl.load(at_state + keys[:, None] * VALUE + values[None, :], mask=in_state, other=0.0),)
    for start in range(0, count, CHUNK):
        tokens = (first + start + positions).to(tl.int64)
        exists = start + positions < count
        rows = x + tokens[:, None] * num_channels
        in_values = exists[:, None] & has_value[None, :]
        v = tl.load(rows + head * VALUE + values[None, :], mask=in_values, other=0.0).to(tl.float32)
        step = _time_steps(dt, dt_stride, dt_bias, tokens, head, exists, least, most)
        decay = tl.cumsum(step * rate, 0)
        added = v * step[:, None]

        overlap = tl.zeros([CHUNK, CHUNK], tl.float32)
        read = tl.zeros([CHUNK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            c = _load_part(rows + group_keys + all_keys, exists, part * PART, KEY, PART)
            read = tl.dot(c, state[part], read, input_precision=PRECISION)
            b = _load_part(rows + group_keys, exists, part * PART, KEY, PART)
            overlap = tl.dot(c, tl.trans(b), overlap, input_precision=PRECISION)
        between = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], float("-inf")))
        read = tl.dot(overlap * between, added, tl.exp(decay)[:, None] * read, input_precision=PRECISION)
        at = out + (tokens[:, None] * num_heads + head) * VALUE + values[None, :]
        tl.store(at, (read + skip * v).to(out.dtype.element_ty), mask=in_values)

        # After the last token the decay stays what it was there.
        to_end = tl.min(decay, 0)
        after = tl.tuple(())
        for part in tl.static_range(PARTS):
            # Loaded again: what is kept for all parts at once would spill.
            b = _load_part(rows + group_keys, exists, part * PART, KEY, PART)
            faded = tl.trans(b * tl.exp(to_end - decay)[:, None])
            after += (tl.dot(faded, added, state[part] * tl.exp(to_end), input_precision=PRECISION),)
        state = after
    for part in tl.static_range(PARTS):
        keys = part * PART + tl.arange(0, PART)
        in_state = (keys < KEY)[:, None] & has_value[None, :]
        tl.store(at_state + keys[:, None] * VALUE + values[None, :], state[part], mask=in_state)


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    plan: DeltaPlan,
    *,
    groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Each row's tokens through its state, which is brought up to date; returns what is read.

    # x [T, heads * dim + 2 * groups * state], dt [T, heads], a_log, d and dt_bias [heads] float32,
    # states [slots, heads, state, dim] float32 -> [T, heads * dim]
    """
    _, heads, key_dim, value_dim = states.shape
    device, decodes = x.device, plan.num_decodes
    out = x.new_empty(len(x), heads * value_dim)
    sizes = dt.stride(0), heads, x.shape[1], *limits
    shape = {
        "KEY": key_dim,
        "VALUE": value_dim,
        "GROUP": heads // groups,
        "KEY_TILE": max(16, next_power_of_2(key_dim)),
    }
    weights = a_log, d, dt_bias
    if decodes:
        launch = launch_of("state_space_step", device)
        slots = plan.slots if plan.spans is None else plan.slots[:decodes]
        starts, after = (slots, slots) if plan.by_token is None else plan.by_token
        state_space_step_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, decodes)](
            *(x, dt, *weights, states, slots, starts, after, out, *sizes),
            **shape,
            HAS_STARTS=plan.by_token is not None,
            **launch.keywords,
        )
    if plan.spans is not None:
        launch = launch_of("state_space_span", device, keys=key_dim)
        slots = plan.slots[decodes:]
        state_space_span_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, len(plan.spans))](
            *(x, dt, *weights, plan.spans, slots, states, out, *sizes),
            **shape,
            PRECISION=dot_precision(target_of(device)),
            **launch.keywords,
        )
    return out


@jit
def group_norm_kernel(
    x,  # [T, num_groups * size]
    gate,  # The same shape
    weight,  # [num_groups * size], any pointer where not HAS_NORM
    out,  # [T, num_groups * size]
    stride,  # Of x
    gate_stride,
    num_groups,
    size,
    eps,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED_FIRST: tl.constexpr,
):
    """`x` times SiLU of the gate, with a norm after it or before it where there is one. Grid: (T, groups)."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * size
    scale = 1.0
    if HAS_NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < size
            value = tl.load(x + token * stride + first + columns, mask=mask, other=0.0).to(tl.float32)
            if IS_GATED_FIRST:
                z = tl.load(gate + token * gate_stride + first + columns, mask=mask, other=0.0).to(tl.float32)
                value = value * (z * tl.sigmoid(z))
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < size
        value = tl.load(x + token * stride + first + columns, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(gate + token * gate_stride + first + columns, mask=mask, other=0.0).to(tl.float32)
        value = value * scale * (z * tl.sigmoid(z))
        if HAS_NORM:
            value = value * tl.load(weight + first + columns, mask=mask, other=0.0).to(tl.float32)
        at = out + token * num_groups * size + first + columns
        tl.store(at, value.to(out.dtype.element_ty), mask=mask)


def group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, *, is_gated_first: bool
) -> torch.Tensor:
    """`x` times SiLU of `gate`; with a weight, a root-mean-square norm of each group after it or before it.

    # 2 x [T, features], [features] -> [T, features]
    """
    num_tokens, features = x.shape
    out = x.new_empty(num_tokens, features)
    launch = launch_of("group_norm", x.device)
    group_norm_kernel[(num_tokens, groups)](
        *(x, gate, x if weight is None else weight, out, x.stride(0), gate.stride(0), groups, features // groups, eps),
        HAS_NORM=weight is not None,
        IS_GATED_FIRST=is_gated_first,
        **launch.keywords,
    )
    return out
