"""Attention of one token a row, or a few, over the paged cache, each row cut into pieces that run apart (split-KV).

Flash-Decoding (Dao et al., 2023) over pages. How a row is cut follows from its length alone, so its result does not
depend on its batch: pieces of PIECE tokens, of a multiple of that where more than MAX_PIECES would be needed. What
comes of the pieces is put together by `attention_merge`.

Programs walk a list of pieces (a persistent grid): a captured graph has one grid, whatever its rows' lengths are.
"""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv, next_power_of_2
from models.kernels.triton.attention_tile import MAX_PIECES, NOTHING_YET, attend_tile, piece_length
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, WHOLE, Target, config_of
from models.kernels.triton.configs_dense import launch_of
from models.kernels.types import AttentionOptions, KVCacheTensor


@triton.jit(do_not_specialize=["table_stride", "num_pieces"])  # They differ from step to step.
def attention_decode_kernel(
    q_ptr,  # [B * QUERY_LEN, Hq, D]
    partial_ptr,  # [B, pieces, QUERY_LEN * Hq, D] float32
    partial_lse_ptr,  # [B, pieces, QUERY_LEN * Hq] float32, logarithms to base 2
    k_cache_ptr,  # [num_blocks, Hkv, BLOCK_SIZE, D]
    v_cache_ptr,
    items_ptr,  # [items] int32: row * MAX_PIECES + piece
    num_items_ptr,  # [1] int32
    seq_lens_ptr,  # [B] int32
    tables_ptr,  # [B, max_blocks] int32
    q_stride,
    q_head_stride,
    block_stride,
    table_stride,
    num_pieces,
    scale,
    soft_cap,
    window,
    head_dim,  # as in attend_tile
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr = WHOLE,  # as in attend_tile
):
    """Grid: KV heads and their tiles x programs that share the items out.

    The query heads of a KV head, of all of a row's tokens, are the rows of one tile, or of several.
    """
    kv_head = tl.program_id(0) // TILES
    members = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = members // GROUP
    heads = kv_head * GROUP + members % GROUP
    is_query = tokens < QUERY_LEN
    dims = tl.arange(0, D_TILE)
    is_value = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = tokens[:, None] * q_stride + heads[:, None] * q_head_stride
    q_offsets = q_rows + dims[None, :]

    for item in range(tl.program_id(1), tl.load(num_items_ptr), tl.num_programs(1)):
        place = tl.load(items_ptr + item)
        row = place // MAX_PIECES
        piece = place % MAX_PIECES
        length = tl.load(seq_lens_ptr + row)
        piece_len = piece_length(length)
        end = tl.minimum((piece + 1) * piece_len, length)
        start = piece * piece_len
        if HAS_WINDOW:
            # From the first key that the row's first query sees. None may be left: the piece then adds nothing.
            start = tl.maximum(start, tl.maximum(length - QUERY_LEN - window + 1, 0) // BLOCK_N * BLOCK_N)
        positions = tl.where(is_query, length - QUERY_LEN + tokens, -1)
        if DEPTH < D_TILE:
            q = q_ptr + row.to(tl.int64) * (QUERY_LEN * q_stride) + q_rows
        else:
            q = tl.load(q_ptr + row.to(tl.int64) * (QUERY_LEN * q_stride) + q_offsets, mask=is_value, other=0.0)
        acc = tl.zeros([BLOCK_M, D_TILE], tl.float32)
        peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        for key in range(start, end, BLOCK_N):
            acc, peak, total = attend_tile(
                q, is_query, acc, peak, total, k_cache_ptr, v_cache_ptr, table_ptr, key, end, positions, kv_head,
                block_stride, scale, soft_cap, window, head_dim, True, HAS_WINDOW, HAS_SOFT_CAP, BLOCK_SIZE, HEAD_DIM,
                D_TILE, BLOCK_N, DEPTH,
            )  # fmt: skip
        is_any = total > 0
        safe = tl.where(is_any, total, 1.0)
        lse = tl.where(is_any, peak + tl.log2(safe), float("-inf"))
        places = (row * num_pieces + piece).to(tl.int64) * (QUERY_LEN * KV_HEADS * GROUP)
        places += tokens * (KV_HEADS * GROUP) + heads
        tl.store(partial_lse_ptr + places, lse, mask=is_query)
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc / safe[:, None], mask=is_value)


def attention_decode(
    q: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    cache: KVCacheTensor,
    items: torch.Tensor,
    num_items: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    *,
    query_len: int = 1,
    max_programs: int | None = None,
) -> None:
    """Attend from the last `query_len` tokens of each row, piece by piece.

    q [B * query_len, Hq, D]: any strides but the last, 1. `partial` [B, pieces, query_len * Hq, D] and `partial_lse`
    [B, pieces, query_len * Hq], float32, get the pieces' results and the logarithms, to base 2, of their weights.
    `items` and `num_items` [1], int32: what `pieces.list_pieces` gives; `items` may be longer. `seq_lens` [B] and
    `block_tables` [B, max_blocks], int32. Caches as in `store`, the step's own K and V in them. As many programs run
    as there are items and KV heads, unless `max_programs` is less.
    """
    kv_heads, block_size, head_dim = cache.k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    launch = launch_of("attention_decode", q.device, head_dim=head_dim, element=q.element_size())
    rows, tiles = _tiles(query_len * group, head_dim)
    programs = items.shape[0]
    if max_programs is not None:
        programs = min(programs, cdiv(max_programs, kv_heads * tiles))
    if programs == 0:
        return
    scale = options.scale * options.k_scale
    attention_decode_kernel[(kv_heads * tiles, programs)](
        q,
        partial,
        partial_lse,
        cache.k_cache,
        cache.v_cache,
        items,
        num_items,
        seq_lens,
        block_tables,
        *q.stride()[:2],
        cache.k_cache.stride(0),
        block_tables.stride(0),
        partial.shape[1],
        scale if options.soft_cap is None else scale / options.soft_cap,
        options.soft_cap or 0.0,
        options.sliding_window or 0,
        head_dim,
        HAS_WINDOW=options.sliding_window is not None,
        HAS_SOFT_CAP=options.soft_cap is not None,
        QUERY_LEN=query_len,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        D_TILE=max(16, next_power_of_2(head_dim)),
        BLOCK_M=rows,
        TILES=tiles,
        **launch.keywords,
    )


def _tiles(queries: int, head_dim: int) -> tuple[int, int]:
    """Rows of a tile, and tiles, of so many queries.

    A matrix instruction has at least 16 rows; more than the most here, and registers spill.
    """
    rows = min(max(16, next_power_of_2(queries)), 64 if head_dim <= 128 else 32)
    return rows, cdiv(queries, rows)


def _compilation(variant: str, target: Target, head_dim: int, group: int, **more: object) -> Compilation:
    own = f"*{more.get('dtype', 'bf16')}"
    cache_type = target.fp8_pointer if more.get("fp8") else own
    strides = ("q_stride", "q_head_stride", "block_stride")
    query_len = int(str(more.get("tokens", 1)))
    rows, tiles = _tiles(query_len * group, head_dim)
    return Compilation(
        kernel=attention_decode_kernel,
        variant=variant,
        target=target,
        config=config_of("attention_decode", target, head_dim=head_dim, element=4 if own == "*fp32" else 2),
        signature={
            "q_ptr": own,
            **dict.fromkeys(("partial_ptr", "partial_lse_ptr"), "*fp32"),
            **dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache_type),
            **dict.fromkeys(("items_ptr", "num_items_ptr", "seq_lens_ptr", "tables_ptr"), "*i32"),
            **dict.fromkeys((*strides, "table_stride", "num_pieces", "window", "head_dim"), "i32"),
            **dict.fromkeys(("scale", "soft_cap"), "fp32"),
        },
        constexprs={
            "HAS_WINDOW": bool(more.get("window")),
            "HAS_SOFT_CAP": bool(more.get("soft_cap")),
            "QUERY_LEN": query_len,
            "KV_HEADS": 8,
            "GROUP": group,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "D_TILE": next_power_of_2(head_dim),
            "BLOCK_M": rows,
            "TILES": tiles,
        },
        divisible=frozenset(strides),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        has_dot=own != "*fp32" or target.has_float32_matrices,
    )


COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _compilation("bf16 d64 window", target, 64, 8, window=True),
        _compilation("bf16 d128", target, 128, 4),
        _compilation("bf16 d128, 4 tokens a row", target, 128, 4, tokens=4),
        _compilation("bf16 d128, 17 tokens a row", target, 128, 8, tokens=17),
        _compilation("bf16 d256 window soft cap", target, 256, 2, window=True, soft_cap=True),
        _compilation("fp16 d128", target, 128, 4, dtype="fp16"),
        _compilation("fp32 d128", target, 128, 4, dtype="fp32"),
        *((_compilation("FP8 cache d128", target, 128, 4, fp8=True),) if target.fp8 else ()),
    )
)
