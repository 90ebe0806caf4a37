"""Causal attention of spans of tokens over the paged cache: prompts, and chunks of them after a cached prefix.

FlashAttention-2 (Dao, 2023) over pages (Kwon et al., 2023). A program takes a tile of queries of one row, with all the
query heads that share a KV head as further rows of the tile, so that each page is read once for all of them.
"""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import next_power_of_2
from models.kernels.triton.attention_tile import LOG2_E, NOTHING_YET, attend_tile
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, WHOLE, Config, Target, config_of, target_of
from models.kernels.types import AttentionOptions, KVCacheTensor


@triton.jit(do_not_specialize=["table_stride"])  # It differs from step to step.
def attention_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    out_ptr,  # [T, Hq, D], contiguous
    k_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    v_cache_ptr,
    tiles_ptr,  # [tiles, 2] int32: row, and the first of its tokens
    query_starts_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    tables_ptr,  # [B, max_blocks] int32
    sinks_ptr,  # [Hq]
    q_stride,
    q_head_stride,
    block_stride,
    table_stride,
    scale,
    soft_cap,
    v_scale,
    window,
    head_dim,  # as in attend_tile
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # as in attend_tile
):
    """Grid: KV heads x tiles. KV heads come first: on MI300 neighbours run on different dies, each with its own L2."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - query_start
    length = tl.load(seq_lens_ptr + row)
    context = length - num_queries
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride

    # The tile's rows: GROUP heads of one token, then of the next.
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    members = tl.arange(0, BLOCK_M)
    tokens = first_token + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    is_query = (members < TOKENS * GROUP) & (tokens < num_queries)
    positions = tl.where(is_query, context + tokens, -1)
    dims = tl.arange(0, D_TILE)
    is_value = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    places = (query_start + tokens).to(tl.int64)
    q_rows = places[:, None] * q_stride + heads[:, None] * q_head_stride
    q = q_ptr + q_rows if DEPTH < D_TILE else tl.load(q_ptr + (q_rows + dims[None, :]), mask=is_value, other=0.0)

    acc = tl.zeros([BLOCK_M, D_TILE], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks_ptr + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    first_position = context + first_token
    end = tl.minimum(first_position + TOKENS, length)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Tiles of keys that every query sees need no mask.
        start = (first_position + 1) // BLOCK_N * BLOCK_N
        for key in range(0, start, BLOCK_N):
            acc, peak, total = attend_tile(
                q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, end, positions, kv_head,
                block_stride, scale, soft_cap, window, head_dim, False, False, HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM,
                D_TILE, BLOCK_N, DEPTH,
            )  # fmt: skip
    for key in range(start, end, BLOCK_N):
        acc, peak, total = attend_tile(
            q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, end, positions, kv_head,
            block_stride, scale, soft_cap, window, head_dim, True, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM,
            D_TILE, BLOCK_N, DEPTH,
        )  # fmt: skip

    out = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_offsets = (places * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_value)


def tokens_of_tile(q: torch.Tensor, kv_heads: int) -> int:
    """Tokens that one program takes of a row. # q [T, Hq, D]"""
    group = q.shape[1] // kv_heads
    config = config_of("attention_prefill", target_of(q.device), head_dim=q.shape[2], element=q.element_size())
    return _tile_rows(config, group) // group


def _tile_rows(config: Config, group: int) -> int:
    """At least one token's heads."""
    return max(config.blocks["BLOCK_M"], next_power_of_2(group))


def attention_prefill(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    tiles: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from each span's tokens to all before them and themselves, into the same places of `out`.

    q [T, Hq, D]: any strides but the last, 1; `out` [T, Hq, D] contiguous. `tiles` [tiles, 2] int32: rows, and the
    first token of each in `tokens_of_tile` of its span; tokens of no tile are left alone. `query_starts` [B + 1],
    `seq_lens` [B], `block_tables` [B, max_blocks]: int32. Caches as in `store`, the step's own K and V in them.
    """
    if len(tiles) == 0:
        return
    kv_heads, block_size, head_dim = cache.k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    target = target_of(q.device)
    config = config_of("attention_prefill", target, head_dim=head_dim, element=q.element_size())
    scale = options.scale * options.k_scale
    attention_prefill_kernel[(kv_heads, len(tiles))](
        q,
        out,
        cache.k_cache,
        cache.v_cache,
        tiles,
        query_starts,
        seq_lens,
        block_tables,
        q if sinks is None else sinks,
        q.stride(0),
        q.stride(1),
        cache.k_cache.stride(0),
        block_tables.stride(0),
        scale if options.soft_cap is None else scale / options.soft_cap,
        options.soft_cap or 0.0,
        options.v_scale,
        options.sliding_window or 0,
        head_dim,
        HAS_WINDOW=options.sliding_window is not None,
        HAS_SOFT_CAP=options.soft_cap is not None,
        HAS_SINKS=sinks is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        D_TILE=max(16, next_power_of_2(head_dim)),
        **{**config.blocks, "BLOCK_M": _tile_rows(config, group)},
        **config.options(target),
    )


def _compilation(variant: str, target: Target, head_dim: int, group: int, **more: object) -> Compilation:
    own = f"*{more.get('dtype', 'bf16')}"
    cache_type = target.fp8_pointer if more.get("fp8") else own
    pointers = {"q_ptr": own, "out_ptr": own, "k_cache_ptr": cache_type, "v_cache_ptr": cache_type}
    tables = dict.fromkeys(("tiles_ptr", "query_starts_ptr", "seq_lens_ptr", "tables_ptr"), "*i32")
    strides = ("q_stride", "q_head_stride", "block_stride")
    return Compilation(
        kernel=attention_prefill_kernel,
        variant=variant,
        target=target,
        config=config_of("attention_prefill", target, head_dim=head_dim, element=4 if own == "*fp32" else 2),
        signature={
            **pointers,
            **tables,
            "sinks_ptr": own,
            **dict.fromkeys((*strides, "table_stride", "window", "head_dim"), "i32"),
            **dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32"),
        },
        constexprs={
            "HAS_WINDOW": bool(more.get("window")),
            "HAS_SOFT_CAP": bool(more.get("soft_cap")),
            "HAS_SINKS": bool(more.get("sinks")),
            "KV_HEADS": 8,
            "GROUP": group,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "D_TILE": next_power_of_2(head_dim),
        },
        divisible=frozenset(strides),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        has_dot=own != "*fp32" or target.has_float32_matrices,
        # Sinks are read one a row of the tile.
        narrow_loads=8 if more.get("sinks") else 0,
    )


COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _compilation("bf16 d64 window sinks", target, 64, 8, window=True, sinks=True),
        _compilation("bf16 d80", target, 80, 1),
        _compilation("bf16 d128", target, 128, 4),
        _compilation("bf16 d256 window soft cap", target, 256, 2, window=True, soft_cap=True),
        _compilation("fp16 d128", target, 128, 4, dtype="fp16"),
        _compilation("fp32 d128", target, 128, 4, dtype="fp32"),
        *((_compilation("FP8 cache d128", target, 128, 4, fp8=True),) if target.fp8 else ()),
    )
)
