"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2025) for one token of each sequence, and the norm behind it.

The arithmetic is that of `models.layers.gated_delta_rule`. Queries and keys come as the convolution left them and get
unit length here; decay and share come of the projection. States are float32, in their slots, and changed there.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of

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


@triton.jit
def gated_delta_step_kernel(
    convolved,  # [T, channels]: queries and keys of all key heads, values of all value heads
    ba,  # [T, key heads * 2 * GROUP]
    a_log,  # [value heads]
    dt_bias,  # [value heads]
    states,  # [slots, value heads, KEY, VALUE] float32
    slots,  # [B] int64, -1 for a row that is none
    out,  # [T, value heads, VALUE]
    ba_stride,
    num_heads,
    num_channels,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,  # Value heads of a key head
    KEY_TILE: tl.constexpr,  # KEY filled up to a power of two
    VALUES: tl.constexpr,  # Of one program
):
    """One token of one value head: a tile [KEY, VALUES] of its state. Grid: (tiles of values, value heads, B)."""
    token, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    keys, values = tl.arange(0, KEY_TILE), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = keys < KEY, values < VALUE
    row = convolved + token.to(tl.int64) * num_channels
    key_head, key_channels = head // GROUP, num_heads // GROUP * KEY
    q = unit_rows(row + key_head * KEY + keys, has_key, KEY**-0.5)
    k = unit_rows(row + key_channels + key_head * KEY + keys, has_key, 1.0)
    v = tl.load(row + 2 * key_channels + head * VALUE + values, mask=has_value, other=0.0).to(tl.float32)
    decay, share = gates(ba, ba_stride, a_log, dt_bias, token, head, True, GROUP)

    at = states + (slot * num_heads + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    mask = has_key[:, None] & has_value[None, :]
    state = tl.load(at, mask=mask, other=0.0) * tl.exp(decay)
    held = tl.sum(state * k[:, None], 0)
    state += k[:, None] * ((v - held) * share)[None, :]
    tl.store(at, state, mask=mask)
    read = tl.sum(state * q[:, None], 0)
    place = (token.to(tl.int64) * num_heads + head) * VALUE
    tl.store(out + place + values, read.to(out.dtype.element_ty), mask=has_value)


@triton.jit
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
    place = (token * num_heads + head) * VALUE + values
    x = tl.load(read + place, mask=mask, other=0.0).to(tl.float32)
    part: tl.constexpr = 2 * KEY + 2 * GROUP * VALUE
    at = projected + token * stride + head // GROUP * part + 2 * KEY + (GROUP + head % GROUP) * VALUE + values
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE + eps)
    # Rounded between, as the norm's output is.
    x = x.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + values, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=mask)


def delta_step(
    convolved: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One token of each of B sequences through its state, which is brought up to date; what queries read to `out`.

    # convolved [B, channels], ba [B, key heads * 2 * group], a_log and dt_bias [value heads],
    # states [slots, value heads, key_dim, value_dim] float32, slots [B] int64, -1 for a row that is none,
    # out [B, value heads, value_dim]
    """
    _, heads, key_dim, value_dim = states.shape
    launch = launch_of("gated_delta_step", convolved.device)
    gated_delta_step_kernel[(cdiv(value_dim, launch.blocks["VALUES"]), heads, len(out))](
        convolved,
        ba,
        a_log,
        dt_bias,
        states,
        slots,
        out,
        ba.stride(0),
        heads,
        convolved.shape[1],
        KEY=key_dim,
        VALUE=value_dim,
        GROUP=heads // key_heads_of(convolved, states),
        KEY_TILE=max(16, next_power_of_2(key_dim)),
        **launch.keywords,
    )


def key_heads_of(convolved: torch.Tensor, states: torch.Tensor) -> int:
    """How many there are beside the value heads of these channels."""
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


_STEP = dict.fromkeys(("convolved", "ba", "a_log", "dt_bias", "out"), "*bf16")
_NORM = dict.fromkeys(("read", "projected", "weight", "out"), "*bf16")
COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        Compilation(
            kernel=gated_delta_step_kernel,
            variant="bf16 128x128",
            target=target,
            config=config_of("gated_delta_step", target),
            signature={**_STEP, "states": "*fp32", "slots": "*i64"}
            | dict.fromkeys(("ba_stride", "num_heads", "num_channels"), "i32"),
            constexprs={"KEY": 128, "VALUE": 128, "GROUP": 2, "KEY_TILE": 128},
            divisible=frozenset({"num_channels"}),
            large=frozenset({"states"}),
            # Two gates and, of the token's channels, what one thread has.
            narrow_loads=24,
        ),
        Compilation(
            kernel=gated_norm_kernel,
            variant="bf16 128",
            target=target,
            config=config_of("gated_norm", target),
            signature={**_NORM, "stride": "i32", "num_heads": "i32", "eps": "fp32"},
            constexprs={"KEY": 128, "VALUE": 128, "GROUP": 2, "VALUE_TILE": 128},
            divisible=frozenset({"stride"}),
            has_wide_loads=False,
        ),
    )
)
