"""Rows of the table for norms, activations, mixtures of experts and sampling. Imported by their kernels' files."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from models.kernels.triton.configs import ALL, CDNA, CONFIGS, INTERPRETER, KIB, RDNA, Config, Row, config_of, target_of


def _gemm(rows: int, columns: int, inner: int, *, warps: int, stages: int) -> Config:
    blocks = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": inner, "GROUP": 8}
    return Config(blocks, num_warps=warps, num_stages=stages, matrix_instr_nonkdim=16)


CONFIGS["rms_norm"] = (
    # A row's sum is made in the same order whatever the number of rows: tiles depend on the size alone.
    Row((INTERPRETER.arch,), Config({"ROWS": 2})),
    Row(ALL, Config({"ROWS": 16}, num_warps=4), {"size": range(257)}),
    Row(ALL, Config({"ROWS": 4}, num_warps=4), {"size": range(257, 1025)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=4), {"size": range(1025, 4097)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=8), {"size": range(4097, 8193)}),
    Row(ALL, Config({"ROWS": 1}, num_warps=16)),
)
CONFIGS["gated"] = (
    Row((INTERPRETER.arch,), Config({"FEATURES": 32})),
    # Eight elements, 16 bytes, of gate and of up a thread.
    Row(CDNA, Config({"FEATURES": 2048}, num_warps=4)),
    Row(ALL, Config({"FEATURES": 1024}, num_warps=4)),
)
CONFIGS["moe_route"] = (
    Row((INTERPRETER.arch,), Config({"ROWS": 2})),
    Row(ALL, Config({"ROWS": 4}, num_warps=4), {"tile": range(257)}),
    Row(ALL, Config({"ROWS": 2}, num_warps=4)),
)
CONFIGS["moe_place"] = (
    Row((INTERPRETER.arch,), Config({"CHUNK": 16})),
    Row(ALL, Config({"CHUNK": 256}, num_warps=4)),
)
CONFIGS["moe_scan"] = (
    Row((INTERPRETER.arch,), Config({"LANES": 4, "CHUNKS": 2})),
    Row(ALL, Config({"LANES": 16, "CHUNKS": 64}, num_warps=4)),
)
_DECODE, _FEW, _MANY = {"block": (16,)}, {"block": (64,)}, {"block": (128,)}
_GATED = {"gated": (True,)}
CONFIGS["moe_gemm"] = (
    *(
        Row(
            (INTERPRETER.arch,),
            Config({"BLOCK_M": size, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP": 2}),
            {"block": (size,)},
        )
        for size in (16, 64, 128)
    ),
    # Tiles of float32 take twice the shared memory.
    *(
        Row((*CDNA, *RDNA, "sm_90"), _gemm(size, 32, 32, warps=4, stages=1), {"block": (size,), "element": (4,)})
        for size in (16, 64, 128)
    ),
    # Decodes wait for weights: small tiles of pairs, much of the inner dimension in flight.
    # Of 64 KiB of LDS, gate and up of 128 inputs would leave room for one workgroup.
    Row(("gfx90a", "gfx942"), _gemm(16, 64, 64, warps=4, stages=2), {**_DECODE, **_GATED}),
    Row(CDNA, _gemm(16, 64, 128, warps=4, stages=2), _DECODE),
    Row(("sm_90",), _gemm(16, 64, 128, warps=4, stages=4), _DECODE, 108 * KIB),
    Row(("sm_90",), _gemm(16, 64, 128, warps=4, stages=2), _DECODE),
    Row(RDNA, _gemm(16, 32, 64, warps=2, stages=1), _DECODE),
    # A gated tile has two accumulators, and so half the columns.
    Row(CDNA, _gemm(64, 64, 64, warps=4, stages=2), {**_FEW, **_GATED}),
    Row(CDNA, _gemm(64, 128, 64, warps=4, stages=2), _FEW),
    Row(CDNA, _gemm(128, 64, 64, warps=4, stages=2), {**_MANY, **_GATED}),
    Row(CDNA, _gemm(128, 128, 64, warps=4, stages=2), _MANY),
    Row(("sm_90",), _gemm(64, 64, 64, warps=4, stages=4), {**_FEW, **_GATED}),
    Row(("sm_90",), _gemm(64, 128, 64, warps=4, stages=4), _FEW),
    Row(("sm_90",), _gemm(128, 64, 64, warps=8, stages=3), {**_MANY, **_GATED}),
    Row(("sm_90",), _gemm(128, 128, 64, warps=8, stages=3), _MANY),
    Row(RDNA, _gemm(64, 32, 32, warps=4, stages=1), _FEW),
    Row(RDNA, _gemm(128, 32, 32, warps=8, stages=1), _MANY),
)
CONFIGS["moe_combine"] = (
    Row((INTERPRETER.arch,), Config({"COLUMNS": 32})),
    Row(CDNA, Config({"COLUMNS": 2048}, num_warps=4)),
    Row(ALL, Config({"COLUMNS": 1024}, num_warps=4)),
)
CONFIGS["adjust"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 8})),
    Row(ALL, Config({"TILE": 256}, num_warps=4)),
)
CONFIGS["mask"] = (
    Row((INTERPRETER.arch,), Config({"WORDS": 2})),
    Row(ALL, Config({"WORDS": 128}, num_warps=4)),
)
CONFIGS["argmax"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 256})),
    # Two programs of a multiprocessor read a whole row each: many loads in flight. On AMD, reductions in two stages
    # are reported to go wrong with Triton 3.6.
    Row((*CDNA, *RDNA), Config({"TILE": 8192}, num_warps=8)),
    Row(ALL, Config({"TILE": 8192}, num_warps=8, num_stages=2)),
)
CONFIGS["weigh"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 512})),
    # Sixteen tokens a thread, whose keys, places and addresses are all in registers.
    Row(CDNA, Config({"TILE": 4096}, num_warps=4)),
    Row(ALL, Config({"TILE": 4096}, num_warps=8)),
)
CONFIGS["draw"] = (
    Row((INTERPRETER.arch,), Config({"ROOM": 128, "TILE": 1024})),
    Row(ALL, Config({"ROOM": 1024, "TILE": 2048}, num_warps=8)),
)
CONFIGS["logprobs_tile"] = (
    Row((INTERPRETER.arch,), Config({"TILE": 128})),
    Row(CDNA, Config({"TILE": 4096}, num_warps=4)),
    Row(ALL, Config({"TILE": 4096}, num_warps=8)),
)
CONFIGS["logprobs_row"] = (Row(ALL, Config(num_warps=4)),)
CONFIGS["keep_equal"] = (
    Row((INTERPRETER.arch,), Config({"ROWS": 2})),
    Row(ALL, Config({"ROWS": 16}, num_warps=4)),
)
CONFIGS["keep_likely"] = (Row(ALL, Config(num_warps=4)),)


class Launch(NamedTuple):
    """A kernel's tiles, and these with the compiler's options as keywords of its launch."""

    blocks: Mapping[str, int]
    keywords: Mapping[str, int]


@functools.cache
def launch_of(kernel: str, device: torch.device, **shape: object) -> Launch:
    """How a kernel is launched on a device, found once for each shape of the problem."""
    target = target_of(device)
    config = config_of(kernel, target, **shape)
    return Launch(config.blocks, {**config.blocks, **config.options(target)})
