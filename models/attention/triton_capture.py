"""`CaptureBuffers`: the memory of fixed addresses that captured decode graphs read their step from."""

from typing import TYPE_CHECKING

import torch

from models.attention.triton_metadata import TritonMetaData
from models.kernels.triton.pieces import MAX_PIECES

if TYPE_CHECKING:
    from models.attention.base import AttentionBackend

NO_SLOT = -1
"""Of tokens that are kept nowhere, and of rows without a state."""


class CaptureBuffers:
    """One set for graphs of all sizes: a smaller one reads the beginning of what a larger one reads."""

    def __init__(self, max_batch_size: int, max_blocks: int, query_len: int, device: torch.device) -> None:
        """For up to `max_batch_size` rows of `query_len` tokens and `max_blocks` blocks."""
        self._query_len = query_len
        self._query_starts = query_len * torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int32, device=device)
        self._slot_mapping = torch.full((max_batch_size * query_len,), NO_SLOT, dtype=torch.int64, device=device)
        self._slots = torch.full((max_batch_size,), NO_SLOT, dtype=torch.int64, device=device)
        self._items = torch.zeros(max_batch_size * MAX_PIECES, dtype=torch.int32, device=device)
        self._num_items = torch.zeros(1, dtype=torch.int32, device=device)

    def tables(self, batch_size: int) -> torch.Tensor:
        """Of the first `batch_size` rows. A step whose tables were written there brings none. # [rows, max_blocks]"""
        return self._block_tables[:batch_size]

    def metadata(self, backend: "AttentionBackend", batch_size: int) -> TritonMetaData:
        """Over the first `batch_size` rows."""
        return TritonMetaData(
            backend=backend,
            cu_seqlens_q=self._query_starts[: batch_size + 1],
            seq_lens=self._seq_lens[:batch_size],
            block_tables=self._block_tables[:batch_size],
            slot_mapping=self._slot_mapping[: batch_size * self._query_len],
            num_decodes=batch_size,
            query_len=self._query_len,
            slots=self._slots[:batch_size],
            items=self._items[: batch_size * MAX_PIECES],
            num_items=self._num_items,
            lengths=None,
        )

    def fill(self, step: TritonMetaData, batch_size: int) -> None:
        """Copy a step of decodes there, and empty what is left of `batch_size` rows. The host waits for nothing."""
        rows, width = step.block_tables.shape
        assert rows == step.num_decodes, "a graph replays decodes only"
        assert rows <= batch_size <= len(self._seq_lens), f"{rows} rows in a graph of {batch_size}"
        if rows < batch_size:
            self._seq_lens[rows:batch_size] = 0
            self._slot_mapping[rows * self._query_len : batch_size * self._query_len] = NO_SLOT
            self._slots[rows:batch_size] = NO_SLOT
        # One launch for all that is of one type and dense.
        torch._foreach_copy_(
            [self._seq_lens[:rows], self._items[: len(step.items)], self._num_items],
            [step.seq_lens, step.items, step.num_items],
        )
        wide, filled = [self._slot_mapping[: rows * self._query_len]], [step.slot_mapping]
        if step.slots is not None:
            wide.append(self._slots[:rows])
            filled.append(step.slots)
        torch._foreach_copy_(wide, filled)
        if step.block_tables.data_ptr() != self._block_tables.data_ptr():
            self._block_tables[:rows, :width].copy_(step.block_tables)
