"""The product of a gated feed-forward layer (Shazeer, 2020): `activation(gate) * up`. Called by its activation."""

import torch
import triton
import triton.language as tl

from models.kernels.cpu.structures import CLAMPED_SILU, GELU_TANH, SILU
from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of

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


COMPILATIONS = tuple(
    Compilation(
        kernel=gated_kernel,
        variant=f"{dtype} {name}",
        target=target,
        config=config_of("gated", target),
        signature={
            **dict.fromkeys(("gate_up", "out"), f"*{dtype}"),
            **dict.fromkeys(("stride", "features"), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={"ACTIVATION": activation},
        divisible=frozenset({"stride", "features"}),
    )
    for target in TARGETS.values()
    for dtype, name, activation in (
        ("bf16", "silu", SILU),
        ("fp16", "silu", SILU),
        ("bf16", "gelu", GELU_TANH),
        ("bf16", "clamped", CLAMPED_SILU),
    )
)
