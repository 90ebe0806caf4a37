"""Products with dense weights whose sums have one order in steps of any number of rows.

torch's libraries choose tiles and splits by the number of rows. Here they follow from the weight's shape alone, as for
quantized weights (`quantized_products.splits_of`): `--batch-invariant` has these kernels compute all dense products.
"""

import torch
import triton
import triton.language as tl

from models.ops.triton.configs import launch_of, target_of
from models.ops.triton.elementwise import load_some
from models.ops.triton.grids import cdiv, next_power_of_2
from models.ops.triton.launcher import jit
from models.ops.triton.quantized_products import merged, rows_of_tile, split_rows, splits_of


@triton.jit
def sum_inputs(
    x_at,  # [ROWS, DEPTH], of the first inputs
    weight_at,  # [COLUMNS, DEPTH]
    first,
    count,
    K,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The sum over `count` inputs from `first` on, as far as there are any. # [ROWS, COLUMNS] float32"""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    x_at += first
    weight_at += first
    for start in range(first, tl.minimum(first + count, K), DEPTH):
        exists = None if IS_EVEN else depth[None, :] < K - start
        part = load_some(weight_at, exists)
        a = load_some(x_at, exists)
        total = tl.dot(a, tl.trans(part), total, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    return total


@jit(do_not_specialize=["M"])  # It differs from step to step.
def dense_gemm_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N], or any pointer
    out,  # [M, N]; of one split's sums [SPLITS, M, N] float32
    M,
    N,
    K,
    x_stride,
    weight_stride,
    IS_EVEN: tl.constexpr,  # whether K is a multiple of DEPTH
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # Whether a program computes all splits' sums, and adds them in their order
):
    """A tile [ROWS, COLUMNS] of `x @ weight.T + bias`, or of one split's sum.

    Grid: (tiles of N, tiles of M, SPLITS; 1 where IS_WHOLE).
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns past the end compute what is never stored.
    safe_rows, safe_columns = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    x_at = x + safe_rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_at = weight + safe_columns[:, None].to(tl.int64) * weight_stride + depth[None, :]
    share = tl.cdiv(tl.cdiv(K, DEPTH), SPLITS) * DEPTH
    if IS_WHOLE and SPLITS > 1:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in range(SPLITS):
            total += sum_inputs(x_at, weight_at, split * share, share, K, IS_EVEN, ROWS, COLUMNS, DEPTH)
    else:
        total = sum_inputs(x_at, weight_at, tl.program_id(2) * share, share, K, IS_EVEN, ROWS, COLUMNS, DEPTH)
    if HAS_BIAS and IS_WHOLE:
        total += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    at = out + (tl.program_id(2) * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


def dense_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32. # [M, K], [N, K] of one type, rows without gaps -> [M, N]"""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs)
    element = x.element_size()
    launch = launch_of("dense_gemm", x.device, rows=next_power_of_2(rows_of_tile(rows, x.device)), element=element)
    columns = launch_of("dense_gemm", x.device, rows=1, element=element).blocks["COLUMNS"]
    most_rows = split_rows("dense_gemm", target_of(x.device))
    splits, is_whole = splits_of(rows, outputs, cdiv(inputs, launch.blocks["DEPTH"]), columns, most_rows)
    summed = out if is_whole else x.new_empty(splits, rows, outputs, dtype=torch.float32)
    grid = cdiv(outputs, launch.blocks["COLUMNS"]), cdiv(rows, launch.blocks["ROWS"]), 1 if is_whole else splits
    dense_gemm_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        summed,
        rows,
        outputs,
        inputs,
        x.stride(0),
        weight.stride(0),
        IS_EVEN=inputs % launch.blocks["DEPTH"] == 0,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        IS_WHOLE=is_whole,
        **launch.keywords,
    )
    return out if is_whole else merged(summed, out, bias)
