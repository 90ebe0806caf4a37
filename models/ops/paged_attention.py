"""Attention over the paged cache in plain torch, row by row, and the writes to the cache."""

import torch

from models.ops.torch_ops import moved
from models.ops.types import AttentionOptions, HeadNorms, KVCacheTensor, Rotation


def store(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: KVCacheTensor,
    slots: torch.Tensor,
    options: AttentionOptions,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
    q_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `models.ops.triton.cache_store.store`."""
    is_first = options.is_rotated_first
    q = moved(q, None if norms is None else norms.q, rotation, is_rotated_first=is_first, scales=q_scales)
    if k is None or v is None:
        return q
    k = moved(k, None if norms is None else norms.k, rotation, is_rotated_first=is_first)
    kept = slots >= 0
    block_size = cache.k_cache.shape[2]
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for pages, x, scale in ((cache.k_cache, k, options.k_scale), (cache.v_cache, v, options.v_scale)):
        _write(pages, blocks, offsets, x[kept], scale)
    return q


def _write(pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    if pages.dtype.itemsize > 1:
        pages[blocks, :, offsets] = x.to(pages.dtype)
        return
    limit = torch.finfo(pages.dtype).max
    stored = (x.float() / scale).clamp_(-limit, limit).to(pages.dtype)
    pages.view(torch.uint8)[blocks, :, offsets] = stored.view(torch.uint8)


def store_vectors(vectors: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Write the step's vectors to their slots, in FP8 divided by `scale`.

    # [T, dim], [num_blocks, block, dim], [T] int64
    """
    kept = slots >= 0
    blocks, offsets = slots[kept] // pages.shape[1], slots[kept] % pages.shape[1]
    _write(pages[:, None], blocks, offsets, vectors[kept][:, None], scale)


def row_vectors(pages: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """A row's first `length` vectors, by its block table. # [num_blocks, block, dim] -> [length, dim] float32"""
    return _gathered(pages[:, None], blocks[: -(-length // pages.shape[1])], slice(0, length))[0]


def attend(
    q: torch.Tensor,
    cache: KVCacheTensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each row's last tokens to the row. # q [T, Hq, D] -> [T, Hq, V]

    `query_starts` [B + 1]: index of each row's first token in the T tokens. `seq_lens` [B], `block_tables` [B,
    max_blocks].
    """
    out = q.new_empty(*q.shape[:2], cache.v_cache.shape[3])
    starts = query_starts.tolist()
    block_size = cache.k_cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if not length:
            # This row pads a captured graph.
            out[tokens] = 0.0
            continue
        # Blocks before the window may belong to other rows now, and hold values that are not finite.
        first = first_seen(length, tokens.stop - tokens.start, options)
        blocks = block_tables[row, first // block_size : -(-length // block_size)].long()
        keys = slice(first % block_size, first % block_size + length - first)
        k, v = _gathered(cache.k_cache, blocks, keys), _gathered(cache.v_cache, blocks, keys)
        out[tokens] = attend_row(q[tokens], k * options.k_scale, v * options.v_scale, options, sinks)
    return out


def first_seen(length: int, num_queries: int, options: AttentionOptions) -> int:
    """The first key that any of a row's last tokens attends to; in layers with chunks, the first of the chunk."""
    if options.sliding_window is None:
        return 0
    position = max(0, length - num_queries)
    if options.is_chunked:
        return position // options.sliding_window * options.sliding_window
    return max(0, position - options.sliding_window + 1)


def _gathered(pages: torch.Tensor, blocks: torch.Tensor, keys: slice) -> torch.Tensor:
    """Some of the blocks' keys. # -> [Hkv, keys, D] float32"""
    taken = pages.view(torch.uint8)[blocks].view(pages.dtype) if pages.dtype.itemsize == 1 else pages[blocks]
    return taken.transpose(0, 1).flatten(1, 2)[:, keys].float()


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend with a row's last tokens to its keys and values from `first_seen` on.

    # q [n, Hq, D], k [Hkv, length, D] and v [Hkv, length, V] float32 -> [n, Hq, V]
    """
    num_queries, num_heads, _ = q.shape
    num_kv_heads, length, _ = k.shape
    queries = q.float().view(num_queries, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [Hkv, group, n, D]
    scores = queries @ k[:, None].transpose(-1, -2) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    keys = torch.arange(length, device=q.device)
    positions = keys[length - num_queries :, None]
    hidden = keys > positions
    if options.sliding_window is not None:
        window = options.sliding_window
        hidden |= keys < (positions // window * window if options.is_chunked else positions - window + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink_scores = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights @ v[:, None]
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1).to(q.dtype)
