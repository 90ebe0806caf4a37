"""The lightning indexer's scores over its paged keys (DeepSeek-V3.2, 2025): small heads that choose what to attend to.

Written to memory head by head, as a plain product has them, the scores would be as many times larger as there are
heads; here a tile of them is weighed and summed in registers.
"""

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


# What differs from step to step; the tokens of a step may begin anywhere in their tensors.
@triton.jit(
    do_not_specialize=["table_stride", "score_stride", "width"],
    do_not_specialize_on_alignment=["token_rows", "token_lens"],
)
def indexer_scores_kernel(
    q,  # [T, H, DIM]
    weights,  # [T, H] float32
    vectors,  # [blocks, BLOCK_SIZE, DIM]
    block_tables,  # [rows, max_blocks] int32
    token_rows,  # [T] int32, the block table of each token
    token_lens,  # [T] int32, keys that each sees
    scores,  # [T, width] float32
    num_heads,
    block_stride,
    table_stride,
    score_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS: tl.constexpr,  # All of them, filled up to a power of two
    KEYS: tl.constexpr,
):
    """Scores of one token for KEYS keys, minus infinity where it sees none. Grid: (tiles of keys, T)."""
    token = tl.program_id(1)
    positions = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    length = tl.load(token_lens + token)
    at = scores + token.to(tl.int64) * score_stride + positions
    if tl.program_id(0) * KEYS >= length:
        tl.store(at, tl.full([KEYS], float("-inf"), tl.float32), mask=positions < width)
        return
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM_TILE)
    has_head, has_dim, seen = heads < num_heads, dims < DIM, positions < length
    table = block_tables + tl.load(token_rows + token).to(tl.int64) * table_stride
    block = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
    rows = vectors + block.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * DIM
    keys = tl.load(rows[:, None] + dims[None, :], mask=seen[:, None] & has_dim[None, :], other=0.0)
    place = token.to(tl.int64) * num_heads + heads
    queries = tl.load(q + place[:, None] * DIM + dims[None, :], mask=has_head[:, None] & has_dim[None, :], other=0.0)
    weight = tl.load(weights + place, mask=has_head, other=0.0)
    by_head = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    summed = tl.sum(tl.maximum(by_head, 0.0) * weight[:, None], 0)
    tl.store(at, tl.where(seen, summed, float("-inf")), mask=positions < width)


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """The sum over heads of `weights * relu(q . key)`, minus infinity for what is not seen. # -> [T, width] float32

    q [T, H, dim], weights [T, H] float32, vectors [blocks, block_size, dim], block_tables [rows, max_blocks] int32,
    token_rows [T] int32, token_lens [T] int32: of which row each token is, and how many of its keys it sees.
    """
    num_tokens, num_heads, dim = q.shape
    launch = launch_of("indexer_scores", q.device)
    scores = q.new_empty(num_tokens, width, dtype=torch.float32)
    indexer_scores_kernel[(cdiv(width, launch.blocks["KEYS"]), num_tokens)](
        q.contiguous(),
        weights.contiguous(),
        vectors,
        block_tables,
        token_rows,
        token_lens,
        scores,
        num_heads,
        vectors.stride(0),
        block_tables.stride(0),
        scores.stride(0),
        width,
        BLOCK_SIZE=vectors.shape[1],
        DIM=dim,
        DIM_TILE=max(16, next_power_of_2(dim)),
        HEADS=max(16, next_power_of_2(num_heads)),
        **launch.keywords,
    )
    return scores


COMPILATIONS = tuple(
    Compilation(
        kernel=indexer_scores_kernel,
        variant="bf16 64x128",
        target=target,
        config=config_of("indexer_scores", target),
        signature={
            **dict.fromkeys(("q", "vectors"), "*bf16"),
            **dict.fromkeys(("weights", "scores"), "*fp32"),
            **dict.fromkeys(("block_tables", "token_rows", "token_lens"), "*i32"),
            **dict.fromkeys(("num_heads", "block_stride", "table_stride", "score_stride", "width"), "i32"),
        },
        constexprs={"BLOCK_SIZE": 16, "DIM": 128, "DIM_TILE": 128, "HEADS": 64},
        divisible=frozenset({"block_stride"}),
        large=frozenset({"vectors", "scores"}),
        has_dot=True,
    )
    for target in TARGETS.values()
)
