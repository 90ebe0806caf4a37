"""Graphs of a drafter's passes: `DraftGraphs` replays one for rows with equal numbers of entries.

A first pass has up to one entry for each token that a step has verified, and a pass after it has one. Rows with fewer
entries than the longest are padded at the front with entries that were computed before. Those are stored in the
padding block, and their outputs are not used.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.device import Device, Uploads
from engine.runner.graphs import GraphMemory, GraphRunner, GraphShape
from engine.runner.input_batch import DraftSpan
from models.attention.backend import AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.context import Context, ForwardContext, LoRARows, forward_context
from models.layers.base import DraftLM
from models.ops.types import LayerCache
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_log = logging.getLogger(__name__)

_Ints = npt.NDArray[np.int64]


class DraftGraphRunner(GraphRunner):
    """Graphs of a drafter's pass over rows of one number of entries."""

    rows: ClassVar[str] = "Drafting passes of %d rows"

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        model: DraftLM,
        caches: dict[str, LayerCache],
        features: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        shape: GraphShape,
        parallel: TensorParallel = SINGLE_RANK,
        memory: GraphMemory | None = None,
        *,
        combines: bool,
        largest_first: bool = True,
    ) -> None:
        """`features`: size of the hidden states that a pass reads, 0 if it reads none. `combines`: whether these
        states are the target's, which `DraftLM.combine` takes. `caches` are the drafter's.
        """
        self._model, self._caches, self._combines = model, caches, combines
        num_entries = max(sizes) * shape.query_len
        self._states = torch.zeros(num_entries, features, dtype=dtype, device=device.torch_device)
        super().__init__(device, backend, self._compute, sizes, shape, parallel, memory, largest_first=largest_first)

    def draft(
        self,
        span: DraftSpan,
        ends: _Ints,
        states: torch.Tensor | None,
        rows: _Ints,
        uploads: Uploads,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The drafter's output for the last entry of each row, which ends at `ends`. # [B] -> [B, hidden_size]

        `span` has `query_len` entries of each row; `rows` is the row of `states` of each entry. # [T]
        `tokens`: the entries' tokens on the device, if the host has not read them. # [T] int64
        The next replay overwrites the returned tensor.
        """
        num_rows, length, shape = len(ends), self.query_len, self._shape
        size = self.size_of(num_rows)
        missing = size - num_rows
        tables = np.full((size, span.block_tables.shape[1]), shape.padding_block, dtype=np.int32)
        tables[:num_rows] = span.block_tables
        upload = uploads.begin()
        ids, positions, index = upload.add([span.token_ids, span.positions, rows])
        metadata = self._backend.build_metadata(
            AttentionBatch(
                query_lens=np.full(size, length, dtype=np.int64),
                seq_lens=np.concatenate((ends, np.full(missing, length, dtype=np.int64))),
                block_tables=tables,
                slot_mapping=np.concatenate((span.slot_mapping, np.full(missing * length, self.padding_slot))),
                num_decodes=size,
                query_len=length,
            ),
            send=upload.add,
        )
        upload.go()
        states = None if states is None else states[index]
        output = self.replay(metadata, ids if tokens is None else tokens, positions, states)
        return output[: len(rows)].view(num_rows, length, -1)[:, -1]

    def replay(
        self, metadata: AttentionMetaData, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor | None
    ) -> torch.Tensor:
        """The drafter's output for all entries of some rows. # [T], [T], [T, features] -> [T, hidden_size]

        The next replay overwrites the returned tensor.
        """
        num_entries, size = len(ids), self.size_of(len(ids) // self.query_len)
        torch._foreach_copy_([each[:num_entries] for each in self._tokens], [ids, positions])
        for each in self._tokens:
            each[num_entries : size * self.query_len].zero_()
        if states is not None:
            self._states[: len(states)].copy_(states)
        self._backend.prepare_for_replay(metadata, size)
        self._captured[size].replay()
        assert self._hidden is not None
        return self._hidden[:num_entries]

    def _log_captured(self) -> None:
        sizes = self.captured_sizes
        _log.info(
            "Drafting passes of %d entries a row replay %d graphs, of %d to %d rows",
            self.query_len,
            len(sizes),
            sizes[0],
            sizes[-1],
        )

    def _compute(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states = self._states[: len(input_ids)]
        output: torch.Tensor = self._model(
            input_ids, positions, self._model.combine(states) if self._combines else states
        )
        return output

    def _step(
        self, metadata: AttentionMetaData, context: Context, lora: LoRARows | None
    ) -> AbstractContextManager[ForwardContext]:
        return forward_context(metadata, replace(context, is_draft=True), lora=lora, kv_cache_data=self._caches)

    def _write_padding_rows(self, size: int, length: int = 1, token: int = 1) -> None:
        super()._write_padding_rows(size, length, token)
        self._states.fill_(0.1 * token)


class DraftGraphs:
    """The graphs of a drafter's first passes, by entries per row, and of its following passes of one entry."""

    def __init__(self, device: Device, first: Sequence[DraftGraphRunner], following: DraftGraphRunner) -> None:
        self._uploads = Uploads(device)
        self._first = {runner.query_len: runner for runner in first}
        self._following = following

    @property
    def runners(self) -> list[DraftGraphRunner]:
        """All runners without duplicates, in the order in which they are captured."""
        return list(dict.fromkeys((*self._first.values(), self._following)))

    def runner_for(self, ends: _Ints, length: int, *, is_first: bool) -> DraftGraphRunner | None:
        """The graphs for a pass over at most `length` entries of each row before `ends`; None to run eagerly. # [B]"""
        return None if int(ends.min()) < length else self.of_rows(len(ends), length, is_first=is_first)

    def of_rows(self, num_rows: int, length: int, *, is_first: bool) -> DraftGraphRunner | None:
        """The graphs for a pass over `length` entries of each row; None to run eagerly."""
        runner = self._first.get(length) if is_first else self._following
        return runner if runner is not None and runner.size_of(num_rows) else None

    def draft(
        self,
        runner: DraftGraphRunner,
        span: DraftSpan,
        begins: _Ints,
        ends: _Ints,
        states: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The drafter's output for the last entry of each row's `[begins, ends)`. # [B] -> [B, hidden_size]

        `span` has `runner.query_len` entries of each row up to `ends`, and `states` those from `begins` on. `tokens`:
        those of one entry of each row, on the device, if the host has not read them. # [B] int64
        """
        length, counts = runner.query_len, ends - begins
        slot_mapping, rows = span.slot_mapping, np.arange(len(span.token_ids))
        if (counts < length).any():
            # Each row's last entry comes last; padding entries at the front may read any state.
            rows = np.repeat(np.cumsum(counts) - length, length) + np.tile(np.arange(length), len(counts))
            is_padding = np.tile(np.arange(length), len(counts)) < np.repeat(length - counts, length)
            rows[is_padding] = 0
            slot_mapping = np.where(is_padding, runner.padding_slot, slot_mapping)
        return runner.draft(span._replace(slot_mapping=slot_mapping), ends, states, rows, self._uploads, tokens)
