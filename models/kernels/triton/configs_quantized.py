"""Rows of the table for products of quantised weights. Imported by their kernels' files."""

from models.kernels.triton.configs import ALL, AMPERE, CDNA, CONFIGS, INTERPRETER, RDNA, Config, Row

_INTERPRETER = (INTERPRETER.arch,)
FEW_ROWS = 16
"""Up to which a product waits for its weight: small tiles, so that there are as many programs as can be."""
_FEW = {"rows": range(FEW_ROWS + 1)}
_SOME = {"rows": range(65)}
_GATED = {"gated": (True,)}


def _config(num_warps: int, num_stages: int, rows: int, columns: int, **blocks: int) -> Config:
    return Config({"ROWS": rows, "COLUMNS": columns, **blocks}, num_warps, num_stages, matrix_instr_nonkdim=16)


# The depth of a step is the same for any number of rows: a row's sums must not depend on its batch.
CONFIGS["quantize_groups"] = (
    Row(_INTERPRETER, Config({"GROUPS": 2})),
    Row(ALL, Config({"GROUPS": 8})),
)
CONFIGS["fp8_gemm"] = (
    Row(_INTERPRETER, _config(1, 1, 16, 16)),
    # Without FP8 both sides take twice the registers and the shared memory.
    Row(("gfx90a",), _config(4, 1, 16, 32), _FEW),
    Row(("gfx90a",), _config(4, 1, 64, 64), _SOME),
    Row(("gfx90a",), _config(8, 1, 128, 64)),
    Row(CDNA, _config(4, 2, 16, 32), _FEW),
    Row(CDNA, _config(4, 2, 64, 128), _SOME),
    Row(CDNA, _config(8, 2, 128, 128)),
    Row(RDNA, _config(4, 1, 16, 32), _FEW),
    Row(RDNA, _config(4, 1, 64, 32)),
    Row(("sm_90",), _config(4, 3, 16, 32), _FEW),
    Row(AMPERE, _config(8, 2, 64, 64), _SOME),
    Row(AMPERE, _config(8, 2, 128, 64)),
    Row(("sm_90",), _config(4, 3, 64, 128), _SOME),
    Row(("sm_90",), _config(8, 3, 128, 128)),
)
CONFIGS["four_bit_gemm"] = (
    Row(_INTERPRETER, _config(1, 1, 16, 16, DEPTH=128)),
    Row(CDNA, _config(2, 1, 16, 32, DEPTH=128), _FEW),
    Row(CDNA, _config(4, 1, 64, 64, DEPTH=128), _SOME),
    Row(CDNA, _config(8, 1, 128, 128, DEPTH=128)),
    Row(RDNA, _config(4, 1, 16, 16, DEPTH=64), _FEW),
    Row(RDNA, _config(4, 1, 32, 32, DEPTH=64)),
    Row(("sm_90",), _config(4, 3, 16, 32, DEPTH=128), _FEW),
    Row(AMPERE, _config(8, 2, 64, 64, DEPTH=128), _SOME),
    Row(AMPERE, _config(8, 2, 128, 64, DEPTH=128)),
    Row(("sm_90",), _config(8, 3, 64, 128, DEPTH=128), _SOME),
    Row(("sm_90",), _config(8, 3, 128, 128, DEPTH=128)),
)


def _grouped(num_warps: int, num_stages: int, rows: int, columns: int, depth: int = 128) -> Config:
    blocks = {"BLOCK_M": rows, "COLUMNS": columns, "DEPTH": depth}
    return Config(blocks, num_warps, num_stages, matrix_instr_nonkdim=16)


# Blocks of pairs are those of the sort. A gated tile has two accumulators, and so half the columns.
CONFIGS["moe_four_bit_gemm"] = (
    *(Row(_INTERPRETER, _grouped(1, 1, size, 16, 64), {"block": (size,)}) for size in (16, 64, 128)),
    Row(CDNA, _grouped(2, 1, 16, 32), {"block": (16,)}),
    Row(CDNA, _grouped(4, 1, 64, 32), {"block": (64,), "gated": (True,)}),
    Row(CDNA, _grouped(4, 1, 64, 64), {"block": (64,)}),
    Row(CDNA, _grouped(8, 1, 128, 64), {"block": (128,)}),
    Row(RDNA, _grouped(4, 1, 16, 16, 64), {"block": (16,)}),
    Row(RDNA, _grouped(4, 1, 64, 16, 64), {"block": (64,)}),
    Row(RDNA, _grouped(8, 1, 128, 16, 64), {"block": (128,)}),
    Row(("sm_90",), _grouped(4, 3, 16, 32), {"block": (16,)}),
    Row(AMPERE, _grouped(8, 2, 64, 32), {"block": (64,)}),
    Row(AMPERE, _grouped(8, 2, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _grouped(8, 3, 64, 64), {"block": (64,)}),
    Row(("sm_90",), _grouped(8, 3, 128, 64), {"block": (128,)}),
)


def _fp8_grouped(num_warps: int, num_stages: int, rows: int, columns: int) -> Config:
    return Config({"BLOCK_M": rows, "COLUMNS": columns}, num_warps, num_stages, matrix_instr_nonkdim=16)


# A group's depth is that of its scale. What is scaled before it is added takes registers of its own.
CONFIGS["moe_fp8_gemm"] = (
    *(Row(_INTERPRETER, _fp8_grouped(1, 1, size, 16), {"block": (size,)}) for size in (16, 64, 128)),
    Row(("gfx90a",), _fp8_grouped(4, 1, 16, 32), {"block": (16,)}),
    Row(("gfx90a",), _fp8_grouped(4, 1, 64, 32), {"block": (64,)}),
    Row(("gfx90a",), _fp8_grouped(8, 1, 128, 32), {"block": (128,)}),
    Row(CDNA, _fp8_grouped(4, 2, 16, 32), {"block": (16,)}),
    Row(CDNA, _fp8_grouped(4, 2, 64, 64), {"block": (64,)}),
    Row(CDNA, _fp8_grouped(8, 2, 128, 64), {"block": (128,)}),
    Row(("gfx1100",), _fp8_grouped(4, 1, 16, 16), {"block": (16,)}),
    Row(("gfx1100",), _fp8_grouped(4, 1, 64, 16), {"block": (64,), **_GATED}),
    Row(("gfx1100",), _fp8_grouped(8, 1, 128, 16), {"block": (128,), **_GATED}),
    Row(RDNA, _fp8_grouped(4, 1, 16, 32), {"block": (16,)}),
    Row(RDNA, _fp8_grouped(4, 1, 64, 32), {"block": (64,)}),
    Row(RDNA, _fp8_grouped(8, 1, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _fp8_grouped(4, 3, 16, 32), {"block": (16,)}),
    Row(AMPERE, _fp8_grouped(8, 2, 64, 32), {"block": (64,)}),
    Row(AMPERE, _fp8_grouped(8, 2, 128, 32), {"block": (128,)}),
    Row(("sm_90",), _fp8_grouped(4, 3, 64, 32), {"block": (64,), **_GATED}),
    Row(("sm_90",), _fp8_grouped(4, 3, 64, 64), {"block": (64,)}),
    Row(("sm_90",), _fp8_grouped(8, 3, 128, 64), {"block": (128,)}),
)
