"""Row-wise layers: root-mean-square norm (Zhang and Sennrich, 2019) and gated activations (Shazeer, 2020).

The norm is fused with the residual sum before it or after it.
"""

import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.types import GELU_TANH, SILU

PLAIN, ADD_NORM, NORM_ADD = 0, 1, 2
"""What becomes of the residual: there is none; it is added to first, and kept; the norm is added to it."""
_ADD_NORM, _NORM_ADD = tl.constexpr(ADD_NORM), tl.constexpr(NORM_ADD)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,  # [num_rows, SIZE]
    residual,  # [num_rows, SIZE], the sum is written there where MODE is ADD_NORM; any pointer where it is PLAIN
    weight,  # [SIZE]
    out,  # [num_rows, SIZE]
    x_stride,
    residual_stride,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # SIZE filled up to a power of two
    OFFSET: tl.constexpr,  # Added to the weight
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS whole rows, read once and kept in registers in float32. Grid: (tiles of rows,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    inside = (rows < num_rows) & (columns < SIZE)
    rows = rows.to(tl.int64)
    values = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0)
    if MODE == _ADD_NORM:
        beside = residual + rows * residual_stride + columns
        # The next residual is rounded, and the norm is of what was kept.
        values = (values.to(tl.float32) + tl.load(beside, mask=inside, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(beside, values, mask=inside)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / SIZE + eps)[:, None]
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32) + OFFSET
    normed = (exact * scale * weights).to(out.dtype.element_ty)
    if MODE == _NORM_ADD:
        kept = tl.load(residual + rows * residual_stride + columns, mask=inside, other=0.0)
        normed = (kept.to(tl.float32) + normed.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + rows * SIZE + columns, normed, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    mode: int = PLAIN,
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` in float32, rounded once. # [..., size], [size] -> [..., size]

    `ADD_NORM`: of `x + residual`, rounded, which `residual` becomes. `NORM_ADD`: and `residual` added to it, rounded
    again. The rows of `residual` must lie at one stride.
    """
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    num_rows, size = rows.shape
    out = rows.new_empty(num_rows, size)
    beside = rows if residual is None else residual if residual.dim() == 2 else residual.view(-1, size)
    launch = launch_of("rms_norm", x.device, size=size)
    rms_norm_kernel[(cdiv(num_rows, launch.blocks["ROWS"]),)](
        rows,
        beside,
        weight,
        out,
        rows.stride(0),
        beside.stride(0),
        num_rows,
        eps,
        SIZE=size,
        TILE=next_power_of_2(size),
        OFFSET=offset,
        MODE=mode,
        **launch.keywords,
    )
    return out if rows is x else out.view(x.shape)


# The gated activation of a feed-forward layer: `activation(gate) * up`.

_SILU, _GELU_TANH = tl.constexpr(SILU), tl.constexpr(GELU_TANH)


@triton.jit
def gated_product(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """In float32; `alpha` and `limit` are CLAMPED_SILU's. Called by kernels that have gate and up in registers."""
    if ACTIVATION == _SILU:
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == _GELU_TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


@triton.jit
def gated_kernel(
    gate_up,  # [rows, 2 * features]
    out,  # [rows, features]
    stride,
    features,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    FEATURES: tl.constexpr,  # Of one program
):
    """A run of one row's features. Grid: (rows, runs)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = columns < features
    gates = gate_up + row * stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + features, mask=inside, other=0.0).to(tl.float32)
    product = gated_product(gate, up, alpha, limit, ACTIVATION)
    tl.store(out + row * features + columns, product.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """`SILU`: `silu(gate) * up`; `GELU_TANH`: gelu by tanh; `CLAMPED_SILU`: gpt-oss's. In float32, rounded once.

    # [..., 2 * features], gates before what they gate -> [..., features]
    """
    rows = gate_up if gate_up.dim() == 2 else gate_up.flatten(0, -2)
    num_rows, width = rows.shape
    features = width // 2
    out = rows.new_empty(num_rows, features)
    launch = launch_of("gated", gate_up.device)
    gated_kernel[(num_rows, cdiv(features, launch.blocks["FEATURES"]))](
        rows, out, rows.stride(0), features, alpha, limit, ACTIVATION=activation, **launch.keywords
    )
    return out if rows is gate_up else out.view(*gate_up.shape[:-1], features)
