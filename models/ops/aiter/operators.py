"""Calls of the aiter library for norms, activations, products and experts, where `aiter.runs` is true."""

from typing import NamedTuple

import torch

from models.ops.aiter.library import function, member
from models.ops.weight_formats import FP8_GROUP


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
    """`x @ weight.T + bias`, by the kernel that was tuned for the sizes. # [rows, inputs] -> [rows, outputs]"""
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
    """Scales of blocks, from scales of rows that are equal within each block; None where they are not.

    # [..., outputs, groups] float32 -> [..., outputs / 128, groups]
    """
    *stack, rows, groups = scales.shape
    if rows % FP8_GROUP:
        return None
    by_block = scales.view(*stack, rows // FP8_GROUP, FP8_GROUP, groups)
    first = by_block[..., :1, :]
    return first.squeeze(-2).contiguous() if bool((by_block == first).all()) else None


# Mixtures of experts, with weights in the library's shuffled layout.

TILE = 16, 32
"""Rows and columns of a tile in which weights are shuffled."""
_LAYOUT = 16, 16
"""The library's name for these tiles."""


class ExpertWeights(NamedTuple):
    """Shuffled weights of a stack of experts; FP8 weights have a scale for each block of 128 x 128."""

    w13: torch.Tensor  # [experts, 2 * inner, hidden], gate before up
    w2: torch.Tensor  # [experts, hidden, inner]
    w13_scales: torch.Tensor | None = None  # [experts, 2 * inner / 128, hidden / 128] float32
    w2_scales: torch.Tensor | None = None  # [experts, hidden / 128, inner / 128] float32


def can_shuffle(weight: torch.Tensor) -> bool:
    """Whether a stack divides into whole tiles. # [experts, rows, columns]"""
    _, rows, columns = weight.shape
    return rows % TILE[0] == 0 and columns % TILE[1] == 0


def shuffle(weight: torch.Tensor) -> None:
    """Reorder each expert's weight, in place, as the library's kernels load it.

    # [experts, rows, columns]
    """
    for one in weight:
        one.copy_(function("shuffle_weight")(one.clone(), layout=_LAYOUT))
    # An attribute of the library, without which some releases assume that weights are not shuffled.
    weight.is_shuffled = True  # type: ignore[attr-defined]


def experts(hidden: torch.Tensor, weights: ExpertWeights, routed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, whose gates are SiLU. # [tokens, hidden] -> [tokens, hidden]

    `routed` [tokens, top_k] float32; `ids` [tokens, top_k] int32.
    """
    quant = "QuantType.No" if weights.w13_scales is None else "QuantType.per_128x128"
    out: torch.Tensor = function("fused_moe")(
        hidden,
        weights.w13,
        weights.w2,
        routed,
        ids,
        activation=member("ActivationType.Silu"),
        quant_type=member(quant),
        w1_scale=weights.w13_scales,
        w2_scale=weights.w2_scales,
    )
    return out
