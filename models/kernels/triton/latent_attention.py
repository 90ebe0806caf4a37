"""Absorbed attention over the paged latents (DeepSeek-V2, 2024, section 2.1.2): decodes, and tokens that select.

One latent of a token is the key and the value of all heads, so a program takes a tile of one query's heads over a run
of latents. How long runs are depends on the token alone, which keeps its result apart from its batch; they are then
merged (Flash-Decoding, Dao et al., 2023). With DeepSeek-V3.2's indexer the latents are those of chosen positions
instead of neighbours.
"""

import math

import torch
import triton
import triton.language as tl

import models.kernels.triton.configs_latent  # noqa: F401, the rows of these kernels
from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, WHOLE, config_of
from models.kernels.triton.configs_dense import launch_of

MAX_PARTIAL_ELEMENTS = 1 << 26
"""Of the runs' results that are in memory at a time: 256 MiB. One token over a long context may need more."""
MAX_RUNS = tl.constexpr(64)
"""Of a token, whose runs are longer where it sees more."""


@triton.jit
def _run_length(length, RUN: tl.constexpr):
    """By the token's own number of latents alone."""
    return RUN * tl.maximum(tl.cdiv(length, RUN * MAX_RUNS), 1)


@triton.jit
def _load_part(rows, has_row, first, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """TILE numbers of some rows from `first` on, 0 behind the first WIDTH. # pointers [N, 1], [N] -> [N, TILE]"""
    columns = first + tl.arange(0, TILE)[None, :]
    return tl.load(rows + columns, mask=has_row[:, None] & (columns < WIDTH), other=0.0)


# What differs from step to step; the tokens of a step may begin anywhere in their tensors.
@triton.jit(
    do_not_specialize=["table_stride", "num_runs"], do_not_specialize_on_alignment=["token_rows", "token_lens"]
)
def latent_attention_kernel(
    q,  # [T, H, RANK]
    q_rope,  # [T, H, ROPE]
    vectors,  # [blocks, BLOCK_SIZE, RANK + ROPE], 8-bit or of q's type
    block_tables,  # [rows, max_blocks] int32
    token_rows,  # [T] int32, the block table of each token
    token_lens,  # [T] int32, latents that each sees
    selected,  # [T, num_selected] int64, -1 for none; any pointer where not IS_SPARSE
    partial,  # [T, H, runs, RANK] float32
    partial_lse,  # [T, H, runs] float32, base 2
    score_scale,  # Of the scores, to base 2, and of what the cache holds
    value_scale,  # Of what the cache holds
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    block_stride,
    table_stride,
    num_selected,
    num_heads,
    num_runs,
    rank,  # RANK, as the compiler does not know it: of parts whose number it knows it would load all at once
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_TILE: tl.constexpr,  # RANK and ROPE filled up to powers of two
    ROPE_TILE: tl.constexpr,
    HEADS: tl.constexpr,  # Of one program
    KEYS: tl.constexpr,  # Latents at a time
    RUN: tl.constexpr,  # Latents of one program, or a multiple where there are many
    IS_SPARSE: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # Of the latents' numbers, how many are multiplied with queries at a time
):
    """A tile [HEADS, RANK] of one token's attention to one run. Grid: (runs, tiles of heads, T)."""
    run, token = tl.program_id(0), tl.program_id(2)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    length = num_selected if IS_SPARSE else tl.load(token_lens + token)
    width = _run_length(length, RUN)
    first = run * width
    if first >= length:
        return
    last = tl.minimum(first + width, length)
    table = block_tables + tl.load(token_rows + token).to(tl.int64) * table_stride

    ranks = tl.arange(0, RANK_TILE)
    has_rank, has_head = ranks < RANK, heads < num_heads
    dtype: tl.constexpr = q.dtype.element_ty
    queries = q + token.to(tl.int64) * q_stride + heads[:, None] * q_head_stride
    if DEPTH >= RANK_TILE:
        q_latent = _load_part(queries, has_head, 0, RANK, RANK_TILE)
    rope_queries = q_rope + token.to(tl.int64) * rope_stride + heads[:, None] * rope_head_stride
    q_keys = _load_part(rope_queries, has_head, 0, ROPE, ROPE_TILE)

    # A row's maximum begins at a finite number: a run of which nothing is seen then has no NaN in it.
    highest = tl.full([HEADS], -1.0e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    attended = tl.zeros([HEADS, RANK_TILE], tl.float32)
    for start in range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        seen = positions < last
        if IS_SPARSE:
            positions = tl.load(selected + token.to(tl.int64) * num_selected + positions, mask=seen, other=-1)
            seen = positions >= 0
        block = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
        at = vectors + block.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * (RANK + ROPE)
        at = at[:, None]
        # One tile in two parts: the latents, both keys and values, and the key that all heads share.
        if DEPTH < RANK_TILE:
            scores = tl.zeros([HEADS, KEYS], tl.float32)
            for begin in range(0, rank, DEPTH):
                queries_part = _load_part(queries, has_head, begin, RANK, DEPTH)
                part = _load_part(at, seen, begin, RANK, DEPTH).to(dtype)
                scores = tl.dot(queries_part, tl.trans(part), scores, input_precision="ieee")
            keys = _load_part(at + RANK, seen, 0, ROPE, ROPE_TILE).to(dtype)
            scores = tl.dot(q_keys, tl.trans(keys), scores, input_precision="ieee")
            latents = _load_part(at, seen, 0, RANK, RANK_TILE).to(dtype)
        else:
            latents = _load_part(at, seen, 0, RANK, RANK_TILE).to(dtype)
            keys = _load_part(at + RANK, seen, 0, ROPE, ROPE_TILE).to(dtype)
            scores = tl.dot(q_keys, tl.trans(keys), input_precision="ieee")
            scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * score_scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, 1)
        attended = attended * shrink[:, None]
        attended = tl.dot(shares.to(latents.dtype), latents, attended, input_precision="ieee")
        highest = higher

    lse = tl.where(total > 0.0, highest + tl.log2(total), float("-inf"))
    attended = attended * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    place = (token.to(tl.int64) * num_heads + heads) * num_runs + run
    tl.store(partial_lse + place, lse, mask=has_head)
    tl.store(partial + place[:, None] * RANK + ranks[None, :], attended, mask=has_head[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["token_lens"])
def merge_latent_runs_kernel(
    partial,  # [T, H, runs, RANK] float32
    partial_lse,  # [T, H, runs] float32, base 2
    token_lens,  # [T] int32, or any pointer where every token has `num_seen` latents
    out,  # [T, H, RANK]
    num_heads,
    num_runs,
    num_seen,  # Latents of every token; 0: as token_lens says
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    RUN: tl.constexpr,
):
    """One head of one token: its runs' results by what their scores weigh, in their order. Grid: (T, H)."""
    token, head = tl.program_id(0), tl.program_id(1)
    length = num_seen
    if num_seen == 0:
        length = tl.load(token_lens + token)
    ranks = tl.arange(0, RANK_TILE)
    has_rank = ranks < RANK
    place = (token.to(tl.int64) * num_heads + head) * num_runs
    highest, total = -1.0e30, 0.0
    merged = tl.zeros([RANK_TILE], tl.float32)
    for run in range(tl.cdiv(length, _run_length(length, RUN))):
        lse = tl.load(partial_lse + place + run)
        part = tl.load(partial + (place + run) * RANK + ranks, mask=has_rank, other=0.0)
        higher = tl.maximum(highest, lse)
        shrink, share = tl.exp2(highest - higher), tl.exp2(lse - higher)
        merged = merged * shrink + part * share
        total = total * shrink + share
        highest = higher
    merged = merged / tl.where(total > 0.0, total, 1.0)
    at = out + (token.to(tl.int64) * num_heads + head) * RANK + ranks
    tl.store(at, merged.to(out.dtype.element_ty), mask=has_rank)


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    vectors: torch.Tensor,
    block_tables: torch.Tensor,
    token_rows: torch.Tensor,
    token_lens: torch.Tensor,
    *,
    longest: int,
    scale: float,
    cache_scale: float = 1.0,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each token's heads attend to in the latents' space; softmax and sums in float32. # -> [T, H, rank]

    q [T, H, rank], absorbed; q_rope [T, H, rope], rotated; vectors [blocks, block_size, rank + rope], times
    `cache_scale` where they are 8-bit; block_tables [rows, max_blocks] int32; token_rows [T] int32, each token's among
    them; token_lens [T] int32, how many latents it sees, `longest` the most of these. `scale` is the scores'. With
    `selected` [T, K] int64 a token sees the latents at those positions, -1 for none, and `token_lens` is not read.
    """
    num_tokens, num_heads, rank = q.shape
    shape = {"heads": num_heads, "sparse": selected is not None, "element": q.element_size()}
    launch = launch_of("latent_attention", q.device, **shape)
    merge = launch_of("merge_latent_runs", q.device)
    run = launch.blocks["RUN"]
    num_runs = min(MAX_RUNS.value, cdiv(longest if selected is None else selected.shape[1], run))
    out = q.new_empty(num_tokens, num_heads, rank)
    rank_tile = max(16, next_power_of_2(rank))
    rope = q_rope.shape[2]
    step = max(1, MAX_PARTIAL_ELEMENTS // (num_heads * num_runs * rank))
    tokens = (q, q_rope, token_rows, token_lens, out)
    for first in range(0, num_tokens, step):
        some = slice(first, min(first + step, num_tokens))
        count = some.stop - first
        # Most steps are one part: slices of the whole would take the host longer than the launch.
        q_part, rope_part, rows_part, lens_part, out_part = (
            tokens if count == num_tokens else [each[some] for each in tokens]
        )
        partial = q.new_empty(count, num_heads, num_runs, rank, dtype=torch.float32)
        lse = q.new_empty(count, num_heads, num_runs, dtype=torch.float32)
        chosen = block_tables if selected is None else selected[some].contiguous()
        latent_attention_kernel[(num_runs, cdiv(num_heads, launch.blocks["HEADS"]), count)](
            q_part,
            rope_part,
            vectors,
            block_tables,
            rows_part,
            lens_part,
            chosen,
            partial,
            lse,
            scale * cache_scale * math.log2(math.e),
            cache_scale,
            *q.stride()[:2],
            *q_rope.stride()[:2],
            vectors.stride(0),
            block_tables.stride(0),
            0 if selected is None else selected.shape[1],
            num_heads,
            num_runs,
            rank,
            BLOCK_SIZE=vectors.shape[1],
            RANK=rank,
            ROPE=rope,
            RANK_TILE=rank_tile,
            ROPE_TILE=max(16, next_power_of_2(rope)),
            IS_SPARSE=selected is not None,
            **launch.keywords,
        )
        merge_latent_runs_kernel[(count, num_heads)](
            partial,
            lse,
            lens_part,
            out_part,
            num_heads,
            num_runs,
            0 if selected is None else selected.shape[1],
            RANK=rank,
            RANK_TILE=rank_tile,
            RUN=run,
            **merge.keywords,
        )
    return out


def _compilations() -> tuple[Compilation, ...]:
    pointers = {
        "q": "*bf16",
        "q_rope": "*bf16",
        "block_tables": "*i32",
        "token_rows": "*i32",
        "token_lens": "*i32",
        "selected": "*i64",
    }
    sums = {"partial": "*fp32", "partial_lse": "*fp32"}
    strides = ("q_stride", "q_head_stride", "rope_stride", "rope_head_stride", "block_stride")
    integers = (*strides, "rank", "table_stride", "num_selected", "num_heads", "num_runs")
    scales = {"score_scale": "fp32", "value_scale": "fp32"}
    shape = {"BLOCK_SIZE": 16, "RANK": 512, "ROPE": 64, "RANK_TILE": 512, "ROPE_TILE": 64}
    fp8 = {"e4m3fn": "*fp8e4nv", "e4m3fnuz": "*fp8e4b8"}
    found = []
    for target in TARGETS.values():
        forms = [("decode", "*bf16", 16, False), ("decode", "*bf16", 128, False), ("sparse", "*bf16", 128, True)]
        if target.fp8 is not None:
            forms.append(("decode fp8", fp8[target.fp8], 16, False))
        for form, cache, heads, is_sparse in forms:
            found.append(
                Compilation(
                    kernel=latent_attention_kernel,
                    variant=f"{form} 512+64 h{heads}",
                    target=target,
                    config=config_of("latent_attention", target, heads=heads, sparse=is_sparse, element=2),
                    signature={"vectors": cache, **pointers, **sums, **scales, **dict.fromkeys(integers, "i32")},
                    constexprs={**shape, "IS_SPARSE": is_sparse},
                    divisible=frozenset(strides),
                    large=frozenset({"vectors", "partial"}),
                    has_dot=True,
                )
            )
        config = config_of("latent_attention", target, heads=16, sparse=False, element=2)
        found.append(
            Compilation(
                kernel=merge_latent_runs_kernel,
                variant="512",
                target=target,
                config=config_of("merge_latent_runs", target),
                signature={**sums, "token_lens": "*i32", "out": "*bf16", **dict.fromkeys(integers[-2:], "i32")}
                | {"num_seen": "i32"},
                constexprs={"RANK": 512, "RANK_TILE": 512, "RUN": config.blocks["RUN"]},
                large=frozenset({"partial"}),
            )
        )
    return tuple(found)


COMPILATIONS = _compilations()
