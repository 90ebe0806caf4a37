"""The forms of the kernels of `models.ops.triton.attention`, for each target."""

from models.ops.triton.attention import (
    attention_decode_kernel,
    attention_merge_kernel,
    attention_prefill_kernel,
    decode_tiles,
)
from models.ops.triton.configs import TARGETS, Target, config_of
from models.ops.triton.grids import next_power_of_2
from tools.kernels.compilation import Compilation


def _prefill_compilation(variant: str, target: Target, head_dim: int, group: int, **more: object) -> Compilation:
    own = f"*{more.get('dtype', 'bf16')}"
    cache_type = target.fp8_pointer if more.get("fp8") else own
    pointers = {"q_ptr": own, "out_ptr": own, "k_cache_ptr": cache_type, "v_cache_ptr": cache_type}
    tables = dict.fromkeys(("tiles_ptr", "query_starts_ptr", "seq_lens_ptr", "tables_ptr"), "*i32")
    strides = ("q_stride", "q_head_stride", "block_stride", "v_block_stride")
    value_dim = int(str(more.get("values", head_dim)))
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
            "IS_CHUNKED": bool(more.get("chunked")),
            "HAS_SOFT_CAP": bool(more.get("soft_cap")),
            "HAS_SINKS": bool(more.get("sinks")),
            "KV_HEADS": 8,
            "GROUP": group,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "D_TILE": next_power_of_2(head_dim),
            "V_DIM": value_dim,
            "V_TILE": next_power_of_2(value_dim),
        },
        divisible=frozenset(strides),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        has_dot=own != "*fp32" or target.has_float32_matrices,
        # Sinks are read one a row of the tile.
        narrow_loads=8 if more.get("sinks") else 0,
    )


_ATTENTION_PREFILL_COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _prefill_compilation("bf16 d64 window sinks", target, 64, 8, window=True, sinks=True),
        _prefill_compilation("bf16 d80", target, 80, 1),
        _prefill_compilation("bf16 d128", target, 128, 4),
        _prefill_compilation("bf16 d256 window soft cap", target, 256, 2, window=True, soft_cap=True),
        _prefill_compilation("bf16 d128 chunks", target, 128, 5, window=True, chunked=True),
        _prefill_compilation("bf16 d512", target, 512, 8),
        _prefill_compilation("bf16 d192, values of 128", target, 192, 8, values=128, window=True, sinks=True),
        _prefill_compilation("fp16 d128", target, 128, 4, dtype="fp16"),
        _prefill_compilation("fp32 d128", target, 128, 4, dtype="fp32"),
        *((_prefill_compilation("FP8 cache d128", target, 128, 4, fp8=True),) if target.fp8 else ()),
    )
)


def _decode_compilation(variant: str, target: Target, head_dim: int, group: int, **more: object) -> Compilation:
    own = f"*{more.get('dtype', 'bf16')}"
    cache_type = target.fp8_pointer if more.get("fp8") else own
    strides = ("q_stride", "q_head_stride", "block_stride", "v_block_stride")
    value_dim = int(str(more.get("values", head_dim)))
    query_len = int(str(more.get("tokens", 1)))
    rows, tiles = decode_tiles(query_len * group, head_dim)
    return Compilation(
        kernel=attention_decode_kernel,
        variant=variant,
        target=target,
        config=config_of("attention_decode", target, head_dim=head_dim, element=4 if own == "*fp32" else 2, rows=rows),
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
            "IS_CHUNKED": bool(more.get("chunked")),
            "HAS_SOFT_CAP": bool(more.get("soft_cap")),
            "QUERY_LEN": query_len,
            "KV_HEADS": 8,
            "GROUP": group,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "D_TILE": next_power_of_2(head_dim),
            "V_DIM": value_dim,
            "V_TILE": next_power_of_2(value_dim),
            "BLOCK_M": rows,
            "TILES": tiles,
        },
        divisible=frozenset(strides),
        large=frozenset({"k_cache_ptr", "v_cache_ptr"}),
        has_dot=own != "*fp32" or target.has_float32_matrices,
    )


_ATTENTION_DECODE_COMPILATIONS = tuple(
    compilation
    for target in TARGETS.values()
    for compilation in (
        _decode_compilation("bf16 d64 window", target, 64, 8, window=True),
        _decode_compilation("bf16 d128", target, 128, 4),
        _decode_compilation("bf16 d128, 4 tokens a row", target, 128, 4, tokens=4),
        _decode_compilation("bf16 d128, 17 tokens a row", target, 128, 8, tokens=17),
        _decode_compilation("bf16 d256 window soft cap", target, 256, 2, window=True, soft_cap=True),
        _decode_compilation("bf16 d128 chunks", target, 128, 5, window=True, chunked=True),
        _decode_compilation("bf16 d512", target, 512, 8),
        _decode_compilation("bf16 d192, values of 128", target, 192, 8, values=128, window=True),
        _decode_compilation("fp16 d128", target, 128, 4, dtype="fp16"),
        _decode_compilation("fp32 d128", target, 128, 4, dtype="fp32"),
        *((_decode_compilation("FP8 cache d128", target, 128, 4, fp8=True),) if target.fp8 else ()),
    )
)

_ATTENTION_MERGE_COMPILATIONS = tuple(
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

COMPILATIONS = (*_ATTENTION_PREFILL_COMPILATIONS, *_ATTENTION_DECODE_COMPILATIONS, *_ATTENTION_MERGE_COMPILATIONS)
