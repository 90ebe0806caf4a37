"""`StorageLayout`: how one quantised weight is stored in a checkpoint's tensors.

A layout dequantises a module's tensors into a dense weight. It computes a few rows at a time in float32, so that it
needs little memory in addition to the result. For kernels that multiply by quantised weights, it converts the tensors
to `Codes` instead.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from models.errors import CheckpointError
from models.ops.weight_formats import FP8_GROUP, RUN, Codes, nibbles
from models.quantization.config import MXFP4_GROUP, NVFP4_GROUP, Granularity, LayerQuantConfig
from models.quantization.stored import QuantizedStack
from models.registry import Registry

_CHUNK_ELEMENTS = 1 << 17
"""Number of weights dequantised at a time, so that intermediate values stay in the processor's cache."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the eight columns of an AWQ word, the index of the nibble that holds it."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 floats by 4-bit code (OCP microscaling formats 1.0, section 5.3.3)."""

Parts = Mapping[str, torch.Tensor]
"""A module's tensors by the last part of their name."""


class StorageLayout(ABC):
    """How the weight of one module is stored; `layer` has the quantisation parameters."""

    joint: ClassVar[str] = "."
    """The separator between the module's name and the part's name."""

    def __init__(self, layer: LayerQuantConfig) -> None:
        self.layer = layer

    @property
    @abstractmethod
    def required_parts(self) -> frozenset[str]:
        """The names of the module's tensors from which the weight is computed."""

    @abstractmethod
    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return the dense weight in `dtype`. # [out_features, in_features], or [experts, in, out] of stacked experts

        Raises `CheckpointError` if the tensors' shapes or dtypes do not fit one another.
        """

    @property
    def has_kernel(self) -> bool:
        """Whether GPU kernels can multiply by quantised weights of this layout."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether the CPU operators can multiply by quantised weights of this layout."""
        return self.has_kernel

    def codes(self, parts: Parts, dense: Callable[[], torch.Tensor]) -> Codes | None:
        """Return the quantised weight, or None if kernels do not support its form. `dense` computes the dense
        weight."""
        del parts, dense
        return None

    def stack(self, parts: Parts, dtype: torch.dtype) -> QuantizedStack | None:
        """Return the quantised weights of all experts, or None if the layout does not store experts as one stack."""
        del parts, dtype
        return None

    def _misfit(self, module: str, part: str, found: torch.Tensor, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{module}{self.joint}{part} has shape {list(found.shape)}, but the quantisation in config.json means "
            f"{wanted}; download the checkpoint again"
        )

    def _require_dtype(self, module: str, part: str, found: torch.Tensor, wanted: torch.dtype) -> None:
        if found.dtype != wanted:
            raise CheckpointError(
                f"{module}{self.joint}{part} is {found.dtype}, but the quantisation in config.json means {wanted}; "
                "download the checkpoint again"
            )

    def _require_shape(self, module: str, part: str, found: torch.Tensor, rows: int, columns: int) -> None:
        if tuple(found.shape) != (rows, columns):
            raise self._misfit(module, part, found, str([rows, columns]))

    def _on_grid(self, module: str, part: str, found: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return a tensor of one number per block in the shape of the grid of blocks, as float32.

        The tensor may have additional dimensions of size 1, or lack them.
        """
        sizes = [size for size in found.shape if size != 1]
        if sizes != [size for size in grid if size != 1] or found.numel() != math.prod(grid):
            raise self._misfit(module, part, found, str(list(grid)))
        return found.float().view(grid)


STORAGE: Registry[type[StorageLayout]] = Registry(
    "storage layout",
    dict.fromkeys(
        ("scaled", "mxfp4", "mxfp4-experts", "nvfp4", "nvfp4-modelopt", "packed", "awq", "gptq"),
        "models.quantization.layouts",
    ),
)


def layout_of(layer: LayerQuantConfig) -> StorageLayout:
    """Return the layout of modules with the given quantisation."""
    return STORAGE[layer.storage](layer)


def _by_rows(rows: int, columns: int, dtype: torch.dtype, part: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Fill a tensor of `dtype` by calling `part` for a few rows at a time. # [rows, columns]"""
    dense = torch.empty(rows, columns, dtype=dtype, device="cpu")
    # A multiple of 8 rows, since some layouts pack 8 rows per word.
    step = max(8, _CHUNK_ELEMENTS // max(1, columns) // 8 * 8)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        dense[some] = part(some)
    return dense


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpack the fields of each word, the lowest first or in `order`. # [n, m] -> [n, m * 32 / bits] int32"""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _widened(blocks: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Repeat each value for the columns of its block. # [n, blocks] -> [n, columns], or [n, 1] for one block"""
    return blocks if blocks.shape[1] == 1 else blocks[..., None].expand(-1, -1, width).flatten(1)[:, :columns]


@STORAGE.register("scaled")
class Scaled(StorageLayout):
    """One FP8 or int8 code per weight, with scales by tensor, row, block or group, and optional zero points."""

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"weight", "weight_scale"} | (set() if self.layer.symmetric else {"weight_zero_point"}))

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# weight [O, I], weight_scale one number per block"""
        weight, scale = parts["weight"], parts["weight_scale"]
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        wanted = torch.float8_e4m3fn if self.layer.quant_dtype == "fp8" else torch.int8
        self._require_dtype(module, "weight", weight, wanted)
        if weight.ndim != 2:
            raise self._misfit(module, "weight", weight, "[out_features, in_features]")
        rows, columns = weight.shape
        block_rows, block_columns = self._block_shape(rows, columns, scale.numel())
        grid = -(-rows // block_rows), -(-columns // block_columns)
        scales = self._on_grid(module, "weight_scale", scale, grid)
        zeros = (
            None
            if self.layer.symmetric
            else self._on_grid(module, "weight_zero_point", parts["weight_zero_point"], grid)
        )

        def part(some: slice) -> torch.Tensor:
            block = torch.arange(some.start, some.stop) // block_rows
            values = _fp8_values(weight[some]) if weight.dtype == torch.float8_e4m3fn else weight[some].float()
            if zeros is not None:
                values -= _widened(zeros[block], block_columns, columns)
            return values.mul_(_widened(scales[block], block_columns, columns))

        return _by_rows(rows, columns, dtype, part)

    @property
    def has_kernel(self) -> bool:
        if self.layer.quant_dtype == "int8":
            is_by_rows = self.layer.quant_type in (Granularity.TENSOR, Granularity.CHANNEL)
            return is_by_rows and self.layer.symmetric and self.layer.rounds_inputs
        return self.layer.quant_dtype == "fp8" and self.layer.symmetric

    @property
    def has_codes(self) -> bool:
        return self.has_kernel or self.layer.quant_dtype == "int8"

    def codes(self, parts: Parts, dense: Callable[[], torch.Tensor]) -> Codes | None:
        weight, scale = parts["weight"], parts["weight_scale"]
        kinds = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
        if not self.has_codes or kinds.get(weight.dtype) != self.layer.quant_dtype or weight.ndim != 2:
            return None
        if scale.dtype.itemsize == 1:
            return None
        rows, columns = weight.shape
        block_rows, width = self._block_shape(rows, columns, scale.numel())
        if weight.dtype is torch.int8:
            blocks = -(-rows // block_rows), -(-columns // width)
            of_rows = [
                self._on_grid("", part, parts[part], blocks).repeat_interleave(block_rows, 0)[:rows].contiguous()
                for part in ("weight_scale", "weight_zero_point")
                if part in parts
            ]
            zeros = (
                torch.zeros(rows, blocks[1], dtype=torch.int8) if self.layer.symmetric else of_rows[1].to(torch.int8)
            )
            scales = of_rows[0].to(scale.dtype)
            return Codes("int8", weight, scales, zeros, width, dense)
        if width not in (FP8_GROUP, columns):
            return None
        grid = self._on_grid("", "", scale, (-(-rows // block_rows), -(-columns // width)))
        scales = grid.repeat_interleave(block_rows, 0)[:rows].contiguous()
        return Codes("fp8", weight, scales, None, width, dense)

    def _block_shape(self, rows: int, columns: int, num_scales: int) -> tuple[int, int]:
        """Return the numbers of rows and of columns that share one scale."""
        match self.layer.quant_type:
            case Granularity.TENSOR:
                # Formats that cannot declare a scale per row declare it as per tensor.
                return (1 if num_scales == rows else rows), columns
            case Granularity.CHANNEL:
                return 1, columns
            case Granularity.BLOCK:
                assert self.layer.block_shape is not None
                return self.layer.block_shape
            case Granularity.GROUP:
                return 1, self.layer.group_size or columns


def _fp8_values(weight: torch.Tensor) -> torch.Tensor:
    """Convert to float32 by a table of code pairs, which is four times as fast as torch's conversion.

    # [n, columns] e4m3 -> [n, columns] float32
    """
    if weight.shape[1] % 2:
        return weight.float()
    return F.embedding(weight.view(torch.int16).int() & 0xFFFF, _fp8_pairs()).flatten(1)


@cache
def _fp8_pairs() -> torch.Tensor:
    """Return the two e4m3 values of each 16-bit word, the low byte's first. # [65536, 2]"""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.stack((values.repeat(256), values.repeat_interleave(256)), dim=1)


@STORAGE.register("mxfp4")
class MXFP4(StorageLayout):
    """Two 4-bit codes per byte, with a power-of-two scale for each 32 inputs."""

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"weight", "weight_scale"})

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# weight [O, I / 2] uint8, weight_scale [O, I / 32] uint8"""
        codes, scale = _bytes(parts["weight"]), _exponents(parts["weight_scale"])
        self._require_dtype(module, "weight", codes, torch.uint8)
        self._require_dtype(module, "weight_scale", scale, torch.uint8)
        if codes.ndim != 2 or codes.shape[1] % 16:
            raise self._misfit(
                module, "weight", codes, "[out_features, in_features / 2], in_features a multiple of 32"
            )
        rows, half = codes.shape
        if tuple(scale.shape) != (rows, half // 16):
            raise self._misfit(module, "weight_scale", scale, str([rows, half // 16]))
        return _mxfp4_rows(codes, scale, dtype)

    @property
    def has_kernel(self) -> bool:
        return True

    def codes(self, parts: Parts, dense: Callable[[], torch.Tensor]) -> Codes | None:
        pairs, scale = _bytes(parts["weight"]), _exponents(parts["weight_scale"])
        if pairs.ndim != 2 or scale.shape != (len(pairs), pairs.shape[1] // 16) or pairs.shape[1] % MXFP4_GROUP:
            return None
        return _mxfp4_codes(pairs, scale, dense)


@STORAGE.register("nvfp4")
class NVFP4(StorageLayout):
    """NVFP4 in compressed-tensors' format: two 4-bit codes per byte, an FP8 scale for each 16 inputs, a global scale.

    The stored FP8 scales are the real scales times the global scale.
    """

    global_scale: ClassVar[str] = "weight_global_scale"
    """The name of the part with the global scale."""

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"weight", "weight_scale", self.global_scale})

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# weight [O, I / 2] uint8, weight_scale [O, I / 16] float8, global scale [1]"""
        codes, scale, whole = parts["weight"], parts["weight_scale"], parts[self.global_scale]
        self._require_dtype(module, "weight", codes, torch.uint8)
        self._require_dtype(module, "weight_scale", scale, torch.float8_e4m3fn)
        pairs_of_group = NVFP4_GROUP // 2
        if codes.ndim != 2 or codes.shape[1] % pairs_of_group:
            wanted = f"[out_features, in_features / 2], in_features a multiple of {NVFP4_GROUP}"
            raise self._misfit(module, "weight", codes, wanted)
        rows, half = codes.shape
        self._require_shape(module, "weight_scale", scale, rows, half // pairs_of_group)
        if whole.numel() != 1:
            raise self._misfit(module, self.global_scale, whole, "[1]")
        factor, pairs = self._factor(whole.float().view(())), _pairs_of_e2m1()

        def part(some: slice) -> torch.Tensor:
            values = F.embedding(codes[some].int(), pairs).view(-1, half // pairs_of_group, NVFP4_GROUP)
            return values.mul_((scale[some].float() * factor)[..., None]).view(-1, 2 * half)

        return _by_rows(rows, 2 * half, dtype, part)

    def _factor(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the factor of the stored FP8 scales. # []"""
        return 1 / whole


@STORAGE.register("nvfp4-modelopt")
class ModelOptNVFP4(NVFP4):
    """NVFP4 in ModelOpt's format: the real scales are the stored FP8 scales times the global scale."""

    global_scale: ClassVar[str] = "weight_scale_2"

    def _factor(self, whole: torch.Tensor) -> torch.Tensor:
        return whole


@STORAGE.register("mxfp4-experts")
class MXFP4Experts(StorageLayout):
    """The weights of all experts in one tensor of blocks of 32 inputs, with a power-of-two scale per block."""

    joint = "_"

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"blocks", "scales"})

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return the dense weights in the layout of the dense checkpoint.

        # blocks [E, O, I / 32, 16] uint8, scales [E, O, I / 32] uint8 -> [E, I, O]
        """
        blocks, scales = parts["blocks"], _exponents(parts["scales"])
        self._require_dtype(module, "blocks", blocks, torch.uint8)
        self._require_dtype(module, "scales", scales, torch.uint8)
        if blocks.ndim != 4 or blocks.shape[-1] != 16:
            raise self._misfit(module, "blocks", blocks, "[experts, out_features, in_features / 32, 16]")
        if scales.shape != blocks.shape[:-1]:
            raise self._misfit(module, "scales", scales, str(list(blocks.shape[:-1])))
        experts, rows, groups, _ = blocks.shape
        dense = _mxfp4_rows(blocks.reshape(experts * rows, -1), scales.reshape(experts * rows, -1), dtype)
        return dense.view(experts, rows, groups * 32).transpose(1, 2)

    def stack(self, parts: Parts, dtype: torch.dtype) -> QuantizedStack | None:
        blocks, scales = parts["blocks"], _exponents(parts["scales"])
        if blocks.ndim != 4 or scales.shape != blocks.shape[:-1] or blocks.shape[-1] != MXFP4_GROUP // 2:
            return None

        def expert(index: int) -> Codes:
            pairs, exponents = blocks[index].flatten(1), scales[index]
            return _mxfp4_codes(pairs, exponents, lambda: _mxfp4_rows(pairs, exponents, dtype))

        made = [partial(expert, index) for index in range(len(blocks))]
        _, rows, groups, _ = blocks.shape
        shape = torch.Size((len(blocks), groups * MXFP4_GROUP, rows))
        return QuantizedStack.of(made, shape, dtype, has_outputs_first=False)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """View pairs of codes as unsigned bytes; DeepSeek-V4 stores them as signed bytes."""
    return codes.view(torch.uint8) if codes.dtype == torch.int8 else codes


def _mxfp4_codes(pairs: torch.Tensor, exponents: torch.Tensor, dense: Callable[[], torch.Tensor]) -> Codes:
    """# [rows, I / 2] uint8, [rows, I / 32] uint8"""
    return Codes("mxfp4", pairs, exponents, None, MXFP4_GROUP, dense, is_paired=True)


@cache
def _pairs_of_e2m1() -> torch.Tensor:
    """Return the two E2M1 values of each byte, that of the low four bits first. # [256, 2] float32"""
    numbers = [(_E2M1[code % 16], _E2M1[code // 16]) for code in range(256)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _mxfp4_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """# [rows, I / 2] uint8, [rows, I / 32] uint8 -> [rows, I]"""
    rows, half = codes.shape
    pairs = _pairs_of_e2m1()

    def part(some: slice) -> torch.Tensor:
        values = F.embedding(codes[some].int(), pairs).view(-1, half // 16, 32)
        return values.mul_(scale[some].view(torch.float8_e8m0fnu).float()[..., None]).view(-1, 2 * half)

    return _by_rows(rows, 2 * half, dtype, part)


class WordLayout(StorageLayout):
    """Several codes per 32-bit word, with a scale and a zero point per group of inputs."""

    @abstractmethod
    def _unsigned_codes(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes, scales and zero points. # [O, I] (if `is_paired`, [O, I / 2]), 2 x [O, groups]"""

    is_paired: ClassVar[bool] = False
    """Whether `_unsigned_codes` returns 4-bit codes packed as two per byte; see `Codes`."""

    @property
    def has_kernel(self) -> bool:
        return self.layer.bits == 4 and not self.layer.has_group_index

    @property
    def has_codes(self) -> bool:
        return True

    def codes(self, parts: Parts, dense: Callable[[], torch.Tensor]) -> Codes | None:
        codes, scales, zeros = self._unsigned_codes(parts)
        is_paired = self.is_paired and self.layer.bits == 4
        rows, inputs = len(codes), codes.shape[1] * (2 if is_paired else 1)
        width = (self.layer.group_size or inputs) if self.layer.quant_type is Granularity.GROUP else inputs
        groups = inputs // width
        fits = inputs % (2 * RUN) == 0 and width % RUN == 0 and inputs % width == 0
        if not fits or tuple(scales.shape) != (rows, groups) or tuple(zeros.shape) != (rows, groups):
            return None
        order = None
        listed = parts.get("g_idx", parts.get("weight_g_idx")) if self.layer.has_group_index else None
        if listed is not None and not bool((listed < 0).any()):
            if listed.numel() != inputs or not bool((listed.long().bincount(minlength=groups) == width).all()):
                return None
            order = listed.flatten().argsort(stable=True)
            if is_paired:
                codes, is_paired = nibbles(codes), False
            codes, order = codes[:, order], order.to(torch.int32)
        if self.layer.bits == 4:
            zeros = zeros.to(torch.uint8)
            return Codes("int4", codes.to(torch.uint8), scales, zeros, width, dense, order, is_paired)
        # `^ 128` subtracts 128 from both codes and zero points, which makes them signed.
        signed, signed_zeros = ((each.to(torch.uint8) ^ 128).view(torch.int8) for each in (codes, zeros))
        return Codes("int8", signed, scales, signed_zeros, width, dense, order)

    def _spread(
        self, module: str, part: str, listed: torch.Tensor | None, columns: int, groups: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that repeats each group's value for the inputs of the group.

        `listed`: the group of each input (`g_idx`), or None if groups consist of adjacent inputs.
        # [n, groups] -> [n, columns]
        """
        if listed is None or bool((listed < 0).any()):
            return lambda of_groups: _widened(of_groups, self.layer.group_size or columns, columns)
        if listed.numel() != columns or int(listed.max()) >= groups:
            raise self._misfit(module, part, listed, f"[{columns}] and values below {groups}")
        group = listed.long().view(columns)
        return lambda of_groups: of_groups[:, group]


@STORAGE.register("packed")
class Packed(WordLayout):
    """compressed-tensors' `pack-quantized`: codes packed along the inputs of a row."""

    is_paired = True

    @property
    def required_parts(self) -> frozenset[str]:
        parts = {"weight_packed", "weight_scale", "weight_shape"}
        if not self.layer.symmetric:
            parts.add("weight_zero_point")
        if self.layer.has_group_index:
            parts.add("weight_g_idx")
        return frozenset(parts)

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# weight_packed [O, I * bits / 32] int32, weight_scale [O, groups],
        # weight_zero_point [O * bits / 32, groups]
        """
        words, scale = parts["weight_packed"], parts["weight_scale"].float()
        self._require_dtype(module, "weight_packed", words, torch.int32)
        per_word, middle = 32 // self.layer.bits, 1 << (self.layer.bits - 1)
        if parts["weight_shape"].numel() != 2:
            raise self._misfit(module, "weight_shape", parts["weight_shape"], "[2]")
        rows, columns = (int(size) for size in parts["weight_shape"])
        if tuple(words.shape) != (rows, -(-columns // per_word)):
            raise self._misfit(module, "weight_packed", words, str([rows, -(-columns // per_word)]))
        groups = 1
        if self.layer.quant_type is Granularity.GROUP and self.layer.group_size is not None:
            groups = -(-columns // self.layer.group_size)
        scale = self._on_grid(
            module, "weight_scale", scale, (1 if self.layer.quant_type is Granularity.TENSOR else rows, groups)
        )
        scale = scale.expand(rows, groups)
        zeros = None
        if not self.layer.symmetric:
            stored = parts["weight_zero_point"]
            self._require_shape(module, "weight_zero_point", stored, -(-rows // per_word), groups)
            zeros = unpacked(stored.t(), self.layer.bits).t()[:rows] - middle
        spread = self._spread(module, "weight_g_idx", parts.get("weight_g_idx"), columns, groups)

        def part(some: slice) -> torch.Tensor:
            values = (unpacked(words[some], self.layer.bits)[:, :columns] - middle).float()
            if zeros is not None:
                values -= spread(zeros[some].float())
            return values.mul_(spread(scale[some]))

        return _by_rows(rows, columns, dtype, part)

    def _unsigned_codes(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, inputs = (int(size) for size in parts["weight_shape"])
        bits, scales = self.layer.bits, parts["weight_scale"]
        # In little-endian memory, the bytes of a word hold its codes in order.
        codes = parts["weight_packed"].contiguous().view(torch.uint8)
        codes = codes[:, : inputs // 2 if bits == 4 else inputs]
        if self.layer.quant_type is Granularity.TENSOR:
            scales = scales.reshape(1, 1).expand(rows, 1)
        if self.layer.symmetric:
            return codes, scales, torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
        return codes, scales, unpacked(parts["weight_zero_point"].t(), bits).t()[:rows]


@STORAGE.register("awq")
class AWQ(WordLayout):
    """AWQ's layout: transposed weights, codes packed along the outputs in AWQ's order."""

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales"})

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# qweight [I, O / 8] int32, qzeros [groups, O / 8] int32, scales [groups, O]"""
        words, scales = parts["qweight"], parts["scales"].float()
        self._require_dtype(module, "qweight", words, torch.int32)
        if words.ndim != 2:
            raise self._misfit(module, "qweight", words, "[in_features, out_features / 8]")
        columns, row_words = words.shape
        groups = -(-columns // (self.layer.group_size or columns))
        self._require_shape(module, "qzeros", parts["qzeros"], groups, row_words)
        self._require_shape(module, "scales", scales, groups, row_words * 8)
        zeros = unpacked(parts["qzeros"], 4, AWQ_NIBBLES)
        spread = self._spread(module, "", None, columns, groups)

        def part(some: slice) -> torch.Tensor:
            values = unpacked(words[:, some.start // 8 : -(-some.stop // 8)], 4, AWQ_NIBBLES)
            values = values.t().float() - spread(zeros[:, some].t().float())
            return values.mul_(spread(scales[:, some].t()))

        return _by_rows(row_words * 8, columns, dtype, part)

    def _unsigned_codes(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, zeros = (unpacked(parts[part], 4, AWQ_NIBBLES).t() for part in ("qweight", "qzeros"))
        return codes, parts["scales"].t(), zeros


@STORAGE.register("gptq")
class GPTQ(WordLayout):
    """GPTQ's layout: transposed weights, codes packed along the inputs."""

    @property
    def required_parts(self) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales"} | ({"g_idx"} if self.layer.has_group_index else set()))

    def dequantize(self, module: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """# qweight [I * bits / 32, O] int32, qzeros [groups, O * bits / 32] int32, scales [groups, O], g_idx [I]"""
        words, scales = parts["qweight"], parts["scales"].float()
        self._require_dtype(module, "qweight", words, torch.int32)
        if words.ndim != 2:
            raise self._misfit(module, "qweight", words, f"[in_features * {self.layer.bits} / 32, out_features]")
        per_word = 32 // self.layer.bits
        columns, rows = words.shape[0] * per_word, words.shape[1]
        groups = -(-columns // (self.layer.group_size or columns))
        self._require_shape(module, "scales", scales, groups, rows)
        self._require_shape(module, "qzeros", parts["qzeros"], groups, -(-rows // per_word))
        # Stored zero points wrap around: in the `gptq` format 0 is stored as 0 - 1, which has all bits set.
        zeros = (unpacked(parts["qzeros"], self.layer.bits)[:, :rows] + self.layer.zero_offset) & (
            (1 << self.layer.bits) - 1
        )
        spread = self._spread(module, "g_idx", parts.get("g_idx"), columns, groups)

        def part(some: slice) -> torch.Tensor:
            values = unpacked(words[:, some].t(), self.layer.bits).float()
            return values.sub_(spread(zeros[:, some].t().float())).mul_(spread(scales[:, some].t()))

        return _by_rows(rows, columns, dtype, part)

    def _unsigned_codes(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bits, rows = self.layer.bits, parts["qweight"].shape[1]
        zeros = (unpacked(parts["qzeros"], bits)[:, :rows] + self.layer.zero_offset & (1 << bits) - 1).t()
        return unpacked(parts["qweight"].t(), bits), parts["scales"].t(), zeros
