"""Layouts of quantized weights in a GPU's memory, in plain torch: FP8, MXFP4, and integers of 4 and of 8 bits.

FP8 weights have codes and float32 scales. 4-bit weights have two codes per byte: 32 bytes hold 64 inputs, the first 32
in the low nibbles, the next 32 in the high nibbles. `Codes` are rows of a quantized checkpoint before they are packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import EllipsisType
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

FP8_GROUP = 128
"""Number of inputs that share a scale of an FP8 weight with block scales."""
RUN = 32
"""Number of consecutive inputs in the same nibble of consecutive bytes; a 4-bit weight has an even number of runs."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_NAN = 255
_CHUNK_ELEMENTS = 1 << 18
"""Number of values rounded at a time, so that intermediate values stay in the processor's cache."""

Rows: TypeAlias = int | slice | EllipsisType | tuple[int | slice, ...]
"""An index of some rows of a weight, or of a stack of weights."""


class RoundedRows(NamedTuple):
    """Rows rounded to a device's FP8, with a scale per 128 inputs by their largest magnitude."""

    codes: torch.Tensor  # [M, K] FP8
    scales: torch.Tensor  # [M, groups] float32, factors of the codes

    @classmethod
    def empty(cls, rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> "RoundedRows":
        """Allocate memory for rows that a kernel rounds to `dtype`."""
        groups = -(-inputs // FP8_GROUP)
        return cls(
            torch.empty(rows, inputs, dtype=dtype, device=device),
            torch.empty(rows, groups, dtype=torch.float32, device=device),
        )


class FP8Weight(NamedTuple):
    """A weight in the device's FP8 dtype, with its scales."""

    codes: torch.Tensor  # [N, K] float8, or [experts, N, K]
    scales: torch.Tensor
    """float32: [N / 128, K / 128], rounded up, per block; [N, K / 128] per 128 inputs of a row; [N] per row; or [1].

    In a stack: [experts, N, K / 128] or [experts, N].
    """
    lead: int = 0
    """Columns before the weight's first input, which complete its first group; input rows are padded with zeros."""

    @property
    def is_blocked(self) -> bool:
        """Whether a scale belongs to 128 inputs."""
        return self.scales.dim() == self.codes.dim()

    @property
    def scale_rows(self) -> int:
        """Number of output features that share a scale, 0 for all. In a stack, each has its own."""
        num_scales = self.scales.shape[0]
        return 0 if num_scales == 1 else 1 if num_scales == self.codes.shape[0] else FP8_GROUP

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized values. # [.., N, K]"""
        scales, (outputs, inputs) = self.scales, self.codes.shape[-2:]
        if not self.is_blocked:
            return (self.codes.float() * scales[..., None]).to(dtype)
        rows = 1 if scales.shape[-2] == outputs else FP8_GROUP
        scales = scales.repeat_interleave(rows, -2).repeat_interleave(FP8_GROUP, -1)
        return (self.codes.float() * scales[..., :outputs, :inputs]).to(dtype)[..., self.lead :]

    @property
    def kind(self) -> str:
        """See `Codes.kind`."""
        return "fp8"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [.., N, K]"""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] - self.lead))

    def part(self, at: Rows) -> "FP8Weight":
        """Return some rows of a weight with a scale per row, or per 128 inputs of a row."""
        return FP8Weight(self.codes[at], self.scales[at], self.lead)

    def completed(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad input rows with zeros for the columns that complete groups. # [M, K]"""
        return F.pad(rows, (self.lead, 0)) if self.lead else rows


def to_flavour(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert OCP e4m3fn codes to `dtype` without changing the values.

    In e4m3fnuz the same bits mean half the value, and there is no negative zero.
    # [N, K] float8_e4m3fn
    """
    if dtype is torch.float8_e4m3fn:
        return codes, scales
    bits = codes.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz), scales * 2


class FourBitWeight(NamedTuple):
    """A weight of 4-bit codes with a scale per group of adjacent inputs of an output feature."""

    packed: torch.Tensor  # [.., out, in / 2] uint8, as `pack_nibbles` makes it
    scales: torch.Tensor
    """[.., out, groups] in the model's dtype; with MXFP4, exponents of powers of two as uint8, biased by 127."""
    zeros: torch.Tensor | None = None
    """[.., out, groups] uint8, the code of the value 0; None with MXFP4."""
    lead: int = 0
    """Columns before the weight's first input; see `FP8Weight`."""
    trail: int = 0
    """Columns after the weight's last input, so that the number of runs is even."""

    @property
    def kind(self) -> str:
        """See `Codes.kind`."""
        return "mxfp4" if self.zeros is None else "int4"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [.., out, in]"""
        return torch.Size((*self.packed.shape[:-1], 2 * self.packed.shape[-1] - self.lead - self.trail))

    def part(self, at: Rows) -> "FourBitWeight":
        """Return some rows."""
        zeros = None if self.zeros is None else self.zeros[at]
        return FourBitWeight(self.packed[at], self.scales[at], zeros, self.lead, self.trail)

    def completed(self, rows: torch.Tensor) -> torch.Tensor:
        """See `FP8Weight.completed`."""
        return F.pad(rows, (self.lead, self.trail)) if self.lead or self.trail else rows

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized values. # [.., out, in]"""
        codes = unpack_nibbles(self.packed).long()
        size = codes.shape[-1] // self.scales.shape[-1]
        if self.zeros is None:
            values = torch.tensor(_E2M1, device=codes.device)[codes & 7] * (1 - (codes >> 3) * 2)
            scales = torch.exp2(self.scales.float() - 127)
        else:
            values = (codes - self.zeros.long().repeat_interleave(size, -1)).float()
            scales = self.scales.float()
        dense = (values * scales.repeat_interleave(size, -1)).to(dtype)
        return dense[..., self.lead : dense.shape[-1] - self.trail]


class Int8Weight(NamedTuple):
    """A weight of 8-bit integers with a scale per output feature."""

    codes: torch.Tensor  # [N, K] int8, or [experts, N, K]
    scales: torch.Tensor  # [N] float32, or [experts, N]

    @property
    def kind(self) -> str:
        """See `Codes.kind`."""
        return "int8"

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [.., N, K]"""
        return self.codes.shape

    def part(self, at: Rows) -> "Int8Weight":
        """Return some rows."""
        return Int8Weight(self.codes[at], self.scales[at])

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized values. # [.., N, K]"""
        return (self.codes.float() * self.scales[..., None]).to(dtype)


QuantizedWeight: TypeAlias = FP8Weight | FourBitWeight | Int8Weight
"""A weight, or a stack of weights, in the form that kernels read."""


class MixedStack(NamedTuple):
    """A stack of experts whose weights have several forms, with a part for the experts of each form."""

    parts: tuple[torch.Tensor | QuantizedWeight, ...]
    homes: tuple[tuple[int, int], ...]
    """The part of each expert, and the expert's index in that part."""
    experts: tuple[torch.Tensor, ...]  # [experts of the part] int64, of each part
    slots: tuple[torch.Tensor, ...]
    """For each part, [experts + 1] int64: each expert's index in the part, or the part's size for experts of other
    parts; the last element, for no expert, is also the part's size."""

    @staticmethod
    def of(
        parts: tuple[torch.Tensor | QuantizedWeight, ...], homes: tuple[tuple[int, int], ...], device: torch.device
    ) -> "MixedStack":
        """Build the stack from parts on `device`."""
        experts, slots = [], []
        for number, part in enumerate(parts):
            own = [expert for expert, (home, _) in enumerate(homes) if home == number]
            table = torch.full((len(homes) + 1,), part.shape[0])
            table[own] = torch.arange(len(own))
            experts.append(torch.tensor(own, device=device))
            slots.append(table.to(device))
        return MixedStack(parts, homes, tuple(experts), tuple(slots))

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight. # [experts, N, K]"""
        return torch.Size((len(self.homes), *self.parts[0].shape[1:]))


StackOperand: TypeAlias = torch.Tensor | QuantizedWeight | MixedStack
"""The forms of a stack of experts' weights that products accept."""


def expert_of(weight: StackOperand, expert: int) -> tuple[torch.Tensor | QuantizedWeight, int]:
    """Return the part with one form that contains an expert, and the expert's index in it."""
    if isinstance(weight, MixedStack):
        part, at = weight.homes[expert]
        return weight.parts[part], at
    return weight, expert


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in the kernels' layout. # [.., in] uint8 below 16, `in` a multiple of 64 -> [.., in / 2] uint8"""
    pairs = codes.view(*codes.shape[:-1], -1, 2, RUN)
    return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`. # [.., in / 2] uint8 -> [.., in] uint8"""
    runs = packed.view(*packed.shape[:-1], -1, 1, RUN)
    return torch.cat((runs & 15, runs >> 4), -2).flatten(-3)


def nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Return both codes of each byte, the low one first. # [rows, n] uint8 -> [rows, 2 * n] uint8"""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def mxfp4_of(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round bfloat16 values to MXFP4; values that are MXFP4 already are unchanged. Returns codes and exponents.

    # [rows, in], `in` a multiple of 32 -> [rows, in] uint8 below 16, [rows, in / 32] uint8

    For each group, the exponent with the smaller squared error is selected from two candidates. With the first, the
    group's largest magnitude is 4 to 8 times the scale (the largest E2M1 value is 6); the second scale is twice as
    large. The first represents all values exactly that were MXFP4 with this or a larger exponent. A value that is not
    finite makes its group NaN, and groups of values below 2^-118 lose bits.
    """
    num_rows, inputs = dense.shape
    codes = torch.empty(num_rows, inputs, dtype=torch.uint8)
    exponents = torch.empty(num_rows, inputs // RUN, dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // max(1, inputs))
    for first in range(0, num_rows, step):
        some = slice(first, first + step)
        rows = dense[some].to(torch.bfloat16)
        codes[some], exponents[some] = _nearest_mxfp4(rows if rows.is_contiguous() else rows.contiguous())
    return codes, exponents


def _nearest_mxfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`mxfp4_of` by tables, indexed by a value's distance in bits from its group's largest one. # [rows, in]
    bfloat16"""
    nearest, difference = _nearest_codes()
    bits = rows.view(torch.int16).view(-1, RUN).int()
    sizes = bits & 0x7FFF
    found = sizes.amax(-1, keepdim=True) >> _MANTISSA
    largest = found.clamp(min=8)
    keys = (sizes - (largest - _DISTANCES + 1 << _MANTISSA)).clamp_(min=0)
    keys.clamp_(max=difference.numel() - 1)
    is_second = difference.index_select(0, keys.flatten()).view_as(keys).sum(-1, keepdim=True) < 0
    codes = nearest.index_select(0, (keys + is_second * difference.numel()).flatten()).view_as(keys)
    codes |= (bits >> 12 & 8).to(torch.uint8)
    exponents = torch.where(found == 0xFF, _E8M0_NAN, largest - 2 + is_second)
    return codes.view(len(rows), -1), exponents.to(torch.uint8).view(len(rows), -1)


_MANTISSA = 7
"""Number of bits of bfloat16's mantissa, below its exponent."""
_DISTANCES = 6
"""Number of powers of two, from a group's largest magnitude down, in which a value may have a code other than 0."""


@cache
def _nearest_codes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of bfloat16 values up to 8 with the first scale, followed by those with the second scale, and
    the second's squared error minus the first's.

    # [2 * n] uint8, [n] float32
    """
    mantissas = 1 + torch.arange(1 << _MANTISSA, dtype=torch.float64) / (1 << _MANTISSA)
    numbers = (torch.exp2(torch.arange(_DISTANCES, dtype=torch.float64) - 3)[:, None] * mantissas).flatten()
    codes, errors = [], []
    for scale in (1, 2):
        scaled = numbers / scale
        # Codes are linear in the value up to 2, from 2 to 4, and from 4 on. Ties are rounded to the even code.
        code = torch.where(scaled <= 2, scaled * 2, torch.where(scaled <= 4, scaled + 2, scaled / 2 + 4))
        codes.append(code.round().clamp(max=7).to(torch.uint8))
        errors.append((torch.tensor(_E2M1, dtype=torch.float64)[codes[-1].long()] * scale - numbers).square())
    return torch.cat(codes), (errors[1] - errors[0]).float()


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a quantized weight of a checkpoint."""

    kind: str
    """`fp8`, `int4`, `int8` or `mxfp4`."""
    codes: torch.Tensor
    """[rows, inputs] float8_e4m3fn, int8, or uint8 below 16; with `is_paired` [rows, inputs / 2] uint8."""
    scales: torch.Tensor
    """[rows, groups], one per group of adjacent inputs: floats, or with MXFP4 exponents of two as uint8, biased by
    127."""
    zeros: torch.Tensor | None
    """[rows, groups], in the dtype of the codes: the code of the value 0, with int4 and int8."""
    width: int
    """Number of inputs of a group; the last group may have fewer."""
    dense: Callable[[], torch.Tensor]
    """Computes the same rows and columns as dense values."""
    order: torch.Tensor | None = None
    """[inputs] int32, for each column the index of its input (CPU only); None if columns are in the order of
    inputs."""
    is_paired: bool = False
    """Whether a byte contains two 4-bit codes, the first in its low half."""
    lead: int = 0
    """Number of inputs of the first group that precede these columns and belong to another rank."""

    @property
    def inputs(self) -> int:
        """Number of columns of the weight."""
        return self.codes.shape[1] * (2 if self.is_paired else 1)

    def unpaired(self) -> "Codes":
        """Return the rows with one code per byte."""
        if not self.is_paired:
            return self
        return replace(self, codes=nibbles(self.codes), is_paired=False)

    @property
    def cuts_groups(self) -> bool:
        """Whether inputs of the first or last group belong to another rank."""
        has_part = self.kind != "fp8" and (self.lead + self.inputs) % self.width != 0
        return self.scales.shape[1] > 1 and (self.lead > 0 or has_part)

    def rows(self, index: torch.Tensor) -> "Codes":
        """Return the rows of these indices, in their order. # index [n] int64"""
        dense = self.dense
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, codes=codes, scales=self.scales[index], zeros=zeros, dense=lambda: dense()[index])

    def part(self, dim: int, first: int, last: int, step: int = 1) -> "Codes | None":
        """Return some rows or columns; None for columns that are not adjacent or not in the order of inputs."""
        dense = self.dense

        def slice_of_dense() -> torch.Tensor:
            whole = dense()
            return whole[first:last:step] if dim == 0 else whole[:, first:last:step]

        if dim == 0:
            some = slice(first, last, step)
            zeros = None if self.zeros is None else self.zeros[some]
            return replace(self, codes=self.codes[some], scales=self.scales[some], zeros=zeros, dense=slice_of_dense)
        if step != 1 or (self.order is not None and last - first < self.inputs):
            return None
        if self.is_paired and (first % 2 or last % 2):
            return self.unpaired().part(dim, first, last)
        groups, lead = slice(0, 1), 0
        if self.scales.shape[1] > 1:
            begin = self.lead + first
            groups, lead = slice(begin // self.width, -(-(self.lead + last) // self.width)), begin % self.width
        per_byte = 2 if self.is_paired else 1
        return replace(
            self,
            codes=self.codes[:, first // per_byte : last // per_byte],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            lead=lead if groups.stop - groups.start > 1 else 0,
            dense=slice_of_dense,
        )
