"""The common base of GPU attention backends: a step's metadata, and the buffers that captured graphs read."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.attention.backend import NO_SLOT, AttentionBackend, AttentionBatch, AttentionMetaData
from models.ops import triton
from models.ops.flash_attention import Spans, spans_of
from models.ops.memory import Send, upload
from models.ops.triton.grids import (
    MAX_PIECES,
    AttentionPlan,
    list_pieces,
    list_tiles,
    most_pieces,
    most_pieces_within,
    num_pieces,
)

Lengths = npt.NDArray[np.int64]

MOST_SHORTER = 80
"""The most tokens by which a row's context is shorter than its bound: two steps, padding and the drafter's tokens."""


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The lengths of a step's rows on the host."""

    queries: Lengths  # [B], tokens computed
    contexts: Lengths  # [B], tokens attended to


@dataclass(slots=True, kw_only=True)
class TritonMetaData(AttentionMetaData):
    """A step's metadata on the device. Rows of length 0 pad a captured graph and compute nothing."""

    items: torch.Tensor  # [num_items or more] int32, the pieces of the decodes: see `list_pieces`
    num_items: torch.Tensor  # [1] int32
    lengths: HostLengths | None
    """None in a captured graph, since lengths differ between replays."""
    tile_tables: dict[int, torch.Tensor] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """Values that layers compute once per step for all layers of a kind."""

    def tiles(self, tokens: int) -> torch.Tensor:
        """The prefills in tiles of `tokens` tokens, tiles with the most keys first. # [tiles, 2] int32: row, first
        token
        """
        if tokens not in self.tile_tables:
            if self.lengths is None:
                self.tile_tables[tokens] = self._captured_tiles(tokens)
            else:
                num_decodes = self.num_decodes_by_pieces
                tiles = list_tiles(self.lengths.queries, self.lengths.contexts, tokens, num_decodes)
                (table,) = upload([tiles], self.seq_lens.device)
                self.tile_tables[tokens] = table.view(-1, 2)
        return self.tile_tables[tokens]

    @property
    def num_decodes_by_pieces(self) -> int:
        """Number of rows whose keys are split into pieces; 0 if a token's result must not depend on whether it is
        decoded or prefilled: all rows are then spans.
        """
        return 0 if triton.is_invariant() else self.num_decodes

    def _captured_tiles(self, tokens: int) -> torch.Tensor:
        """The rows of a captured graph, which are decodes, as spans. # [tiles, 2] int32"""
        assert triton.is_invariant(), "a captured graph has decodes only"
        device = self.seq_lens.device
        rows = torch.arange(len(self.seq_lens), dtype=torch.int32, device=device)
        firsts = torch.arange(0, self.query_len, tokens, dtype=torch.int32, device=device)
        return torch.cartesian_prod(rows, firsts).view(-1, 2)

    def pieces(self, block_size: int) -> int:
        """The most pieces of a decode in the step, or the most possible in a captured graph."""
        if self.lengths is None:
            return most_pieces(self.block_tables.shape[1] * block_size)
        if "pieces" not in self.plans:
            self.plans["pieces"] = int(num_pieces(self.lengths.contexts[: self.num_decodes]).max())
        most: int = self.plans["pieces"]
        return most

    def flash_spans(self, window: int | None) -> Spans | None:
        """The rows after the decodes with their keys, for layers with this window; None if gathering is slower."""
        key = Spans, window
        if key not in self.plans:
            assert self.lengths is not None, "a captured graph has decodes only"
            queries, contexts = self.lengths.queries, self.lengths.contexts
            self.plans[key] = spans_of(queries, contexts, self.num_decodes, window, self.seq_lens.device)
        spans: Spans | None = self.plans[key]
        return spans

    def plan(self, block_size: int, tile_tokens: int | None) -> AttentionPlan:
        """The plan for caches of this block size and spans in tiles of `tokens` tokens; None if there are only
        decodes."""
        key = AttentionPlan, block_size, tile_tokens
        if key not in self.plans:
            self.plans[key] = AttentionPlan(
                query_starts=self.cu_seqlens_q,
                seq_lens=self.seq_lens,
                block_tables=self.block_tables,
                num_decodes=self.num_decodes_by_pieces,
                query_len=self.query_len,
                items=self.items,
                num_items=self.num_items,
                max_pieces=self.pieces(block_size) if self.num_decodes_by_pieces else 0,
                tiles=None if tile_tokens is None else self.tiles(tile_tokens),
            )
        plan: AttentionPlan = self.plans[key]
        return plan


class CaptureBuffers:
    """The buffers at fixed addresses from which captured decode graphs read their step.

    One set serves graphs of all sizes: a smaller graph reads the beginning of the buffers.
    """

    def __init__(self, max_batch_size: int, max_blocks: int, query_len: int, device: torch.device) -> None:
        """Allocate buffers for up to `max_batch_size` rows of `query_len` tokens and `max_blocks` blocks."""
        self._query_len = query_len
        self._query_starts = query_len * torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int32, device=device)
        self._slot_mapping = torch.full((max_batch_size * query_len,), NO_SLOT, dtype=torch.int64, device=device)
        self._states = torch.full((max_batch_size,), NO_SLOT, dtype=torch.int64, device=device)
        self._states_after = torch.full_like(self._slot_mapping, NO_SLOT)
        self._items = torch.zeros(max_batch_size * MAX_PIECES, dtype=torch.int32, device=device)
        self._num_items = torch.zeros(1, dtype=torch.int32, device=device)

    def tables(self, batch_size: int) -> torch.Tensor:
        """The block tables of the first `batch_size` rows, which a step may write directly. # [rows, max_blocks]"""
        return self._block_tables[:batch_size]

    def metadata(self, backend: AttentionBackend, batch_size: int) -> TritonMetaData:
        """Metadata over the first `batch_size` rows."""
        return TritonMetaData(
            backend=backend,
            cu_seqlens_q=self._query_starts[: batch_size + 1],
            seq_lens=self._seq_lens[:batch_size],
            block_tables=self._block_tables[:batch_size],
            slot_mapping=self._slot_mapping[: batch_size * self._query_len],
            num_decodes=batch_size,
            query_len=self._query_len,
            states=self._states[:batch_size],
            states_after=self._states_after[: batch_size * self._query_len] if self._query_len > 1 else None,
            num_by_token=batch_size if self._query_len > 1 else 0,
            items=self._items[: batch_size * MAX_PIECES],
            num_items=self._num_items,
            lengths=None,
        )

    def fill(self, step: TritonMetaData, batch_size: int) -> None:
        """Copy a step of decodes, and clear the remaining rows up to `batch_size`. The host does not wait for the
        device.
        """
        rows, width = step.block_tables.shape
        assert rows == step.num_decodes, "a graph replays decodes only"
        assert rows <= batch_size <= len(self._seq_lens), f"{rows} rows in a graph of {batch_size}"
        if rows < batch_size:
            self._seq_lens[rows:batch_size] = 0
            self._slot_mapping[rows * self._query_len : batch_size * self._query_len] = NO_SLOT
            self._states[rows:batch_size] = NO_SLOT
            self._states_after[rows * self._query_len : batch_size * self._query_len] = NO_SLOT
        # One launch for all contiguous tensors of one dtype.
        torch._foreach_copy_(
            [self._seq_lens[:rows], self._items[: len(step.items)], self._num_items],
            [step.seq_lens, step.items, step.num_items],
        )
        wide, filled = [self._slot_mapping[: rows * self._query_len]], [step.slot_mapping]
        if step.states is not None:
            wide.append(self._states[:rows])
            filled.append(step.states)
        if step.states_after is not None:
            wide.append(self._states_after[: rows * self._query_len])
            filled.append(step.states_after)
        torch._foreach_copy_(wide, filled)
        if step.block_tables.data_ptr() != self._block_tables.data_ptr():
            self._block_tables[:rows, :width].copy_(step.block_tables)


class GPUAttentionBackend(AttentionBackend):
    """Base of GPU attention backends: metadata and capture, without the computation."""

    reads_tables_on_device = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._captures: dict[int, CaptureBuffers] = {}
        """Graph buffers by the number of tokens of a row."""

    def build_metadata(
        self, batch: AttentionBatch, tables: torch.Tensor | None = None, send: Send | None = None
    ) -> TritonMetaData:
        """See `AttentionBackend`."""
        lengths = HostLengths(batch.query_lens, batch.seq_lens)
        starts = np.zeros(len(lengths.queries) + 1, dtype=np.int32)
        np.cumsum(lengths.queries, out=starts[1:])
        items = list_pieces(lengths.contexts[: batch.num_decodes])
        arrays: list[npt.NDArray[Any]] = [
            starts,
            lengths.contexts.astype(np.int32),
            batch.slot_mapping,
            items,
            np.array([len(items)], dtype=np.int32),
        ]
        arrays += [each for each in (batch.states, batch.states_after, batch.block_tables) if each is not None]
        query_starts, contexts, mapping, pieces, num_items, *rest = (send or partial(upload, device=self._device))(
            arrays
        )
        if tables is None:
            assert batch.block_tables is not None, "block tables are on the host or on the device"
            tables = rest.pop()
        return TritonMetaData(
            backend=self,
            cu_seqlens_q=query_starts,
            seq_lens=contexts,
            block_tables=tables,
            slot_mapping=mapping,
            num_decodes=batch.num_decodes,
            query_len=batch.query_len,
            states=rest.pop(0) if batch.states is not None else None,
            states_after=rest.pop(0) if batch.states_after is not None else None,
            num_by_token=batch.num_by_token,
            items=pieces,
            num_items=num_items,
            lengths=lengths,
        )

    def build_bounded(
        self, longest: Lengths, block_tables: torch.Tensor, query_len: int, send: Send
    ) -> TritonMetaData:
        """Metadata of decodes whose context lengths the host knows only as upper bounds. # [B]

        The caller sets `seq_lens`, `slot_mapping` and the fields of recurrent states, which are on the device. Rows
        are at most `MOST_SHORTER` tokens shorter than `longest`. `block_tables` [B, num_blocks] are on the device.
        """
        items = list_pieces(longest, most_pieces_within(longest, MOST_SHORTER))
        starts = query_len * np.arange(len(longest) + 1, dtype=np.int32)
        arrays = [starts, items, np.array([len(items)], dtype=np.int32)]
        query_starts, pieces, num_items = send(arrays)
        return TritonMetaData(
            backend=self,
            cu_seqlens_q=query_starts,
            seq_lens=pieces,
            block_tables=block_tables,
            slot_mapping=pieces,
            num_decodes=len(longest),
            query_len=query_len,
            items=pieces,
            num_items=num_items,
            lengths=None,
        )

    def init_capture(self, max_batch_size: int, max_blocks: int, query_len: int = 1) -> None:
        """See `AttentionBackend`. Graphs of several models, which run one after the other, read the same buffers."""
        self._captures[query_len] = CaptureBuffers(max_batch_size, max_blocks, query_len, self._device)

    def captured_tables(self, batch_size: int, query_len: int = 1) -> torch.Tensor | None:
        """See `AttentionBackend`."""
        return self._captures[query_len].tables(batch_size)

    def prepare_for_capture(self, batch_size: int, query_len: int = 1) -> TritonMetaData | None:
        """See `AttentionBackend`. The rows are empty initially, so a run without a step writes to no block."""
        assert query_len in self._captures, "`init_capture` comes first"
        return self._captures[query_len].metadata(self, batch_size)

    def prepare_for_replay(self, metadata: AttentionMetaData, batch_size: int) -> None:
        """See `AttentionBackend`."""
        assert isinstance(metadata, TritonMetaData)
        self._captures[metadata.query_len].fill(metadata, batch_size)
