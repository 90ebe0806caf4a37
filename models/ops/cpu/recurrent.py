"""CPU operators of recurrent layers: short convolutions, Mamba's and Mamba-2's state spaces, and gated norms."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step

_MAX_KERNEL = 1 << 12
"""Limit of a convolution's taps; a thread's scratch holds the taps of 64 channels."""
_MAX_STATE = 1 << 20
"""Limit of a head's state elements; a thread's scratch holds a state whose rows are not multiples of a vector."""
_MAX_GROUP = 1 << 20
"""Limit of the features of a norm, which a thread's scratch holds."""


def convolves(x: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor) -> bool:
    """Whether `convolve` supports these shapes and dtypes."""
    return runs(x, weight, inputs) and 2 <= len(weight) <= _MAX_KERNEL


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: torch.Tensor,
    step: Step,
    *,
    gates: tuple[torch.Tensor, torch.Tensor] | None,
    has_silu: bool,
) -> torch.Tensor:
    """Convolve each row's tokens, causally and by channel, and update the cached `inputs`.

    # x [T, channels], weight [kernel, channels], bias [channels], inputs [slots, kernel - 1, channels]
    # -> [T, channels]

    `gates`: factors of the input and of the output. # 2 x [T, channels], of equal strides
    """
    runtime = current()
    kernel, channels = weight.shape
    out = runtime.rows(len(x), channels)
    before, after = (None, None) if gates is None else gates
    assert before is None or after is None or before.stride(0) == after.stride(0)
    arguments = structures.ShortConv(
        x.data_ptr(),
        x.stride(0),
        pointer(before),
        pointer(after),
        0 if before is None else before.stride(0),
        weight.data_ptr(),
        pointer(bias),
        inputs.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        channels,
        kernel,
        has_silu,
    )
    runtime.run(arguments, step, (x, before, after, weight, bias, inputs, out))
    return out


def supports(x: torch.Tensor, dt: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `state_space` supports these shapes and dtypes."""
    _, _, size, dim = states.shape
    return runs(x, dt) and states.dtype is torch.float32 and size * (dim + 15) <= _MAX_STATE


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    step: Step,
    *,
    groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Update each row's state by the row's tokens in order, and return each token's output.

    # x [T, heads * dim + 2 * groups * state], dt [T, heads], a_log, d and dt_bias [heads] float32,
    # states [slots, heads, state, dim] float32 -> [T, heads * dim]
    """
    runtime = current()
    _, heads, size, dim = states.shape
    out = runtime.rows(len(x), heads * dim)
    arguments = structures.StateSpace(
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        a_log.data_ptr(),
        d.data_ptr(),
        dt_bias.data_ptr(),
        states.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        heads,
        dim,
        groups,
        size,
        *limits,
    )
    runtime.run(arguments, step, (x, dt, a_log, d, dt_bias, states, out))
    return out


def scans(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `selective_scan` supports these shapes and dtypes."""
    return runs(x, dt, b, c) and states.dtype is torch.float32 and 32 * states.shape[1] <= _MAX_STATE


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    step: Step,
) -> torch.Tensor:
    """Update each row's state by the row's tokens in order, and return each token's output.

    # x and dt [T, channels], b and c [T, N], a_log [N, channels], d and dt_bias [channels] float32,
    # states [slots, N, channels] float32 -> [T, channels]
    """
    runtime = current()
    _, size, channels = states.shape
    out = runtime.rows(len(x), channels)
    arguments = structures.SelectiveScan(
        x.data_ptr(),
        x.stride(0),
        dt.data_ptr(),
        dt.stride(0),
        b.data_ptr(),
        c.data_ptr(),
        b.stride(0),
        c.stride(0),
        a_log.data_ptr(),
        d.data_ptr(),
        dt_bias.data_ptr(),
        states.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        channels,
        size,
    )
    runtime.run(arguments, step, (x, dt, b, c, a_log, d, dt_bias, states, out))
    return out


def supports_gated_norm(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether `gated_norm` supports these shapes and dtypes."""
    return runs(x, gate) and x.shape[1] <= _MAX_GROUP


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, groups: int, eps: float, *, is_gated_first: bool
) -> torch.Tensor:
    """Multiply `x` by SiLU of `gate`; with a weight, also apply an RMS norm to each group, after or before the gate.

    # 2 x [T, features], [features] -> [T, features]
    """
    runtime = current()
    features = x.shape[1]
    out = runtime.rows(len(x), features)
    arguments = structures.GroupNorm(
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        pointer(weight),
        out.data_ptr(),
        out.stride(0),
        groups,
        features // groups,
        is_gated_first,
        eps,
    )
    runtime.run(arguments, Step(num_tokens=len(x)), (x, gate, weight, out))
    return out


def scale(x: torch.Tensor, by: float | torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply `x` by a number, or each column by its own factor, and add `plus`, if given.

    # [rows, columns], [columns] float32, [rows, columns] -> [rows, columns]
    """
    runtime = current()
    num_rows, columns = x.shape
    out = runtime.rows(num_rows, columns)
    factors = by if isinstance(by, torch.Tensor) else None
    arguments = structures.ScaleRows(
        x.data_ptr(),
        x.stride(0),
        pointer(factors),
        by if isinstance(by, float) else 1.0,
        pointer(plus),
        0 if plus is None else plus.stride(0),
        out.data_ptr(),
        out.stride(0),
        columns,
        runtime.per_token(num_rows),
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (x, factors, plus, out))
    return out
