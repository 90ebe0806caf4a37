"""Layouts of quantized weights in a GPU's memory, in plain torch: FP8, MXFP4, and 4-bit integers with zero points.

FP8 weights have codes and float32 scales. 4-bit weights are packed two to a byte: 32 bytes hold 64 inputs, the first
32 in their low nibbles, the next 32 in their high nibbles. `Codes` are a checkpoint's rows before they are packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import NamedTuple, TypeAlias

import torch

from models.ops.types import FP8_GROUP

RUN = 32
"""Consecutive inputs in one nibble of consecutive bytes; a 4-bit weight has an even number of such runs."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Rows: TypeAlias = int | slice | EllipsisType | tuple[int | slice, ...]
"""Some rows of a weight, or of a stack of them."""


class FP8Weight(NamedTuple):
    """A weight in the FP8 of its device, with its scales."""

    codes: torch.Tensor  # [N, K] float8, or [experts, N, K]
    scales: torch.Tensor
    """float32: [N / 128, K / 128], rounded up, of blocks; [N, K / 128] of 128 inputs of a row; [N] of rows; [1].

    Of a stack: [experts, N, K / 128] or [experts, N].
    """

    @property
    def is_blocked(self) -> bool:
        """Whether a scale is of 128 inputs."""
        return self.scales.dim() == self.codes.dim()

    @property
    def scale_rows(self) -> int:
        """Output features that share a scale; 0: all. Not of a stack, where each has its own."""
        num_scales = self.scales.shape[0]
        return 0 if num_scales == 1 else 1 if num_scales == self.codes.shape[0] else FP8_GROUP

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers. # [.., N, K]"""
        scales, (outputs, inputs) = self.scales, self.codes.shape[-2:]
        if not self.is_blocked:
            return (self.codes.float() * scales[..., None]).to(dtype)
        rows = 1 if scales.shape[-2] == outputs else FP8_GROUP
        scales = scales.repeat_interleave(rows, -2).repeat_interleave(FP8_GROUP, -1)
        return (self.codes.float() * scales[..., :outputs, :inputs]).to(dtype)

    @property
    def kind(self) -> str:
        """As `Codes.kind`."""
        return "fp8"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [.., N, K]"""
        return self.codes.shape

    def part(self, at: Rows) -> "FP8Weight":
        """Some rows of a weight with a scale for each row or for 128 inputs of it."""
        return FP8Weight(self.codes[at], self.scales[at])


def to_flavour(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """OCP codes as `dtype`, the same numbers: e4m3fnuz reads the same bits as half of them, and has no negative zero.

    # [N, K] float8_e4m3fn
    """
    if dtype is torch.float8_e4m3fn:
        return codes, scales
    bits = codes.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz), scales * 2


class FourBitWeight(NamedTuple):
    """A weight of 4-bit codes with a scale a group of neighbouring inputs of an output feature."""

    packed: torch.Tensor  # [.., out, in / 2] uint8, as `pack_nibbles` makes it
    scales: torch.Tensor
    """[.., out, groups] of the model's type; with MXFP4 the exponents of powers of two, uint8, biased by 127."""
    zeros: torch.Tensor | None = None
    """[.., out, groups] uint8, the code that means 0; None with MXFP4."""

    @property
    def kind(self) -> str:
        """As `Codes.kind`."""
        return "mxfp4" if self.zeros is None else "int4"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [.., out, in]"""
        return torch.Size((*self.packed.shape[:-1], 2 * self.packed.shape[-1]))

    def part(self, at: Rows) -> "FourBitWeight":
        """Some rows."""
        return FourBitWeight(self.packed[at], self.scales[at], None if self.zeros is None else self.zeros[at])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers. # [.., out, in]"""
        codes = unpack_nibbles(self.packed).long()
        size = codes.shape[-1] // self.scales.shape[-1]
        if self.zeros is None:
            values = torch.tensor(_E2M1, device=codes.device)[codes & 7] * (1 - (codes >> 3) * 2)
            scales = torch.exp2(self.scales.float() - 127)
        else:
            values = (codes - self.zeros.long().repeat_interleave(size, -1)).float()
            scales = self.scales.float()
        return (values * scales.repeat_interleave(size, -1)).to(dtype)


QuantizedWeight: TypeAlias = FP8Weight | FourBitWeight
"""A weight, or a stack of them, as the kernels read it."""


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


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of one quantized weight."""

    kind: str
    """`fp8`, `int4`, `int8` (on a CPU) or `mxfp4`."""
    codes: torch.Tensor  # [rows, inputs] float8_e4m3fn, int8, or uint8 below 16
    scales: torch.Tensor
    """[rows, groups] of neighbouring inputs: floats, or with MXFP4 uint8 exponents of two, biased by 127."""
    zeros: torch.Tensor | None
    """[rows, groups], of the dtype of the codes: the code that means 0, with int4 and int8."""
    width: int
    """Inputs of a group; the last of FP8 may have fewer."""
    dense: Callable[[], torch.Tensor]
    """Computes the same rows and columns dequantized, as the model uses them without kernels."""
    order: torch.Tensor | None = None
    """[inputs] int32, the layer's input that each column multiplies, on a CPU; None: the columns are in its order."""

    def part(self, dim: int, first: int, last: int) -> "Codes | None":
        """Some rows or columns; None where a group would be cut, or two runs of 4-bit codes."""
        dense = self.dense

        def slice_of_dense() -> torch.Tensor:
            return dense().narrow(dim, first, last - first)

        if dim == 0:
            some = slice(first, last)
            zeros = None if self.zeros is None else self.zeros[some]
            return replace(self, codes=self.codes[some], scales=self.scales[some], zeros=zeros, dense=slice_of_dense)
        inputs = self.codes.shape[1]
        if self.order is not None and last - first < inputs:
            return None
        groups = slice(0, self.scales.shape[1])
        if self.width < inputs:
            if first % self.width or (last % self.width and last != inputs):
                return None
            if self.kind != "fp8" and (last - first) % (2 * RUN):
                return None
            groups = slice(first // self.width, -(-last // self.width))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(
            self, codes=self.codes[:, first:last], scales=self.scales[:, groups], zeros=zeros, dense=slice_of_dense
        )
