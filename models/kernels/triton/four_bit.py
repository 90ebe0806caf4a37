"""How 4-bit weights lie for the kernels, and what their codes mean. Used by the dense and by the experts' products.

`[.., out, in / 2]` bytes: 32 of them hold 64 inputs, the first 32 in their low nibbles, the next in their high ones. A
tile of bytes is then two tiles of weights whose inputs lie in a row, and loads of activations stay wide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

RUN = 32
"""Inputs that lie in a row; a weight has an even number of such runs."""


class FourBitWeight(NamedTuple):
    """A weight of 4-bit codes with a scale a group of neighbouring inputs of an output feature."""

    packed: torch.Tensor  # [.., out, in / 2] uint8, as `pack_nibbles` makes it
    scales: torch.Tensor
    """[.., out, groups] of the model's type; with MXFP4 the exponents of powers of two, uint8, biased by 127."""
    zeros: torch.Tensor | None = None
    """[.., out, groups] uint8, the code that means 0; None with MXFP4."""


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """# [.., in] uint8 below 16, `in` a multiple of 64 -> [.., in / 2] uint8"""
    pairs = codes.view(*codes.shape[:-1], -1, 2, RUN)
    return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`. # [.., in / 2] uint8 -> [.., in] uint8"""
    runs = packed.view(*packed.shape[:-1], -1, 1, RUN)
    return torch.cat((runs & 15, runs >> 4), -2).flatten(-3)


def mxfp4_of(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of what was MXFP4 before it was made dense: the same numbers again.

    # [.., in], `in` a multiple of 32 -> [.., in] uint8 below 16, [.., in / 32] uint8

    The exponent is the one with which a group's largest number is a code of 2 bits of exponent: all numbers of the
    group that were codes with a larger exponent are codes with this one too, for both steps and range are E2M1's.
    """
    groups = dense.float().reshape(*dense.shape[:-1], -1, RUN)
    _, exponents = torch.frexp(groups.abs().amax(-1))
    # frexp's mantissa is from 0.5: the largest is 4 or 6 times the scale. A group of zeros has any scale.
    exponents = (exponents - 3 + 127).clamp(0, 254)
    magnitudes = groups.abs() / torch.exp2((exponents - 127).float())[..., None]
    codes = torch.where(
        magnitudes <= 2, magnitudes * 2, torch.where(magnitudes <= 4, magnitudes + 2, magnitudes / 2 + 4)
    )
    codes = codes.round().to(torch.uint8) | (torch.signbit(groups).to(torch.uint8) << 3)
    return codes.flatten(-2), exponents.to(torch.uint8)


@triton.jit
def mxfp4_values(codes, exponents, dtype: tl.constexpr):
    """The numbers of E2M1 codes times powers of two (OCP microscaling formats 1.0), exact in bfloat16.

    A code's exponent and first bit of mantissa, moved to float32's places, are the number but for the bias; 0.5, which
    has no leading one, is put right by hand.
    """
    magnitude = (codes & 7).to(tl.int32)
    bits = tl.where(magnitude > 1, (magnitude << 22) + (126 << 23), magnitude * (126 << 23))
    bits = bits | ((codes & 8).to(tl.int32) << 28)
    scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * scale).to(dtype)


@triton.jit
def integer_values(codes, zeros, scales, dtype: tl.constexpr):
    """`(code - zero) * scale`, rounded once."""
    steps = codes.to(tl.int32) - zeros.to(tl.int32)
    return (steps.to(tl.float32) * scales.to(tl.float32)).to(dtype)


@triton.jit
def add_runs(
    total,  # [ROWS, COLUMNS] float32
    low_x,  # [ROWS, DEPTH / 2], the inputs of low nibbles
    high_x,
    codes_at,  # [COLUMNS, RUNS, 32] of bytes
    scales_at,  # [COLUMNS, 1] of each column's first
    zeros_at,
    run,  # [1, RUNS], which 64 inputs of the weight's
    has_run,  # [1, RUNS]
    IS_MXFP4: tl.constexpr,
    SUBGROUPS: tl.constexpr,  # Runs of 32 inputs that share a scale
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # Inputs at a time, a multiple of 64
):
    """`total` and the product of one step: a tile of bytes is two of weights."""
    codes = tl.load(codes_at, mask=has_run[:, :, None], other=0)
    first, second = run * 2 // SUBGROUPS, (run * 2 + 1) // SUBGROUPS
    low_scale = tl.load(scales_at + first, mask=has_run, other=0)[:, :, None]
    high_scale = low_scale
    if SUBGROUPS % 2:
        high_scale = tl.load(scales_at + second, mask=has_run, other=0)[:, :, None]
    if IS_MXFP4:
        low = mxfp4_values(codes & 15, low_scale, low_x.dtype)
        high = mxfp4_values(codes >> 4, high_scale, low_x.dtype)
    else:
        low_zero = tl.load(zeros_at + first, mask=has_run, other=0)[:, :, None]
        high_zero = low_zero
        if SUBGROUPS % 2:
            high_zero = tl.load(zeros_at + second, mask=has_run, other=0)[:, :, None]
        low = integer_values(codes & 15, low_zero, low_scale, low_x.dtype)
        high = integer_values(codes >> 4, high_zero, high_scale, low_x.dtype)
    low, high = tl.reshape(low, [COLUMNS, DEPTH // 2]), tl.reshape(high, [COLUMNS, DEPTH // 2])
    total = tl.dot(low_x, tl.trans(low), total, input_precision="ieee")
    return tl.dot(high_x, tl.trans(high), total, input_precision="ieee")
