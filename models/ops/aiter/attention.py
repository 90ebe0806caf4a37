"""The library's attention over Kaon's paged cache, and over keys and values that are gathered from it. Called by
`models.attention.aiter`, `models.ops.flash_attention`, and by the probe.

Two of the library's functions read the cache in its layout, [num_blocks, kv_heads, block, head_dim] with any stride
from block to block: `unified_attention`, to which it is a view of [num_blocks, block, kv_heads, head_dim], and
`paged_attention_v1`, which calls it HND. `paged_attention_rocm`, `pa_fwd_asm` and `pa_persistent_fwd` need keys as
[num_blocks, kv_heads, head_dim / x, block, x], and values with the head before the block.
"""

from typing import NamedTuple

import torch

from models.ops.aiter.library import accepts, function
from models.ops.types import AttentionOptions, KVCacheTensor

_PARTITION = 256
"""Keys of one split of a decode."""
_NO_WINDOW = (-1, -1)


class Rows(NamedTuple):
    """Rows of a step, and bounds that the host knows."""

    starts: torch.Tensor  # [B + 1] int32, where each row's tokens begin
    lengths: torch.Tensor  # [B] int32
    tables: torch.Tensor  # [B, max_blocks] int32
    most_queries: int
    most_keys: int
    """An upper bound."""


def takes_unified(options: AttentionOptions, sinks: torch.Tensor | None) -> bool:
    """Whether `unified` supports these options."""
    if options.is_chunked:
        return False
    return sinks is None or accepts("unified_attention", "sinks")


def takes_paged(options: AttentionOptions, sinks: torch.Tensor | None) -> bool:
    """Whether `paged` supports these options."""
    if options.is_chunked:
        return False
    return sinks is None and (options.sliding_window is None or accepts("paged_attention_v1", "sliding_window"))


def unified(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KVCacheTensor,
    rows: Rows,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> None:
    """Causal attention of any mix of prompts and decodes. # q and out [T, Hq, D]"""
    k_scale, v_scale = _scales(cache, options)
    window = _NO_WINDOW if options.sliding_window is None else (options.sliding_window - 1, 0)
    function("unified_attention")(
        q=q,
        k=cache.k_cache.transpose(1, 2),
        v=cache.v_cache.transpose(1, 2),
        out=out,
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.most_queries,
        seqused_k=rows.lengths,
        max_seqlen_k=rows.most_keys,
        softmax_scale=options.scale,
        causal=True,
        window_size=window,
        block_table=rows.tables,
        softcap=options.soft_cap or 0.0,
        q_descale=None,
        k_descale=k_scale,
        v_descale=v_scale,
        **({} if sinks is None else {"sinks": sinks}),
    )


def paged(q: torch.Tensor, out: torch.Tensor, cache: KVCacheTensor, rows: Rows, options: AttentionOptions) -> None:
    """Attention of decodes. # q and out [B, Hq, D]"""
    num_rows, heads, head_dim = q.shape
    parts = num_rows * heads * -(-rows.most_keys // _PARTITION)
    workspace = q.new_empty(parts * (head_dim * q.element_size() + 2 * 4), dtype=torch.uint8)
    k_scale, v_scale = _scale(options.k_scale, q.device), _scale(options.v_scale, q.device)
    window = {} if options.sliding_window is None else {"sliding_window": options.sliding_window}
    function("paged_attention_v1")(
        out=out,
        workspace_buffer=workspace,
        query=q,
        key_cache=cache.k_cache,
        value_cache=cache.v_cache,
        scale=options.scale,
        block_tables=rows.tables,
        cu_query_lens=None,
        context_lens=rows.lengths,
        max_context_len=rows.most_keys,
        alibi_slopes=None,
        kv_cache_dtype="fp8" if cache.k_cache.dtype.itemsize == 1 else "auto",
        kv_cache_layout="HND",
        logits_soft_cap=options.soft_cap or 0.0,
        k_scale=k_scale,
        v_scale=v_scale,
        partition_size=_PARTITION,
        **window,
    )


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of rows of any lengths to keys and values that lie row after row: the last query of a row sees
    its last key. As torch's `varlen_attn`. # q [T, Hq, D], k and v [keys, Hkv, D], starts [B + 1] int32 -> [T, Hq, D]

    `window_size`: how many keys a query sees before its own (-1: all), and after it (0).
    """
    del enable_gqa  # The library finds it by the shapes.
    window = _NO_WINDOW if window_size[0] < 0 else window_size
    rows = query_starts, key_starts, most_queries, most_keys
    out: torch.Tensor = function("flash_attn_varlen_func")(
        q, k, v, *rows, softmax_scale=scale, causal=True, window_size=window
    )
    return out


def _scales(cache: KVCacheTensor, options: AttentionOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales of keys and values in FP8; None each for other types."""
    if cache.k_cache.dtype.itemsize > 1:
        return None, None
    device = cache.k_cache.device
    return _scale(options.k_scale, device), _scale(options.v_scale, device)


_kept: dict[tuple[float, torch.device], torch.Tensor] = {}


def _scale(value: float, device: torch.device) -> torch.Tensor:
    """A number on the device, which stays allocated because captured graphs refer to it. # [1] float32"""
    if (value, device) not in _kept:
        _kept[value, device] = torch.full((1,), value, dtype=torch.float32, device=device)
    return _kept[value, device]
