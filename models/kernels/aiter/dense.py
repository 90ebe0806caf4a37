"""The library's norms, activations and products. Called by the layers of these names, where `aiter.runs`."""

import torch

from models.kernels.aiter.library import function
from models.kernels.types import FP8_GROUP


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The root-mean-square norm. # [rows, size], [size] -> [rows, size]"""
    normed: torch.Tensor = function("rmsnorm2d_fwd")(x, weight, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the sum of `x` and `residual`, and that sum. # [rows, size] each"""
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    function("rmsnorm2d_fwd_with_add")(normed, x, residual, summed, weight, eps)
    return normed, summed


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the two side by side. # [rows, 2 * size] -> [rows, size]"""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    function("silu_and_mul")(out, gate_up)
    return out


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, by tanh, of the two side by side. # [rows, 2 * size] -> [rows, size]"""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    function("gelu_tanh_and_mul")(out, gate_up)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`, by what was tuned for the sizes. # [rows, inputs] -> [rows, outputs]"""
    out: torch.Tensor = function("tgemm.mm")(x, weight, bias)
    return out


def fp8_linear(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`x @ weight.T` of FP8, with a scale for 128 values of a row, and for 128 x 128 of the weight.

    # -> [rows, outputs] of `dtype`

    `codes` [rows, inputs], `scales` [rows, inputs / 128] float32; `weight` [outputs, inputs], `blocks`
    [outputs / 128, inputs / 128] float32.
    """
    out: torch.Tensor = function("gemm_a8w8_blockscale")(codes, weight, scales, blocks, dtype)
    return out


def scale_blocks(scales: torch.Tensor) -> torch.Tensor | None:
    """Scales of blocks, from scales of each row that are the same in all rows of a block; else None.

    # [..., outputs, groups] float32 -> [..., outputs / 128, groups]
    """
    *stack, rows, groups = scales.shape
    if rows % FP8_GROUP:
        return None
    by_block = scales.view(*stack, rows // FP8_GROUP, FP8_GROUP, groups)
    first = by_block[..., :1, :]
    return first.squeeze(-2).contiguous() if bool((by_block == first).all()) else None
