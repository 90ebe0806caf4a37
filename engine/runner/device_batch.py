"""`DeviceBatch`: assembles a step's arrays on the device from per-slot state there and the arrays that the step sends.

The last sampled token of each slot is on the device. With some attention backends its block table is too: a step
sends only the entries that changed. On a GPU all of a step's arrays are sent in one copy. Where a model drafts, the
device also holds each slot's length, its drafts and the index of its recurrent state. `accept` writes them after a
step that the host has not read, and `assemble` reads them for rows whose lengths the host knows only as bounds.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.device import Device, Downloads, Uploads
from engine.runner.input_batch import StepInputs, TableChanges
from models.attention.backend import NO_SLOT, AttentionBackend, AttentionMetaData
from models.attention.gpu import GPUAttentionBackend
from models.ops.memory import Send

MOST_DRAFTS = 16
"""The most drafts of a sequence, the limit of `SpeculativeConfig`."""


class DeviceBlockTables:
    """A copy of the input batch's block table, at most one step old, with one more row for padding."""

    def __init__(self, num_slots: int, max_blocks: int, padding_block: int, device: torch.device) -> None:
        """The row of slot `num_slots` pads captured graphs: all of its entries are `padding_block`."""
        self._tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self._tables[num_slots] = padding_block
        self._flat = self._tables.view(-1)
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, indexes: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32], send: Send) -> None:
        """Send entries by their index in the flat table; `gather` writes them. An index may appear twice."""
        if len(indexes):
            changed, values = send([indexes, blocks])
            self._sent = changed, values

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        """Write the sent entries to the table, then copy the first `num_blocks` entries of these slots to `into`.

        # [B] int64 -> [B, num_blocks] int32
        """
        if self._sent is not None:
            self._flat.index_copy_(0, *self._sent)
            self._sent = None
        torch.index_select(self._tables[:, : into.shape[1]], 0, slots, out=into)


class Accepted(NamedTuple):
    """The tokens that a step accepted in each of its B rows, without padding rows, on the device."""

    counts: torch.Tensor  # [B] int64, accepted positions of each row; 0 where no token could be sampled
    lengths: torch.Tensor  # [B] int64, tokens of each sequence, the new ones included
    last: torch.Tensor  # [B] int64, index in the step's tokens of the input token of the last accepted position
    tokens: torch.Tensor  # [B, 2] int64, the last two tokens of each sequence


class DeviceInputs(NamedTuple):
    """A step on the device: B rows of T tokens, including a captured graph's padding; S positions sample a token."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, see `StepInputs.carried_positions`
    last_tokens: torch.Tensor  # [S] int64, index in the T tokens of the input token of each sampled position
    sampled_slots: torch.Tensor  # [S] int64
    metadata: AttentionMetaData
    graph_size: int = 0
    """Rows of the graph that replays the step; 0: it runs eagerly."""
    adapters: torch.Tensor | None = None  # [T] int64, where the step replays a graph and graphs read adapters


class AttentionTarget(NamedTuple):
    """The attention backend that reads a step's arrays, and the cache layout that they refer to."""

    backend: AttentionBackend
    tables: DeviceBlockTables | None
    """None where the backend reads tables on the host."""
    graphs_take_adapters: bool
    """Whether captured graphs read the LoRA adapter of each token."""
    block_size: int = 0
    states_per_slot: int = 0
    """Both are needed for rows whose lengths the host knows only as bounds."""


class DeviceBatch:
    """Holds each slot's last token on the device and copies a step's arrays there."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self.device = device
        self.uploads, self.downloads = Uploads(device), Downloads(device)
        # One more slot for padding rows. # [max_num_seqs + 1] each
        self.last_tokens, self.lengths, self._valid_states = (
            torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device.torch_device) for _ in range(3)
        )
        """For each slot, after a step that the host may not have read: the last sampled token, the number of tokens,
        and the index of the valid recurrent state."""
        self.drafts = torch.zeros(max_num_seqs + 1, MOST_DRAFTS, dtype=torch.int64, device=device.torch_device)
        """The drafts that follow each slot's last token."""

    def assemble(
        self, inputs: StepInputs, changes: TableChanges, target: AttentionTarget, graph_size: int
    ) -> DeviceInputs:
        """Copy a step to the device; it is padded already if it replays a graph of `graph_size` rows.

        Tokens that the host has not read yet are taken from `last_tokens`.
        """
        if self.device.is_host and target.tables is None:
            return self._on_host(inputs, target, graph_size)
        if inputs.bounds is not None:
            return self._bounded(inputs, changes, target, graph_size)
        upload = self.uploads.begin()
        are_all_pending = len(inputs.pending_rows) == len(inputs.input_ids)
        known = [] if are_all_pending else [inputs.input_ids, inputs.pending_tokens, inputs.slots[inputs.pending_rows]]
        positions, last_tokens, sampled, slots, *tokens = upload.add(
            [inputs.carried_positions, inputs.last_tokens, inputs.sampled_slots, inputs.slots, *known]
        )
        tables = None
        if target.tables is not None:
            tables = self._room_for_tables(inputs, target, graph_size)
            target.tables.send(*changes.entries(), upload.add)
        metadata = target.backend.build_metadata(inputs, tables, upload.add)
        adapters = None
        if graph_size and target.graphs_take_adapters:
            (adapters,) = upload.add([_adapters(inputs)])
        upload.go()
        changes.forget()
        if target.tables is not None and tables is not None:
            target.tables.gather(slots, tables)
        if are_all_pending:
            ids = self.last_tokens.index_select(0, slots)
        else:
            ids, pending, pending_slots = tokens
            if len(pending):
                ids.index_copy_(0, pending, self.last_tokens.index_select(0, pending_slots))
        return DeviceInputs(ids, positions, last_tokens, sampled, metadata, graph_size, adapters)

    def _bounded(
        self, inputs: StepInputs, changes: TableChanges, target: AttentionTarget, graph_size: int
    ) -> DeviceInputs:
        """Assemble a step whose rows start at the lengths that `accept` wrote, where the host has not read them."""
        bounds, backend, length = inputs.bounds, target.backend, inputs.query_len
        assert bounds is not None
        assert target.tables is not None
        assert isinstance(backend, GPUAttentionBackend)
        upload = self.uploads.begin()
        num_rows, starts = len(inputs.slots), inputs.seq_lens - length
        shape = num_rows, length
        last_tokens, sampled, slots, num_blocks, first, counts, unread, ids, valid = upload.add(
            [
                inputs.last_tokens,
                inputs.sampled_slots,
                inputs.slots,
                bounds.num_blocks,
                starts,
                bounds.counts,
                bounds.is_unread,
                inputs.input_ids.reshape(shape),
                np.zeros(0, dtype=np.int64) if inputs.states is None else inputs.states % target.states_per_slot,
            ]
        )
        tables = self._room_for_tables(inputs, target, graph_size)
        target.tables.send(*changes.entries(), upload.add)
        metadata = backend.build_bounded(inputs.seq_lens, tables, length, upload.add)
        adapters = None
        if graph_size and target.graphs_take_adapters:
            (adapters,) = upload.add([_adapters(inputs)])
        upload.go()
        changes.forget()
        target.tables.gather(slots, tables)
        offsets = torch.arange(length, device=self.device.torch_device)
        first = torch.where(unread, self.lengths[slots] - 1, first)
        after = torch.cat((self.last_tokens[slots][:, None], self.drafts[slots, : length - 1]), 1)
        ids = torch.where(unread[:, None], after, ids)
        positions = first[:, None] + offsets
        is_padding = offsets >= counts[:, None]
        metadata.seq_lens = (first + length).int()
        # Attention multiplies what lies at a row's padding by zero, and another sequence may have left a NaN there. So
        # padding is stored like drafts that will be rejected, and without a block for it the row's last one is read.
        # A row may have more blocks than the tables have columns, since blocks of rejected drafts stay reserved.
        last_block = tables.gather(1, (num_blocks[:, None] - 1).clamp(0, tables.shape[1] - 1))
        is_own = torch.arange(tables.shape[1], device=tables.device) < num_blocks[:, None]
        torch.where(is_own, tables, last_block, out=tables)
        has_no_block = positions >= num_blocks[:, None] * target.block_size
        metadata.slot_mapping = mapped(tables, positions, target.block_size)
        metadata.slot_mapping = metadata.slot_mapping.masked_fill(has_no_block, NO_SLOT).flatten()
        if inputs.states is not None:
            base = slots * target.states_per_slot
            valid = torch.where(unread, self._valid_states[slots], valid)
            metadata.states = base + valid
            if length > 1:
                later = base[:, None] + (valid[:, None] + offsets) % target.states_per_slot
                if graph_size:
                    # Layers computed by torch write the state of a token without one into a padding row's, which only
                    # graphs have. Elsewhere padding takes its row's next states, like drafts that will be rejected.
                    later = later.masked_fill(is_padding, NO_SLOT)
                metadata.states_after = later.flatten()
                metadata.num_by_token = num_rows
        return DeviceInputs(ids.flatten(), positions.flatten(), last_tokens, sampled, metadata, graph_size, adapters)

    def accept(
        self, inputs: StepInputs, step: DeviceInputs, token_ids: torch.Tensor, states_per_slot: int
    ) -> Accepted:
        """Verify the drafts of a step of decodes against its sampled tokens, and store what the next step reads.

        `token_ids`: sampled tokens, negative where none could be sampled. # [S] int64
        """
        counts = np.bincount(inputs.sampled_rows, minlength=len(inputs.slots))
        offsets = np.arange(int(counts.max()))
        at = (np.cumsum(counts) - counts)[:, None] + np.minimum(offsets, counts[:, None] - 1)
        slots, sampled_at, exists = self.uploads.send([inputs.slots, at, offsets < counts[:, None]])
        sampled, before = token_ids[sampled_at], step.last_tokens[sampled_at]  # [B, most] each
        is_good = exists & (sampled >= 0)
        is_good[:, 1:] &= sampled[:, :-1] == step.input_ids[(before[:, :-1] + 1).clamp(max=len(step.input_ids) - 1)]
        num_accepted = is_good.long().cumprod(1).sum(1)
        latest = (num_accepted - 1).clamp(min=0)[:, None]
        lengths = step.positions[before[:, 0]] + 1 + num_accepted
        last = before.gather(1, latest)[:, 0]
        token = sampled.gather(1, latest).clamp(min=0)
        # The token before a row's first sampled position is an input of the step too, as it is for later positions.
        tokens = torch.cat((step.input_ids[last][:, None], token), 1)
        self.last_tokens.index_copy_(0, slots, token[:, 0])
        self.lengths.index_copy_(0, slots, lengths)
        if states_per_slot:
            assert step.metadata.states is not None
            valid = step.metadata.states[: len(slots)] - slots * states_per_slot
            self._valid_states.index_copy_(0, slots, (valid + latest[:, 0]) % states_per_slot)
        return Accepted(num_accepted, lengths, last, tokens)

    def _on_host(self, inputs: StepInputs, target: AttentionTarget, graph_size: int) -> DeviceInputs:
        """The step without copies: the device reads the host's arrays before the host prepares the next step."""
        if len(inputs.pending_rows):
            pending_slots = torch.from_numpy(inputs.slots[inputs.pending_rows])
            inputs.input_ids[inputs.pending_tokens] = self.last_tokens[pending_slots].numpy()
        return DeviceInputs(
            torch.from_numpy(inputs.input_ids),
            torch.from_numpy(inputs.carried_positions),
            torch.from_numpy(inputs.last_tokens),
            torch.from_numpy(inputs.sampled_slots),
            target.backend.build_metadata(inputs),
            graph_size,
            torch.from_numpy(_adapters(inputs)) if graph_size and target.graphs_take_adapters else None,
        )

    def _room_for_tables(self, inputs: StepInputs, target: AttentionTarget, graph_size: int) -> torch.Tensor:
        """Memory for the rows' block tables: the buffer that a captured graph reads, or a new tensor."""
        if graph_size:
            captured = target.backend.captured_tables(graph_size, inputs.query_len)
            if captured is not None:
                return captured[:, : inputs.num_blocks]
        shape = len(inputs.slots), inputs.num_blocks
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)


def mapped(tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slot mapping of positions in each row. # [B, blocks] int32, [B, n] int64 -> [B, n] int64"""
    return tables.gather(1, positions // block_size).long() * block_size + positions % block_size


def _adapters(inputs: StepInputs) -> npt.NDArray[np.int64]:
    """The LoRA adapter index of each token. # [T]"""
    if inputs.adapters is None:
        return np.zeros(len(inputs.input_ids), dtype=np.int64)
    return np.repeat(inputs.adapters.astype(np.int64), inputs.query_lens)
