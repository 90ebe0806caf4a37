"""What the grouped GEMMs of experts share: the pairs that a program has, and what becomes of its sums.

`moe_gemm` has dense weights, `moe_fp8_gemm` and `moe_four_bit_gemm` those that stay quantised.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.cpu.structures import CLAMPED_SILU, SILU
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import Target, config_of
from models.kernels.triton.gated import gated_product
from models.kernels.triton.moe_sort import SortedPairs
from models.layers.activation import Gating

NO_ACTIVATION = -1


@triton.jit
def pairs_of_block(pairs, block_experts, block_rows, block, BLOCK_M: tl.constexpr):
    """A block's pairs, which of its rows are some, and their expert. # [BLOCK_M] int64, [BLOCK_M], int64"""
    lanes = tl.arange(0, BLOCK_M)
    is_pair = lanes < tl.load(block_rows + block)
    pair = tl.load(pairs + block * BLOCK_M + lanes, mask=is_pair, other=0).to(tl.int64)
    return pair, is_pair, tl.load(block_experts + block).to(tl.int64)


@triton.jit
def store_products(
    acc,  # [BLOCK_M, columns of the tile] float32
    up,  # The same of what `acc` gates, `columns` further on in the weight; any where there is no ACTIVATION
    bias,  # [experts, columns or twice as many]; any pointer where not HAS_BIAS
    out,  # [num_pairs, columns]
    pair,
    is_pair,
    weight_row,  # [columns of the tile], among those of all experts
    column,  # [columns of the tile]
    columns,
    alpha,
    limit,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Adds biases, gates, and writes to the places of the pairs."""
    if HAS_BIAS:
        acc += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if ACTIVATION >= 0:
        if HAS_BIAS:
            up += tl.load(bias + weight_row + columns).to(tl.float32)[None, :]
        acc = gated_product(acc, up, alpha, limit, ACTIVATION)
    at = out + pair[:, None] * columns + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & (column < columns)[None, :])


class Products(NamedTuple):
    """A grouped GEMM's outputs, and those arguments of its launch that are the same whatever the weights are."""

    out: torch.Tensor  # [num_pairs, columns]
    pairs: tuple[torch.Tensor, ...]
    columns: int
    gating: Gating
    forms: Mapping[str, int]
    """constexprs"""


def products_of(
    rows: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    sorted_pairs: SortedPairs,
    num_pairs: int,
    gating: Gating | None,
) -> Products:
    """For `rows` [tokens, inner] or [num_pairs, inner] and a weight of `outputs` rows an expert."""
    columns = outputs // (1 if gating is None else 2)
    gating = gating or Gating(NO_ACTIVATION)
    forms = {
        "PAIRS_PER_ROW": num_pairs // max(1, rows.shape[0]),
        "HAS_BIAS": bias is not None,
        "ACTIVATION": gating.activation,
    }
    return Products(rows.new_empty(num_pairs, columns), tuple(sorted_pairs[:4]), columns, gating, forms)


class Form(NamedTuple):
    """A grouped GEMM that is compiled ahead of time."""

    block: int
    gating: Gating

    @property
    def is_gated(self) -> bool:
        """Whether the weight has gates and what they gate."""
        return self.gating.activation != NO_ACTIVATION

    @property
    def name(self) -> str:
        """Of the variant."""
        clamped = " clamped" if self.gating.activation == CLAMPED_SILU else ""
        return f"{'gate-up' if self.is_gated else 'down'} {self.block}{clamped}"


BLOCKS = (16, 64, 128)
"""Pairs of a block, as `block_of` chooses."""
FORMS = tuple(Form(block, Gating(activation)) for activation in (SILU, NO_ACTIVATION) for block in BLOCKS)
CLAMPED_FORMS = tuple(
    Form(block, Gating(activation)) for activation in (CLAMPED_SILU, NO_ACTIVATION) for block in BLOCKS
)
"""gpt-oss's."""


def compilation_of(
    kernel: Any,
    table: str,
    form: Form,
    target: Target,
    *,
    prefix: str,
    pointers: Mapping[str, str],
    integers: tuple[str, ...],
    constexprs: Mapping[str, object],
    divisible: frozenset[str],
    has_bias: bool = False,
    narrow_loads: int = 0,
    **shape: object,
) -> Compilation:
    """One form of a grouped GEMM on one target. `pointers` and `integers`: beside those that all have."""
    return Compilation(
        kernel=kernel,
        variant=f"{prefix} {form.name}",
        target=target,
        config=config_of(table, target, block=form.block, gated=form.is_gated, **shape),
        signature={
            **dict.fromkeys(("bias", "out"), "*bf16"),
            **pointers,
            **dict.fromkeys(("pairs", "block_experts", "block_rows", "num_blocks"), "*i32"),
            **dict.fromkeys(("columns", "inner", "row_stride", *integers), "i32"),
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constexprs={
            "PAIRS_PER_ROW": 8 if form.is_gated else 1,
            "HAS_BIAS": has_bias,
            "ACTIVATION": form.gating.activation,
            **constexprs,
        },
        divisible=divisible | {"columns", "inner", "row_stride"},
        large=frozenset({"rows", "weight", "scales", "zeros", "out"}),
        has_dot=True,
        narrow_loads=narrow_loads,
    )
