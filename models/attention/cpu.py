"""The CPU attention backend, in plain torch over the paged cache: the reference for every other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.attention.cpu_attend import Attend
from models.attention.cpu_cache import PagedKV, Scratch, pages_of_block
from models.attention.cpu_index import index_top_k
from models.attention.cpu_mla import LatentAttention, prepared
from models.attention.cpu_pages import PageReader
from models.attention.cpu_plan import CPUAttentionMetaData, DecodeBucket, PrefillSpan
from models.forward_context import AttentionMetaData
from models.kernels.norm import rms_norm
from models.kernels.rotary import rotate
from models.kernels.types import AttentionOptions, HeadNorms, KVCacheTensor, LatentInputs, Rotation, VectorCache
from models.upload import Send


class CPUAttentionBackend:
    """Decodes as padded batches of similar lengths, prefill spans one by one; any mix of them in a step.

    K and V are never repeated for the query heads that share them: a decode passes those heads as further queries,
    a span as heads over one expanded K and V.
    """

    name = "cpu"
    reads_tables_on_device = False
    _metadata_type: type[CPUAttentionMetaData] = CPUAttentionMetaData

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._pages = PageReader()

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, kv_heads, block_size, head_dim]: one head's vectors in a block lie together."""
        return num_blocks, num_kv_heads, block_size, head_dim

    def build_metadata(
        self,
        *,
        query_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        block_tables: npt.NDArray[np.int32] | torch.Tensor,
        slot_mapping: npt.NDArray[np.int64],
        num_decodes: int,
        slots: npt.NDArray[np.int64] | None = None,
        query_len: int = 1,
        send: Send | None = None,
    ) -> CPUAttentionMetaData:
        """See `AttentionBackend`. Rows of several tokens are spans here, whatever they are elsewhere."""
        assert isinstance(block_tables, np.ndarray), "tables are read on the host"
        queries = np.asarray(query_lens, dtype=np.int64)
        contexts = np.asarray(seq_lens, dtype=np.int64)
        return self._metadata_type(
            backend=self,
            cu_seqlens_q=torch.from_numpy(np.concatenate(([0], np.cumsum(queries))).astype(np.int32)),
            seq_lens=torch.from_numpy(contexts.astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slot_mapping),
            num_decodes=num_decodes if query_len == 1 else 0,
            query_len=query_len,
            slots=None if slots is None else torch.from_numpy(slots),
            query_lens=queries,
            context_lens=contexts,
            host_block_tables=block_tables,
            host_slot_mapping=slot_mapping,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheTensor,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # q [T, Hq, D], k and v [T, Hkv, D], [Hq] -> [T, Hq, D]"""
        assert isinstance(metadata, CPUAttentionMetaData)
        if norms is not None:
            q, k = rms_norm(q, norms.q), rms_norm(k, norms.k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        _, num_kv_heads, block_size, head_dim = cache.k_cache.shape
        plan = metadata.plan(num_kv_heads, block_size, pages_of_block(cache.k_cache), options.sliding_window)
        paged = PagedKV(cache, options, q.dtype, self._scratch)
        k, v = paged.write(k, v, plan)
        grouped = q.view(len(q), num_kv_heads, -1, head_dim)  # [T, Hkv, group, D]
        attend = Attend(options, None if sinks is None else sinks.view(num_kv_heads, -1))
        out = torch.empty_like(grouped)
        decodes = metadata.num_decodes
        for bucket in plan.buckets:
            _decode(grouped[:decodes], out[:decodes], paged, bucket, attend)
        for span in plan.spans:
            if span.pages:
                _extend(grouped[span.tokens], out[span.tokens], paged, span, plan.mask, attend)
            else:
                _prefill(grouped[span.tokens], out[span.tokens], k[span.tokens], v[span.tokens], attend)
        return out.view(q.shape)

    def latent_attention(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        kv_b: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        options: AttentionOptions,
        selected: torch.Tensor | None = None,
        inputs: LatentInputs | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`. # [T, H, nope + rope], [T, rank + rope], [H, nope + v, rank] -> [T, H, v]"""
        assert isinstance(metadata, CPUAttentionMetaData)
        if inputs is not None:
            q, latent = prepared(q, latent, inputs)
        return LatentAttention(q, kv_b, cache, metadata, options, selected, self._pages).run(latent)

    def index_top_k(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        cache: VectorCache,
        metadata: AttentionMetaData,
        top_k: int,
    ) -> torch.Tensor | None:
        """See `AttentionBackend`. # [T, H, D], [T, H], [T, D] -> [T, top_k] or None"""
        assert isinstance(metadata, CPUAttentionMetaData)
        return index_top_k(q, weights, k, cache, metadata, top_k, self._pages)

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:
        """Nothing: the CPU has no graphs."""

    def captured_tables(self, batch_size: int, query_len: int = 1) -> None:
        """None: the CPU has no graphs."""

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> AttentionMetaData | None:
        """None: the CPU has no graphs."""
        return None

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:
        """Nothing: the CPU has no graphs."""


def _decode(
    q: torch.Tensor,
    out: torch.Tensor,
    paged: PagedKV,
    bucket: DecodeBucket,
    attend: Attend,
) -> None:
    """One token a row. # q and out [decodes, Hkv, group, D]"""
    queries = q if bucket.rows is None else q[bucket.rows]
    for pages in bucket.pages:
        k, v = paged.gather(pages.rows, bucket.batch, bucket.length)
        attended = attend.grouped_rows(queries[:, pages.heads], k, v, bucket.mask, pages.heads)
        if bucket.rows is None:
            out[:, pages.heads] = attended
        else:
            out[bucket.rows, pages.heads] = attended


def _prefill(q: torch.Tensor, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend) -> None:
    """A span that is its own whole context. # q and out [n, Hkv, group, D], k and v [n, Hkv, D]"""
    queries = q.permute(1, 2, 0, 3)
    keys = k.transpose(0, 1)[:, None].expand_as(queries)
    values = v.transpose(0, 1)[:, None].expand_as(queries)
    out.copy_(attend.grouped_heads(queries, keys, values, None, slice(None)).permute(2, 0, 1, 3))


def _extend(
    q: torch.Tensor,
    out: torch.Tensor,
    paged: PagedKV,
    span: PrefillSpan,
    mask: torch.Tensor | None,
    attend: Attend,
) -> None:
    """A span after cached context, in chunks of queries that each attend no further than they see. # q as above"""
    assert mask is not None, "the plan has a mask for spans with context"
    chunk, longest = mask.shape
    queries = q.permute(1, 2, 0, 3)  # [Hkv, group, n, D]
    for pages in span.pages:
        k, v = (
            side[0, :, None] for side in paged.gather(pages.rows, 1, span.padded)
        )  # [heads, 1, padded, D], from the span's first page on
        for first in range(0, span.num_tokens, chunk):
            last = min(first + chunk, span.num_tokens)
            end = span.length - span.num_tokens + last
            begin = max(span.first_key, attend.first_key(end - (last - first)))
            some = queries[pages.heads, :, first:last]
            seen = slice(begin - span.first_key, end - span.first_key)
            attended = attend.grouped_heads(
                some,
                k[..., seen, :].expand(-1, some.shape[1], -1, -1),
                v[..., seen, :].expand(-1, some.shape[1], -1, -1),
                mask[chunk - (last - first) :, longest - (end - begin) :],
                pages.heads,
            )
            out[first:last, pages.heads] = attended.permute(2, 0, 1, 3)
