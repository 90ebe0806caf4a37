"""The lightning indexer's scores and choice on the CPU, over its paged keys. Used by the CPU backend."""

import torch

from models.attention.cpu_pages import PageReader, chunks, write_vectors
from models.attention.cpu_plan import CPUAttentionMetaData
from models.kernels.types import VectorCache

MAX_INDEX_SCORES = 1 << 23
"""Scores by head that are in memory at a time: 32 MiB. One query over a long context may need more."""


def index_top_k(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cache: VectorCache,
    metadata: CPUAttentionMetaData,
    top_k: int,
    pages: PageReader,
) -> torch.Tensor | None:
    """See `AttentionBackend.index_top_k`."""
    plan = metadata.plan(1, cache.vectors.shape[1], 1)
    k = write_vectors(k, cache, plan)
    longest = int(metadata.context_lens.max())
    if longest <= top_k:
        return None
    selected = torch.full((len(q), top_k), -1)
    dim = q.shape[-1]
    for bucket in plan.buckets:
        rows = torch.arange(bucket.batch) if bucket.rows is None else bucket.rows
        blocks = bucket.pages[0].rows.view(bucket.batch, -1)
        for some in chunks(bucket.batch, MAX_INDEX_SCORES // (bucket.length * max(dim, q.shape[1]))):
            keys = pages.gather(cache, blocks[some].flatten()).view(-1, bucket.length, dim)
            scores = _scores(q[rows[some]], weights[rows[some]], keys)
            _choose(scores.masked_fill_(bucket.mask[some, 0, 0] < 0, -torch.inf), rows[some], selected)
    for span in plan.spans:
        keys = pages.gather(cache, span.pages[0].rows)[: span.length] if span.pages else k[span.tokens]
        keys = keys.float()
        rows, ends = torch.arange(len(q))[span.tokens], torch.arange(span.length)[-span.num_tokens :]
        for some in chunks(span.num_tokens, MAX_INDEX_SCORES // (span.length * q.shape[1])):
            scores = _scores(q[rows[some]], weights[rows[some]], keys)
            unseen = torch.arange(span.length) > ends[some, None]
            _choose(scores.masked_fill_(unseen, -torch.inf), rows[some], selected)
    return selected


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """# [n, Hi, D], [n, Hi] float32, [n, length, D] or [length, D] -> [n, length] float32"""
    by_head = (q.float() @ keys.float().transpose(-1, -2)).relu_()
    return (weights[:, None] @ by_head)[:, 0]


def _choose(scores: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor) -> None:
    """Put the positions of the best scores into the rows of `selected`, what is not seen as -1."""
    best = scores.topk(min(selected.shape[1], scores.shape[1]), sorted=False)
    selected[rows, : best.indices.shape[1]] = best.indices.masked_fill(best.values == -torch.inf, -1)
