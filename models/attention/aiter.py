"""The attention backend of GPUs on which ROCm's library `aiter` reads the cache that Triton's kernels write."""

import torch

from models.attention.backend import BACKENDS
from models.attention.gpu import TritonMetaData
from models.attention.triton import TritonAttentionBackend, flash_spans, plan_of
from models.ops import aiter, flash_attention
from models.ops.aiter.attention import Rows, paged, takes_paged, takes_unified, unified
from models.ops.triton.attention import attend_decodes, attend_spans
from models.ops.types import AttentionOptions, KVCacheTensor

_TYPES = (torch.bfloat16, torch.float16)


@BACKENDS.register("aiter")
class AiterAttentionBackend(TritonAttentionBackend):
    """Computes steps, or only decodes, by the library if it supports the layer's shapes, else by Triton's kernels."""

    name = "aiter"

    def _attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVCacheTensor,
        metadata: TritonMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
    ) -> None:
        decodes, query_len = metadata.num_decodes * metadata.query_len, metadata.query_len
        if out.shape != q.shape:  # The library requires equal sizes of keys and values.
            super()._attend(q, out, cache, metadata, options, sinks)
            return
        block = cache.k_cache.shape[2]
        is_unified = aiter.takes("attention") and q.dtype in _TYPES and takes_unified(options, sinks)
        spans = flash_spans(q, cache, metadata, options, sinks)
        if spans is not None:
            tokens = slice(decodes, None)
            out[tokens] = flash_attention.attend(q[tokens], cache, metadata.block_tables, spans, options)
        if is_unified and not (aiter.decodes_apart() and query_len == 1):
            if spans is None:
                unified(q, out, cache, _rows(metadata, slice(0, None), block), options, sinks)
            elif decodes:
                rows = _rows(metadata, slice(0, metadata.num_decodes), block)
                unified(q[:decodes], out[:decodes], cache, rows, options, sinks)
            return
        if decodes:
            self._decode(q[:decodes], out[:decodes], cache, metadata, options, sinks)
        if decodes == len(q) or spans is not None:
            return
        if is_unified:
            unified(q[decodes:], out[decodes:], cache, _rows(metadata, slice(decodes, None), block), options, sinks)
        else:
            attend_spans(q, out, cache, plan_of(q, cache, metadata), options, sinks)

    def _decode(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: KVCacheTensor,
        metadata: TritonMetaData,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
    ) -> None:
        """Rows of one token. # [B, Hq, D] each"""
        rows = len(q)
        lengths, tables = metadata.seq_lens[:rows], metadata.block_tables[:rows]
        if metadata.query_len == 1 and aiter.takes("decode") and q.dtype in _TYPES and takes_paged(options, sinks):
            keys = _most_keys(metadata, slice(0, rows), cache.k_cache.shape[2])
            paged(q, out, cache, Rows(metadata.cu_seqlens_q[: rows + 1], lengths, tables, 1, keys), options)
        else:
            attend_decodes(q, out, cache, plan_of(q, cache, metadata), options, sinks)


def _rows(metadata: TritonMetaData, rows: slice, block: int) -> Rows:
    """A range of a step's rows; all rows before it have one token."""
    first = rows.start
    starts = metadata.cu_seqlens_q[first : None if rows.stop is None else rows.stop + 1]
    if first:
        key = "aiter", first
        if key not in metadata.plans:
            metadata.plans[key] = starts - first
        starts = metadata.plans[key]
    queries = metadata.query_len if metadata.lengths is None else int(metadata.lengths.queries[rows].max())
    keys = _most_keys(metadata, rows, block)
    return Rows(starts, metadata.seq_lens[rows], metadata.block_tables[rows], queries, keys)


def _most_keys(metadata: TritonMetaData, rows: slice, block: int) -> int:
    """The most keys of a row in a range, or the most that it may have in a captured graph."""
    if metadata.lengths is None:
        return metadata.block_tables.shape[1] * block
    return int(metadata.lengths.contexts[rows].max())
