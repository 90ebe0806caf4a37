"""From a module's quantised tensors to its dense weight, a function a `Storage`. Called by the `Dequantizer`.

Each works a few rows at a time in float32, so that beside its result it needs little memory.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F

from models.errors import CheckpointError
from models.quantization.config import Granularity, LayerQuantConfig, Storage

_CHUNK_ELEMENTS = 1 << 17
"""Weights dequantised at a time: what is made of them on the way stays in the processor's cache."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""By column of a word, which of its eight nibbles holds it."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of a 4-bit float by code (OCP microscaling formats 1.0, section 5.3.3)."""

Parts = Mapping[str, torch.Tensor]
"""A module's tensors by their name in it."""


def required_parts(layer: LayerQuantConfig) -> frozenset[str]:
    """The tensors that make one weight, without which it cannot be computed."""
    match layer.storage:
        case Storage.SCALED:
            return frozenset({"weight", "weight_scale"} | (set() if layer.symmetric else {"weight_zero_point"}))
        case Storage.MXFP4:
            return frozenset({"weight", "weight_scale"})
        case Storage.MXFP4_EXPERTS:
            return frozenset({"blocks", "scales"})
        case Storage.PACKED:
            parts = {"weight_packed", "weight_scale", "weight_shape"}
            if not layer.symmetric:
                parts.add("weight_zero_point")
            if layer.has_group_index:
                parts.add("weight_g_idx")
            return frozenset(parts)
        case Storage.AWQ:
            return frozenset({"qweight", "qzeros", "scales"})
        case Storage.GPTQ:
            return frozenset({"qweight", "qzeros", "scales"} | ({"g_idx"} if layer.has_group_index else set()))


def dequantize(module: str, parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight in `dtype`. # [out_features, in_features], of stacked experts [experts, in, out]

    Raises `CheckpointError` where the tensors' shapes or dtypes do not fit one another.
    """
    return _LAYOUTS[layer.storage](module, parts, layer, dtype)


def _scaled(module: str, parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# weight [O, I], weight_scale a number a block of them"""
    weight, scale = parts["weight"], parts["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    wanted = torch.float8_e4m3fn if layer.quant_dtype == "fp8" else torch.int8
    _require_dtype(module, "weight", weight, wanted)
    if weight.ndim != 2:
        raise _misfit(module, "weight", weight, "[out_features, in_features]")
    rows, columns = weight.shape
    block_rows, block_columns = block_shape(layer, rows, columns, scale.numel())
    grid = -(-rows // block_rows), -(-columns // block_columns)
    scales = on_grid(module, "weight_scale", scale, grid)
    zeros = None if layer.symmetric else on_grid(module, "weight_zero_point", parts["weight_zero_point"], grid)

    def part(some: slice) -> torch.Tensor:
        block = torch.arange(some.start, some.stop) // block_rows
        values = _fp8_values(weight[some]) if weight.dtype == torch.float8_e4m3fn else weight[some].float()
        if zeros is not None:
            values -= _widened(zeros[block], block_columns, columns)
        return values.mul_(_widened(scales[block], block_columns, columns))

    return _by_rows(rows, columns, dtype, part)


def _fp8_values(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers as float32; by pairs of neighbours four times faster than one by one. # [n, columns] e4m3"""
    if weight.shape[1] % 2:
        return weight.float()
    return F.embedding(weight.view(torch.int16).int() & 0xFFFF, _fp8_pairs()).flatten(1)


@cache
def _fp8_pairs() -> torch.Tensor:
    """Both numbers of each 16-bit code, the low one first. # [65536, 2]"""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.stack((values.repeat(256), values.repeat_interleave(256)), dim=1)


def block_shape(layer: LayerQuantConfig, rows: int, columns: int, num_scales: int) -> tuple[int, int]:
    """How many rows and columns share one scale."""
    match layer.quant_type:
        case Granularity.TENSOR:
            # Per tensor is also what the formats without an option of their own for it say of a scale a row.
            return (1 if num_scales == rows else rows), columns
        case Granularity.CHANNEL:
            return 1, columns
        case Granularity.BLOCK:
            assert layer.block_shape is not None
            return layer.block_shape
        case Granularity.GROUP:
            return 1, layer.group_size or columns


def _mxfp4(module: str, parts: Parts, _layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# weight [O, I / 2] uint8, weight_scale [O, I / 32] uint8"""
    codes, scale = parts["weight"], exponents(parts["weight_scale"])
    _require_dtype(module, "weight", codes, torch.uint8)
    _require_dtype(module, "weight_scale", scale, torch.uint8)
    if codes.ndim != 2 or codes.shape[1] % 16:
        raise _misfit(module, "weight", codes, "[out_features, in_features / 2], in_features a multiple of 32")
    rows, half = codes.shape
    if tuple(scale.shape) != (rows, half // 16):
        raise _misfit(module, "weight_scale", scale, str([rows, half // 16]))
    return _mxfp4_rows(codes, scale, dtype)


def _mxfp4_experts(module: str, parts: Parts, _layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# blocks [E, O, I / 32, 16] uint8, scales [E, O, I / 32] uint8 -> [E, I, O], as the dense checkpoint has it"""
    blocks, scales = parts["blocks"], exponents(parts["scales"])
    _require_dtype(module, "blocks", blocks, torch.uint8, joint="_")
    _require_dtype(module, "scales", scales, torch.uint8, joint="_")
    if blocks.ndim != 4 or blocks.shape[-1] != 16:
        raise _misfit(module, "blocks", blocks, "[experts, out_features, in_features / 32, 16]", joint="_")
    if scales.shape != blocks.shape[:-1]:
        raise _misfit(module, "scales", scales, str(list(blocks.shape[:-1])), joint="_")
    experts, rows, groups, _ = blocks.shape
    dense = _mxfp4_rows(blocks.reshape(experts * rows, -1), scales.reshape(experts * rows, -1), dtype)
    return dense.view(experts, rows, groups * 32).transpose(1, 2)


def exponents(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def _mxfp4_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """# [rows, I / 2] uint8, [rows, I / 32] uint8 -> [rows, I]"""
    rows, half = codes.shape
    pairs = torch.tensor([(_E2M1[code % 16], _E2M1[code // 16]) for code in range(256)], dtype=torch.float32)

    def part(some: slice) -> torch.Tensor:
        values = F.embedding(codes[some].int(), pairs).view(-1, half // 16, 32)
        return values.mul_(scale[some].view(torch.float8_e8m0fnu).float()[..., None]).view(-1, 2 * half)

    return _by_rows(rows, 2 * half, dtype, part)


def _packed(module: str, parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# weight_packed [O, I * bits / 32] int32, weight_scale [O, groups], weight_zero_point [O * bits / 32, groups]"""
    words, scale = parts["weight_packed"], parts["weight_scale"].float()
    _require_dtype(module, "weight_packed", words, torch.int32)
    per_word, middle = 32 // layer.bits, 1 << (layer.bits - 1)
    if parts["weight_shape"].numel() != 2:
        raise _misfit(module, "weight_shape", parts["weight_shape"], "[2]")
    rows, columns = (int(size) for size in parts["weight_shape"])
    if tuple(words.shape) != (rows, -(-columns // per_word)):
        raise _misfit(module, "weight_packed", words, str([rows, -(-columns // per_word)]))
    groups = 1
    if layer.quant_type is Granularity.GROUP and layer.group_size is not None:
        groups = -(-columns // layer.group_size)
    scale = on_grid(module, "weight_scale", scale, (1 if layer.quant_type is Granularity.TENSOR else rows, groups))
    scale = scale.expand(rows, groups)
    zeros = None
    if not layer.symmetric:
        stored = parts["weight_zero_point"]
        _require_shape(module, "weight_zero_point", stored, -(-rows // per_word), groups)
        zeros = unpacked(stored.t(), layer.bits).t()[:rows] - middle
    spread = _spread(module, "weight_g_idx", parts.get("weight_g_idx"), layer.group_size, columns, groups)

    def part(some: slice) -> torch.Tensor:
        values = (unpacked(words[some], layer.bits)[:, :columns] - middle).float()
        if zeros is not None:
            values -= spread(zeros[some].float())
        return values.mul_(spread(scale[some]))

    return _by_rows(rows, columns, dtype, part)


def _awq(module: str, parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# qweight [I, O / 8] int32, qzeros [groups, O / 8] int32, scales [groups, O]"""
    words, scales = parts["qweight"], parts["scales"].float()
    _require_dtype(module, "qweight", words, torch.int32)
    if words.ndim != 2:
        raise _misfit(module, "qweight", words, "[in_features, out_features / 8]")
    columns, row_words = words.shape
    groups = -(-columns // (layer.group_size or columns))
    _require_shape(module, "qzeros", parts["qzeros"], groups, row_words)
    _require_shape(module, "scales", scales, groups, row_words * 8)
    zeros = unpacked(parts["qzeros"], 4, AWQ_NIBBLES)
    spread = _spread(module, "", None, layer.group_size, columns, groups)

    def part(some: slice) -> torch.Tensor:
        values = unpacked(words[:, some.start // 8 : -(-some.stop // 8)], 4, AWQ_NIBBLES)
        values = values.t().float() - spread(zeros[:, some].t().float())
        return values.mul_(spread(scales[:, some].t()))

    return _by_rows(row_words * 8, columns, dtype, part)


def _gptq(module: str, parts: Parts, layer: LayerQuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """# qweight [I * bits / 32, O] int32, qzeros [groups, O * bits / 32] int32, scales [groups, O], g_idx [I]"""
    words, scales = parts["qweight"], parts["scales"].float()
    _require_dtype(module, "qweight", words, torch.int32)
    if words.ndim != 2:
        raise _misfit(module, "qweight", words, f"[in_features * {layer.bits} / 32, out_features]")
    per_word = 32 // layer.bits
    columns, rows = words.shape[0] * per_word, words.shape[1]
    groups = -(-columns // (layer.group_size or columns))
    _require_shape(module, "scales", scales, groups, rows)
    _require_shape(module, "qzeros", parts["qzeros"], groups, -(-rows // per_word))
    # A zero point of 0 is stored one less, round the end of its bits.
    zeros = (unpacked(parts["qzeros"], layer.bits)[:, :rows] + layer.zero_offset) & ((1 << layer.bits) - 1)
    spread = _spread(module, "g_idx", parts.get("g_idx"), layer.group_size, columns, groups)

    def part(some: slice) -> torch.Tensor:
        values = unpacked(words[:, some].t(), layer.bits).float()
        return values.sub_(spread(zeros[:, some].t().float())).mul_(spread(scales[:, some].t()))

    return _by_rows(rows, columns, dtype, part)


_LAYOUTS: Mapping[Storage, Callable[[str, Parts, LayerQuantConfig, torch.dtype], torch.Tensor]] = {
    Storage.SCALED: _scaled,
    Storage.MXFP4: _mxfp4,
    Storage.MXFP4_EXPERTS: _mxfp4_experts,
    Storage.PACKED: _packed,
    Storage.AWQ: _awq,
    Storage.GPTQ: _gptq,
}


def _by_rows(rows: int, columns: int, dtype: torch.dtype, part: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """`part` of each few rows, together in `dtype`. # [rows, columns]"""
    dense = torch.empty(rows, columns, dtype=dtype, device="cpu")
    # Whole words of rows, for the layouts that pack them.
    step = max(8, _CHUNK_ELEMENTS // max(1, columns) // 8 * 8)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        dense[some] = part(some)
    return dense


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """The fields of each word, the lowest first unless `order` names them. # [n, m] -> [n, m * 32 / bits] int32"""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _spread(
    module: str, part: str, listed: torch.Tensor | None, group_size: int | None, columns: int, groups: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gives each input what its group has: runs of neighbours, or as listed. # [n, groups] -> [n, columns]"""
    if listed is None or bool((listed < 0).any()):
        return lambda of_groups: _widened(of_groups, group_size or columns, columns)
    if listed.numel() != columns or int(listed.max()) >= groups:
        raise _misfit(module, part, listed, f"[{columns}] and values below {groups}")
    group = listed.long().view(columns)
    return lambda of_groups: of_groups[:, group]


def _widened(blocks: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Each value over the columns of its block. # [n, blocks] -> [n, columns], or [n, 1] where one is for all"""
    return blocks if blocks.shape[1] == 1 else blocks[..., None].expand(-1, -1, width).flatten(1)[:, :columns]


def on_grid(module: str, part: str, found: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """A tensor of one number a block as float32 on the blocks' grid, whose dimensions of 1 may be left out."""
    sizes = [size for size in found.shape if size != 1]
    if sizes != [size for size in grid if size != 1] or found.numel() != math.prod(grid):
        raise _misfit(module, part, found, str(list(grid)))
    return found.float().view(grid)


def _require_shape(module: str, part: str, found: torch.Tensor, rows: int, columns: int) -> None:
    if tuple(found.shape) != (rows, columns):
        raise _misfit(module, part, found, str([rows, columns]))


def _require_dtype(module: str, part: str, found: torch.Tensor, wanted: torch.dtype, *, joint: str = ".") -> None:
    if found.dtype != wanted:
        raise CheckpointError(
            f"{module}{joint}{part} is {found.dtype}, where the quantisation in config.json means {wanted}"
        )


def _misfit(module: str, part: str, found: torch.Tensor, wanted: str, *, joint: str = ".") -> CheckpointError:
    return CheckpointError(
        f"{module}{joint}{part} has shape {list(found.shape)}, where the quantisation in config.json means {wanted}"
    )
