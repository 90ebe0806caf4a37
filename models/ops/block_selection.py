"""Attention to selected blocks of a paged context (MiniMax-M3's sparse attention) in plain torch, row by row.

    queries [n, heads] --index queries, index keys--> best blocks of keys by KV head --> softmax over their keys

Selection needs the scores of a small head against every earlier key. Attention then reads `top_k * block_size` keys
for each KV head, however long the context is.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.ops.compression import StepTokens
from models.ops.cpu import runtime
from models.ops.paged_attention import row_vectors
from models.ops.torch_ops import top_k_lower_first
from models.ops.types import AttentionOptions, KVCacheTensor, VectorCache

_MAX_SCORES = 1 << 23
"""The most scores by head in memory at a time: 32 MiB. One query over a long context may take more."""
_MAX_GATHERED = 1 << 25
"""The most elements of gathered keys at a time: 128 MiB. One token may take more."""


class BlockChoice(NamedTuple):
    """The parameters by which a layer selects blocks."""

    block_size: int
    """Tokens per block of keys; independent of the cache's block size."""
    top_k: int
    """Number of blocks that a query attends to."""
    num_local: int
    """Number of them that are the query's own block and those directly before it, regardless of scores."""


def select_blocks(q: torch.Tensor, keys: torch.Tensor, first: int, choice: BlockChoice) -> torch.Tensor | None:
    """The mask of blocks for each head of each query; None if all visible blocks are selected.

    The score of a block is the largest product of the query with one of its keys. # q [n, H, D], the queries at
    positions `first` to `first + n - 1`; keys [length, D] -> [n, H, blocks] bool
    """
    size, top_k, num_local = choice
    num_blocks = -(-len(keys) // size)
    if num_blocks <= top_k:
        return None
    scores = q.float() @ keys.float().T
    positions = torch.arange(first, first + len(q), device=q.device)
    scores.masked_fill_(torch.arange(len(keys), device=q.device) > positions[:, None, None], -torch.inf)
    scores = F.pad(scores, (0, num_blocks * size - len(keys)), value=-torch.inf)
    by_block = scores.view(*scores.shape[:2], num_blocks, size).amax(-1)
    local = (positions[:, None] // size - torch.arange(num_local, device=q.device)).clamp(min=0)
    by_block.scatter_(-1, local[:, None].expand(-1, q.shape[1], -1), torch.inf)
    best, blocks = top_k_lower_first(by_block, top_k)
    return torch.zeros_like(by_block, dtype=torch.bool).scatter_(-1, blocks, best > -torch.inf)


def attend_to_blocks(
    q: torch.Tensor,
    index_q: torch.Tensor,
    caches: tuple[KVCacheTensor, VectorCache],
    query_starts: list[int],
    seq_lens: list[int],
    block_tables: torch.Tensor,
    options: AttentionOptions,
    choice: BlockChoice,
) -> torch.Tensor:
    """Attention of each row's last tokens to their selected blocks. # q [T, Hq, D], index_q [T, Hkv, Di] -> [T, Hq, D]

    `caches`: keys, values and index keys, including the step's own. `query_starts` [B + 1]: index of each row's first
    token in the T tokens. `seq_lens` [B], `block_tables` [B, max_blocks].

    On a CPU with operators each query is computed separately, since torch's rounding depends on the batch size.
    """
    cache, index_cache = caches
    out = torch.empty_like(q)
    is_alone = runtime.active() and q.device.type == "cpu"
    for row, length in enumerate(seq_lens):
        start, stop = query_starts[row : row + 2]
        first = length - (stop - start)
        blocks = block_tables[row].long()
        size = max(1, _MAX_SCORES // (q.shape[1] * max(length, 1)))
        for begin in range(start, stop, 1 if is_alone else size):
            some = slice(begin, min(begin + (1 if is_alone else size), stop))
            seen = first + some.stop - start
            keys = row_vectors(index_cache.vectors, blocks, seen)
            chosen = select_blocks(index_q[some], keys, first + begin - start, choice)
            if some.stop - some.start == 1:
                out[some] = _attend_one(q[begin], cache, blocks, seen, options, choice, chosen)
            else:
                out[some] = _attend_some(q[some], cache, blocks, seen, options, choice, chosen)
    return out


def attend_decodes(
    q: torch.Tensor,
    index_q: torch.Tensor,
    caches: tuple[KVCacheTensor, VectorCache],
    tokens: StepTokens,
    options: AttentionOptions,
    choice: BlockChoice,
) -> torch.Tensor:
    """`attend_to_blocks` for a step of decodes on a GPU, which reads no lengths on the host, so that graphs capture
    it.

    # q [T, Hq, D], index_q [T, Hkv, Di] -> [T, Hq, D]
    """
    cache, index_cache = caches
    size, top_k, _ = choice
    num_kv_heads, page = cache.k_cache.shape[1:3]
    most = tokens.tables.shape[1] * page
    all_blocks = -(-most // size)
    if all_blocks > top_k:
        blocks = _best_of_decodes(index_q, index_cache.vectors, tokens, choice, all_blocks)
    else:
        blocks = torch.arange(all_blocks, device=q.device).expand(len(q), num_kv_heads, -1)
    # Blocks past a row's end are -1; keys past the end are masked.
    offsets = torch.arange(size, device=q.device)
    out, count = torch.empty_like(q), blocks.shape[2] * size
    step = max(1, _MAX_GATHERED // (num_kv_heads * count * q.shape[2]))
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        chosen, tables = blocks[some, ..., None], tokens.tables[some]
        positions = (chosen * size + offsets).flatten(2)  # [n, Hkv, keys]
        hidden = (chosen < 0).expand(-1, -1, -1, size).flatten(2) | (positions >= tokens.seen[some, None, None])
        at = positions.clamp(min=0, max=most - 1)
        where = tables.gather(1, (at // page).flatten(1)).view(at.shape).long()
        heads = torch.arange(num_kv_heads, device=q.device)[:, None]
        k, v = (_at(pages, where, heads, at % page) for pages in (cache.k_cache, cache.v_cache))
        # Memory that the row has not written may hold NaN, which a weight of zero would not remove.
        v = v.masked_fill_(hidden[..., None], 0.0)
        queries = q[some].float().view(len(chosen), num_kv_heads, -1, q.shape[2])
        scores = queries @ k.mT * (options.scale * options.k_scale)
        # With minus infinity, the softmax of a padding row would be NaN.
        shares = scores.masked_fill_(hidden[:, :, None], torch.finfo(scores.dtype).min).softmax(-1)
        out[some] = (shares @ v * options.v_scale).view(q[some].shape).to(q.dtype)
    return out


def _best_of_decodes(
    q: torch.Tensor, keys: torch.Tensor, tokens: StepTokens, choice: BlockChoice, num_blocks: int
) -> torch.Tensor:
    """Each head's best blocks, -1 for those past the end. # [T, H, Di], [blocks, page, Di] -> [T, H, top_k] int64"""
    from models.ops.triton.latent_attention import indexer_scores

    size, top_k, num_local = choice
    most = tokens.tables.shape[1] * keys.shape[1]
    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
    # relu(a) - relu(-a) is a: an indexer of two heads computes products as they are.
    signs = 1.0 - 2 * torch.arange(2, device=q.device)
    found = []
    for head in q.unbind(1):
        both = torch.stack((head, -head), 1)
        scores = indexer_scores(both, signs.expand(len(q), 2), keys, tokens.tables, rows, tokens.seen.int(), most)
        found.append(F.pad(scores, (0, num_blocks * size - most), value=-torch.inf).view(len(q), -1, size).amax(-1))
    by_block = torch.stack(found, 1)
    local = ((tokens.seen[:, None] - 1) // size - torch.arange(num_local, device=q.device)).clamp(min=0)
    by_block.scatter_(-1, local[:, None].expand(-1, q.shape[1], -1), torch.inf)
    best, blocks = top_k_lower_first(by_block.flatten(0, 1), top_k)
    return blocks.masked_fill(best == -torch.inf, -1).view(*q.shape[:2], top_k)


def _at(pages: torch.Tensor, blocks: torch.Tensor, heads: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """# [num_blocks, Hkv, block, D], 3 x [n, Hkv, keys] -> [n, Hkv, keys, D] float32"""
    if pages.dtype.itemsize > 1:
        return pages[blocks, heads, offsets].float()
    return pages.view(torch.uint8)[blocks, heads, offsets].view(pages.dtype).float()


def _attend_one(
    q: torch.Tensor,
    cache: KVCacheTensor,
    blocks: torch.Tensor,
    length: int,
    options: AttentionOptions,
    choice: BlockChoice,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """One query, which gathers only the keys of its blocks. # [Hq, D], [1, Hkv, blocks] -> [1, Hq, D]"""
    num_kv_heads = cache.k_cache.shape[1]
    positions = torch.arange(length, device=q.device)
    heads = []
    for head, queries in enumerate(q.float().view(num_kv_heads, -1, q.shape[-1])):
        seen = positions if chosen is None else positions[chosen[0, head, positions // choice.block_size]]
        k, v = (_of_head(pages, head, blocks, seen) for pages in (cache.k_cache, cache.v_cache))
        shares = (queries @ k.T * (options.scale * options.k_scale)).softmax(-1)
        heads.append(shares @ v * options.v_scale)
    return torch.stack(heads).view(1, *q.shape).to(q.dtype)


def _attend_some(
    q: torch.Tensor,
    cache: KVCacheTensor,
    blocks: torch.Tensor,
    length: int,
    options: AttentionOptions,
    choice: BlockChoice,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """Consecutive queries, the last of them at the end of the context. # [n, Hq, D], [n, Hkv, blocks] -> [n, Hq, D]"""
    num_kv_heads = cache.k_cache.shape[1]
    keys = torch.arange(length, device=q.device)
    hidden = (keys > keys[length - len(q) :, None])[:, None]
    if chosen is not None:
        hidden = hidden | ~chosen[..., keys // choice.block_size]
    queries = q.float().view(len(q), num_kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)  # [Hkv, group, n, D]
    k, v = (
        torch.stack([_of_head(pages, head, blocks, keys) for head in range(num_kv_heads)])[:, None]
        for pages in (cache.k_cache, cache.v_cache)
    )
    scores = queries @ k.transpose(-1, -2) * (options.scale * options.k_scale)
    shares = scores.masked_fill_(hidden.transpose(0, 1)[:, None], -torch.inf).softmax(-1)
    out = shares @ v * options.v_scale
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


def _of_head(pages: torch.Tensor, head: int, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A head's keys or values at some positions of a row. # [num_blocks, Hkv, block, D] -> [positions, D] float32"""
    size = pages.shape[2]
    at = blocks[positions // size], positions % size
    if pages.dtype.itemsize > 1:
        return pages[:, head][at].float()
    return pages.view(torch.uint8)[:, head][at].view(pages.dtype).float()
