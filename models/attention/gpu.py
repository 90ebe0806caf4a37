"""What the GPUs' attention backends share: where a step's metadata is made, and the memory of captured graphs."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from models.attention.base import AttentionBackend
from models.attention.triton_capture import CaptureBuffers
from models.attention.triton_metadata import HostLengths, TritonMetaData
from models.forward_context import AttentionMetaData
from models.kernels.triton.pieces import list_pieces
from models.upload import Send, upload


class GPUAttentionBackend:
    """All of an `AttentionBackend` but the arithmetic."""

    reads_tables_on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures: dict[int, CaptureBuffers] = {}
        """By the tokens of a row."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, kv_heads, block_size, head_dim]: what a program reads of a block lies together."""
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
    ) -> TritonMetaData:
        """See `AttentionBackend`."""
        lengths = HostLengths(np.asarray(query_lens, dtype=np.int64), np.asarray(seq_lens, dtype=np.int64))
        starts = np.zeros(len(lengths.queries) + 1, dtype=np.int32)
        np.cumsum(lengths.queries, out=starts[1:])
        items = list_pieces(lengths.contexts[:num_decodes])
        arrays: list[npt.NDArray[Any]] = [
            starts,
            lengths.contexts.astype(np.int32),
            slot_mapping,
            items,
            np.array([len(items)], dtype=np.int32),
        ]
        if slots is not None:
            arrays.append(slots)
        if isinstance(block_tables, np.ndarray):
            arrays.append(block_tables)
        query_starts, contexts, mapping, pieces, num_items, *rest = (send or partial(upload, device=self._device))(
            arrays
        )
        tables = rest.pop() if isinstance(block_tables, np.ndarray) else block_tables
        return TritonMetaData(
            backend=cast(AttentionBackend, self),
            cu_seqlens_q=query_starts,
            seq_lens=contexts,
            block_tables=tables,
            slot_mapping=mapping,
            num_decodes=num_decodes,
            query_len=query_len,
            slots=rest[0] if rest else None,
            items=pieces,
            num_items=num_items,
            lengths=lengths,
        )

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:
        """See `AttentionBackend`."""
        self._captures[query_len] = CaptureBuffers(max_batch_size, max_blocks, query_len, self._device)

    def captured_tables(self, batch_size: int, query_len: int = 1) -> torch.Tensor | None:
        """See `AttentionBackend`."""
        return self._captures[query_len].tables(batch_size)

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> TritonMetaData | None:
        """See `AttentionBackend`. Its rows are empty: a first run writes to no block."""
        assert query_len in self._captures, "`init_capture` comes first"
        return self._captures[query_len].metadata(cast(AttentionBackend, self), batch_size)

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:
        """See `AttentionBackend`."""
        assert isinstance(metadata, TritonMetaData)
        self._captures[metadata.query_len].fill(metadata, batch_size)
