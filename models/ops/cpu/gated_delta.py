"""CPU operators of Qwen3-Next's layers: output gates of heads, and gated delta nets."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step

_MAX_CHANNELS = 1 << 13
"""Limit of a head's queries, keys and values; a thread's scratch holds those of sixteen tokens several times."""
_MAX_TAPS = 64
"""Limit of a convolution's taps; a thread's scratch holds the weights and inputs of all taps."""


def gate_heads(x: torch.Tensor, gate: torch.Tensor | None, size: int | None = None) -> torch.Tensor:
    """Compute `x * sigmoid(gate)` with contiguous heads in the output; `gate` may be [T, heads], one per head.

    # 2 x [T, heads, dim] -> [T, heads, dim], or [T, heads, size] with zeros after each head
    """
    runtime = current()
    num_tokens, heads, dim = x.shape
    size = size or dim
    out = runtime.rows(num_tokens, heads * size)
    arguments = structures.GateHeads(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        pointer(gate),
        0 if gate is None else gate.stride(0),
        0 if gate is None else gate.stride(1),
        out.data_ptr(),
        out.stride(0),
        size,
        heads,
        dim,
        gate is not None and gate.dim() == 2,
        size - dim,
    )
    runtime.run(arguments, Step(num_tokens=num_tokens), (x, gate, out))
    return out.view(num_tokens, heads, size)


def supports(
    x: torch.Tensor, conv: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor, *, key_heads: int
) -> bool:
    """Whether `delta_net` supports these shapes and dtypes."""
    channels, kernel = conv.shape[0], conv.shape[-1]
    return (
        runs(x, conv, inputs)
        and states.dtype is torch.float32
        and states.shape[3] % 16 == 0
        and channels // key_heads <= _MAX_CHANNELS
        and kernel <= _MAX_TAPS
    )


def delta_net(
    x: torch.Tensor,
    ba: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    inputs: torch.Tensor,
    states: torch.Tensor,
    step: Step,
    *,
    key_heads: int,
) -> torch.Tensor:
    """Run the convolution, the gated delta rule and the gated norm over each row's tokens; update `inputs`, `states`.

    # x [T, key_heads * 2 * (key_dim + group * value_dim)], ba [T, key_heads * 2 * group], conv [channels, 1, kernel],
    # a_log and dt_bias [value heads], inputs [slots, channels, kernel - 1],
    # states [slots, value heads, key_dim, value_dim] float32 -> [T, value heads * value_dim]
    """
    runtime = current()
    _, heads, key_dim, value_dim = states.shape
    weight, eps = norm
    out = runtime.rows(len(x), heads * value_dim)
    arguments = structures.DeltaNet(
        x.data_ptr(),
        x.stride(0),
        ba.data_ptr(),
        ba.stride(0),
        conv.data_ptr(),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        weight.data_ptr(),
        eps,
        inputs.data_ptr(),
        states.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        key_heads,
        heads // key_heads,
        key_dim,
        value_dim,
        conv.shape[-1],
    )
    runtime.run(arguments, step, (x, ba, conv, a_log, dt_bias, weight, inputs, states, out))
    return out


def rules(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether `delta_rule` supports these shapes and dtypes."""
    _, _, key_dim, value_dim = states.shape
    is_sized = value_dim % 16 == 0 and 2 * key_dim + value_dim <= _MAX_CHANNELS
    return runs(x, a, b) and states.dtype is torch.float32 and is_sized


def delta_rule(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    step: Step,
    *,
    key_heads: int,
    most: float,
    bound: float = 0.0,
) -> torch.Tensor:
    """Update each row's state by the row's tokens in order, and return each token's output.

    `bound`: of the logarithms of decays, of which each dimension of a key then has one; 0 if they have no bound.

    # x [T, key_heads * 2 * key_dim + heads * value_dim], a [T, heads * decays], b [T, heads], a_log [heads] and
    # dt_bias [heads * decays] float32, states [slots, heads, key_dim, value_dim] float32 -> [T, heads * value_dim]
    """
    runtime = current()
    _, heads, key_dim, value_dim = states.shape
    out = runtime.rows(len(x), heads * value_dim)
    arguments = structures.DeltaRule(
        x.data_ptr(),
        x.stride(0),
        a.data_ptr(),
        a.stride(0),
        b.data_ptr(),
        b.stride(0),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        states.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        heads,
        heads // key_heads,
        key_dim,
        value_dim,
        len(dt_bias) // heads,
        most,
        bound,
    )
    runtime.run(arguments, step, (x, a, b, a_log, dt_bias, states, out))
    return out
