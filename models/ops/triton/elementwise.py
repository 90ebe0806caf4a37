"""Row-wise layers: norms (Zhang and Sennrich, 2019; Ba, 2016) and activations, gated ones included (Shazeer, 2020).

The norm is fused with the residual sum before it or after it.
"""

import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of, target_of
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.triton.specializations import in_one_form
from models.ops.types import CLAMPED_SILU, CLIPPED_SILU, GELU, GELU_TANH, RELU, SILU
from models.ops.weight_formats import FP8_GROUP, RoundedRows

PLAIN, ADD_NORM, NORM_ADD = 0, 1, 2
"""What becomes of the residual: there is none; it is added to first, and kept; the norm is added to it."""
_ADD_NORM, _NORM_ADD = tl.constexpr(ADD_NORM), tl.constexpr(NORM_ADD)


@triton.jit
def load_some(pointers, exists):
    """The numbers that exist, and zeros for others.

    `exists`: None where all do, as a mask costs registers and, on AMD, branches.
    """
    if exists is None:  # noqa: SIM108, Triton types both branches of an expression
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=exists, other=0.0)
    return loaded


@triton.jit
def largest_of_groups(groups):
    """The largest magnitude of each group; infinity where one is NaN, so that what the group is part of is not finite.

    # [ROWS, GROUPS, DEPTH] or [GROUPS, DEPTH] float32, without the last dimension
    """
    return tl.max(tl.where(groups == groups, tl.abs(groups), float("inf")), len(groups.shape) - 1)


@triton.jit
def store_rounded(
    values,  # [ROWS, TILE], as they were rounded to their type; zero where not `inside`
    codes,  # [.., size] FP8
    scales,  # [.., groups] float32
    rows,  # [ROWS, 1] int64
    is_row,  # [ROWS, 1]
    first,  # column of the tile
    size,
    LARGEST: tl.constexpr,  # Finite number of the FP8
    DEPTH: tl.constexpr,  # Of a group
):
    """Writes the codes and the scales of whole groups of each row, the same bits as `quantize_groups`."""
    ROWS: tl.constexpr = values.shape[0]
    TILE: tl.constexpr = values.shape[1]
    grouped = tl.reshape(values.to(tl.float32), [ROWS, TILE // DEPTH, DEPTH])
    largest = largest_of_groups(grouped)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    # Division may round the largest value past the end.
    rounded = tl.reshape(tl.clamp(grouped / scale[:, :, None], -LARGEST, LARGEST), [ROWS, TILE])
    columns = first + tl.arange(0, TILE)[None, :]
    groups = first // DEPTH + tl.arange(0, TILE // DEPTH)[None, :]
    num_groups = tl.cdiv(size, DEPTH)
    tl.store(codes + rows * size + columns, rounded.to(codes.dtype.element_ty), mask=is_row & (columns < size))
    tl.store(scales + rows * num_groups + groups, scale, mask=is_row & (groups < num_groups))


@jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,  # [num_rows, SIZE]
    residual,  # [num_rows, SIZE], the sum is written there where MODE is ADD_NORM; any pointer where it is PLAIN
    weight,  # [WEIGHT_ROWS, SIZE]
    bias,  # [WEIGHT_ROWS, SIZE]; any pointer where there is none
    out,  # [num_rows, SIZE]
    x_stride,
    residual_stride,
    num_rows,
    eps,
    x_scale,  # Of what is added to the residual
    sum_scale,  # Of the sum of the norm and the residual
    # Last, because arguments between others that are not read delay the loads of those after them.
    codes,  # [num_rows, SIZE] FP8, where LARGEST is not 0; any pointer elsewhere
    scales,  # [num_rows, groups] float32; any pointer likewise
    SIZE: tl.constexpr,
    TILE: tl.constexpr,  # SIZE filled up to a power of two
    OFFSET: tl.constexpr,  # Added to the weight
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,  # Rows are shifted to mean 0 first
    IS_SCALED: tl.constexpr,  # Whether `x_scale` or `sum_scale` is not 1
    WEIGHT_ROWS: tl.constexpr,  # By which the rows have weights in turn
    LARGEST: tl.constexpr,  # Finite number of the FP8 that the result is rounded to as well; 0: it is not
    DEPTH: tl.constexpr,  # Of a group that is rounded by its largest value
    ROWS: tl.constexpr,
):
    """ROWS whole rows, read once and kept in registers in float32. Grid: (tiles of rows,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    inside = (rows < num_rows) & (columns < SIZE)
    rows = rows.to(tl.int64)
    values = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0)
    if MODE == _ADD_NORM:
        residual_rows = residual + rows * residual_stride + columns
        # The next residual is rounded, and the norm is of what was kept.
        added = values.to(tl.float32)
        if IS_SCALED:
            added = (added * x_scale).to(values.dtype).to(tl.float32)
        values = (added + tl.load(residual_rows, mask=inside, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(residual_rows, values, mask=inside)
    exact = values.to(tl.float32)
    if IS_CENTRED:
        exact = tl.where(inside, exact - (tl.sum(exact, 1) / SIZE)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / SIZE + eps)[:, None]
    weight_index = columns
    if WEIGHT_ROWS > 1:
        weight_index = rows % WEIGHT_ROWS * SIZE + columns
    weights = tl.load(weight + weight_index, mask=columns < SIZE, other=0.0).to(tl.float32) + OFFSET
    normed = exact * scale * weights
    if HAS_BIAS:
        normed += tl.load(bias + weight_index, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = normed.to(out.dtype.element_ty)
    if MODE == _NORM_ADD:
        kept = tl.load(residual + rows * residual_stride + columns, mask=inside, other=0.0)
        normed = (kept.to(tl.float32) + normed.to(tl.float32)).to(out.dtype.element_ty)
        if IS_SCALED:
            normed = (normed.to(tl.float32) * sum_scale).to(out.dtype.element_ty)
    tl.store(out + rows * SIZE + columns, normed, mask=inside)
    if LARGEST > 0:
        # Past a row's end a norm is zero, as its weight is there.
        store_rounded(normed, codes, scales, rows, rows < num_rows, 0, SIZE, LARGEST, DEPTH)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    residual: torch.Tensor | None = None,
    mode: int = PLAIN,
    x_scale: float = 1.0,
    sum_scale: float = 1.0,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """The norm of a `NormWeight`, in float32, rounded once.

    # [..., size] -> [..., size]; with weights [heads, size], x [..., heads, size]

    `ADD_NORM`: of `x_scale * x + residual`, rounded, which `residual` becomes. `NORM_ADD`: and `residual` added to it,
    rounded again, times `sum_scale`. The rows of `residual` must lie at one stride. `rounded`: memory that the result
    is written to in FP8 as well.
    """
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    num_rows, size = rows.shape
    out = rows.new_empty(num_rows, size)
    read = in_one_form(rows)
    residual_rows = read if residual is None else residual if residual.dim() == 2 else residual.view(-1, size)
    launch = launch_of("rms_norm", x.device, size=size)
    rms_norm_kernel[(cdiv(num_rows, launch.blocks["ROWS"]),)](
        read,
        residual_rows,
        weight,
        weight if bias is None else bias,
        out,
        read.stride(0),
        residual_rows.stride(0),
        num_rows,
        eps,
        x_scale,
        sum_scale,
        out if rounded is None else rounded.codes,
        out if rounded is None else rounded.scales,
        SIZE=size,
        TILE=next_power_of_2(size) if rounded is None else max(FP8_GROUP, next_power_of_2(size)),
        OFFSET=offset,
        MODE=mode,
        HAS_BIAS=bias is not None,
        IS_CENTRED=is_centred,
        IS_SCALED=(x_scale, sum_scale) != (1.0, 1.0),
        WEIGHT_ROWS=weight.shape[0] if weight.dim() == 2 else 1,
        LARGEST=0.0 if rounded is None else target_of(x.device).fp8_max,
        DEPTH=FP8_GROUP,
        **launch.keywords,
    )
    return out if rows is x else out.view(x.shape)


# The activation of a feed-forward layer: `activation(gate) * up`, or without `up` the activation alone.

_SILU, _GELU_TANH, _CLAMPED_SILU = tl.constexpr(SILU), tl.constexpr(GELU_TANH), tl.constexpr(CLAMPED_SILU)
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_GELU, _RELU, _CLIPPED_SILU = tl.constexpr(GELU), tl.constexpr(RELU), tl.constexpr(CLIPPED_SILU)


@triton.jit
def gated_product(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """In float32; `alpha` and `limit` are those of `Gating`. Called by kernels that have gate and up in registers."""
    if ACTIVATION == _SILU:
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == _GELU_TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    if ACTIVATION == _CLAMPED_SILU or ACTIVATION == _CLIPPED_SILU:  # noqa: SIM109, Triton has no `in`
        # A NaN stays one, so that a broken row is found.
        gate = tl.minimum(gate, limit, propagate_nan=_ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=_ALL), limit, propagate_nan=_ALL)
        if ACTIVATION == _CLAMPED_SILU:
            return (up + 1.0) * gate * tl.sigmoid(alpha * gate)
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == _GELU:
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    rest = tl.maximum(gate, 0.0, propagate_nan=_ALL)
    if ACTIVATION == _RELU:
        return rest * up
    return rest * rest * up


@jit
def gated_kernel(
    gates,  # [rows, features]
    ups,  # [rows, features]; any pointer where there are none
    out,  # [rows, features]
    stride,
    up_stride,
    features,
    alpha,
    limit,
    codes,  # [rows, features] FP8, where LARGEST is not 0; any pointer elsewhere
    scales,  # [rows, groups] float32; any pointer likewise
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,  # Whether there are ups
    LARGEST: tl.constexpr,  # As in the norm
    DEPTH: tl.constexpr,
    FEATURES: tl.constexpr,  # Of one program
):
    """A run of one row's features. Grid: (rows, runs)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = columns < features
    gate = tl.load(gates + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.full([FEATURES], 1.0, tl.float32)
    if IS_GATED:
        up = tl.load(ups + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    product = gated_product(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * features + columns, product, mask=inside)
    if LARGEST > 0:
        first = tl.program_id(1) * FEATURES
        rows = row + tl.zeros([1, 1], tl.int64)
        # An activation of zero may not be zero.
        values = tl.where(inside, product, 0.0)[None, :]
        store_rounded(values, codes, scales, rows, rows >= 0, first, features, LARGEST, DEPTH)


def gated(
    gate_up: torch.Tensor,
    activation: int,
    *,
    alpha: float = 0.0,
    limit: float = 0.0,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """`SILU`: `silu(gate) * up`; `GELU_TANH`: gelu by tanh; `CLAMPED_SILU`: gpt-oss's; and so on.

    In float32, rounded once. `rounded`: as in `rms_norm`.

    # [..., 2 * features], gates before what they gate -> [..., features]
    """
    rows = gate_up if gate_up.dim() == 2 else gate_up.flatten(0, -2)
    gate, up = rows.chunk(2, dim=1)
    out = activated(gate, activation, up, alpha=alpha, limit=limit, rounded=rounded)
    return out if rows is gate_up else out.view(*gate_up.shape[:-1], -1)


def activated(
    gate: torch.Tensor,
    activation: int,
    up: torch.Tensor | None,
    *,
    alpha: float = 0.0,
    limit: float = 0.0,
    rounded: RoundedRows | None = None,
) -> torch.Tensor:
    """`activation(gate) * up`, or without `up` the activation alone. # [rows, features] each"""
    num_rows, features = gate.shape
    gate, up = in_one_form(gate), None if up is None else in_one_form(up)
    out = gate.new_empty(num_rows, features)
    launch = launch_of("gated", gate.device, rounds=rounded is not None)
    gated_kernel[(num_rows, cdiv(features, launch.blocks["FEATURES"]))](
        gate,
        gate if up is None else up,
        out,
        gate.stride(0),
        0 if up is None else up.stride(0),
        features,
        alpha,
        limit,
        out if rounded is None else rounded.codes,
        out if rounded is None else rounded.scales,
        ACTIVATION=activation,
        IS_GATED=up is not None,
        LARGEST=0.0 if rounded is None else target_of(gate.device).fp8_max,
        DEPTH=FP8_GROUP,
        **launch.keywords,
    )
    return out
