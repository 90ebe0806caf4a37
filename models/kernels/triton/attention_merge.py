"""What comes of the pieces of `attention_decode`, put together: each counts by the weight that its keys had."""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import next_power_of_2
from models.kernels.triton.attention_tile import LOG2_E, NOTHING_YET, piece_length
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


@triton.jit(do_not_specialize=["num_pieces"])  # It differs from step to step.
def attention_merge_kernel(
    partial_ptr,  # [B, pieces, QUERY_LEN * HEADS, D] float32
    partial_lse_ptr,  # [B, pieces, QUERY_LEN * HEADS] float32
    out_ptr,  # [B * QUERY_LEN, HEADS, D]
    seq_lens_ptr,  # [B] int32
    sinks_ptr,  # [HEADS]
    num_pieces,
    v_scale,
    HAS_SINKS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pieces at a time
):
    """Grid: rows x queries of a row. The order of the sums depends on nothing but the row's length."""
    row = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1)
    length = tl.load(seq_lens_ptr + row)
    count = tl.cdiv(length, piece_length(length))
    dims = tl.arange(0, D_TILE)
    acc = tl.zeros([D_TILE], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + member % HEADS).to(tl.float32) * LOG2_E
        total = 1.0
    else:
        peak = NOTHING_YET
        total = 0.0
    for first in range(0, count, BLOCK_P):
        pieces = first + tl.arange(0, BLOCK_P)
        places = (row * num_pieces + pieces) * (QUERY_LEN * HEADS) + member
        lse = tl.load(partial_lse_ptr + places, mask=pieces < count, other=float("-inf"))
        # A piece without keys has left no values.
        is_kept = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=is_kept, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        shrunk = tl.exp2(peak - new_peak)
        acc = acc * shrunk + tl.sum(values * weights[:, None], 0)
        total = total * shrunk + tl.sum(weights, 0)
        peak = new_peak
    out = acc * (v_scale / tl.where(total > 0, total, 1.0))
    places = (row * (QUERY_LEN * HEADS) + member) * HEAD_DIM + dims
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def attention_merge(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    v_scale: float,
    sinks: torch.Tensor | None = None,
    *,
    query_len: int = 1,
) -> None:
    """The rows' attention from that of their pieces, with the `sinks` [Hq] that take probability and add no value.

    `partial` and `partial_lse`: what `attention_decode` left. `out` [B * query_len, Hq, D], contiguous; a row of
    length 0 gets zeros. `seq_lens` [B] int32.
    """
    num_rows, pieces, members, head_dim = partial.shape
    attention_merge_kernel[(num_rows, members)](
        partial,
        partial_lse,
        out,
        seq_lens,
        out if sinks is None else sinks,
        pieces,
        v_scale,
        HAS_SINKS=sinks is not None,
        QUERY_LEN=query_len,
        HEADS=members // query_len,
        HEAD_DIM=head_dim,
        D_TILE=next_power_of_2(head_dim),
        **launch_of("attention_merge", out.device).keywords,
    )


COMPILATIONS = tuple(
    Compilation(
        kernel=attention_merge_kernel,
        variant=f"bf16 d{head_dim}" + (" sinks" if has_sinks else ""),
        target=target,
        config=config_of("attention_merge", target),
        signature={
            **dict.fromkeys(("partial_ptr", "partial_lse_ptr"), "*fp32"),
            "out_ptr": "*bf16",
            "seq_lens_ptr": "*i32",
            "sinks_ptr": "*bf16",
            "num_pieces": "i32",
            "v_scale": "fp32",
        },
        constexprs={
            "HAS_SINKS": has_sinks,
            "QUERY_LEN": 1,
            "HEADS": 32,
            "HEAD_DIM": head_dim,
            "D_TILE": next_power_of_2(head_dim),
        },
        # The head's sink.
        narrow_loads=int(has_sinks),
    )
    for target in TARGETS.values()
    for head_dim, has_sinks in ((128, False), (64, True))
)
