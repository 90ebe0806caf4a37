"""`DeviceBatch`: a step's arrays on the device, assembled from what is kept there by slot and what the step sends.

The last sampled token of each slot is on the device, and with some attention backends its block table is too: a step
sends the entries that changed. On a GPU all of a step's arrays go in one copy.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.device import Device, Downloads, Uploads
from engine.runner.input_batch import StepInputs, TableChanges
from models.attention.backend import AttentionBackend, AttentionMetaData
from models.ops.memory import Send


class DeviceBlockTables:
    """A copy of the input batch's block table, at most one step old, with one more row for padding."""

    def __init__(self, num_slots: int, max_blocks: int, padding_block: int, device: torch.device) -> None:
        """The row of slot `num_slots`, which pads captured graphs, names nothing but `padding_block`."""
        self._tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self._tables[num_slots] = padding_block
        self._flat = self._tables.view(-1)
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, indexes: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32], send: Send) -> None:
        """Send entries by their index in the flat table; `gather` writes them. An index may come twice."""
        if len(indexes):
            changed, values = send([indexes, blocks])
            self._sent = changed, values

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        """Write what was sent to the table, and then the beginnings of these slots' rows to `into`.

        # [B] int64 -> [B, num_blocks] int32
        """
        if self._sent is not None:
            self._flat.index_copy_(0, *self._sent)
            self._sent = None
        torch.index_select(self._tables[:, : into.shape[1]], 0, slots, out=into)


class DeviceInputs(NamedTuple):
    """A step on the device: B rows of T tokens, with those that pad a captured graph; S sample a token."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, see `StepInputs.carried_positions`
    last_tokens: torch.Tensor  # [S] int64, index in the T tokens of each sampled row's last one
    sampled_slots: torch.Tensor  # [S] int64
    metadata: AttentionMetaData
    graph_size: int = 0
    """Rows of the graph that replays the step; 0: it runs eagerly."""
    adapters: torch.Tensor | None = None  # [T] int64, of a step that replays a graph, where there are any


class AttentionTarget(NamedTuple):
    """What a step's arrays are assembled for."""

    backend: AttentionBackend
    tables: DeviceBlockTables | None
    """None where the backend reads tables on the host."""
    graphs_take_adapters: bool
    """Whether captured graphs read the LoRA adapter of each token."""


class DeviceBatch:
    """The last token of each slot, and how a step's arrays get to the device."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self.device = device
        self.uploads, self.downloads = Uploads(device), Downloads(device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device.torch_device)
        """The token that each slot sampled last, and one more for padding rows. # [max_num_seqs + 1] int64"""

    def assemble(
        self, inputs: StepInputs, changes: TableChanges, target: AttentionTarget, graph_size: int
    ) -> DeviceInputs:
        """A step on the device, padded already if it replays a graph of `graph_size` rows.

        Tokens that the host has not read yet are taken from `last_tokens`.
        """
        if self.device.is_host and target.tables is None:
            return self._on_host(inputs, target, graph_size)
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
        metadata = _metadata(inputs, target, tables, upload.add)
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

    def _on_host(self, inputs: StepInputs, target: AttentionTarget, graph_size: int) -> DeviceInputs:
        """Nothing is copied: the device reads the host's arrays, before the next step is made."""
        if len(inputs.pending_rows):
            pending_slots = torch.from_numpy(inputs.slots[inputs.pending_rows])
            inputs.input_ids[inputs.pending_tokens] = self.last_tokens[pending_slots].numpy()
        return DeviceInputs(
            torch.from_numpy(inputs.input_ids),
            torch.from_numpy(inputs.carried_positions),
            torch.from_numpy(inputs.last_tokens),
            torch.from_numpy(inputs.sampled_slots),
            _metadata(inputs, target, None, None),
            graph_size,
            torch.from_numpy(_adapters(inputs)) if graph_size and target.graphs_take_adapters else None,
        )

    def _room_for_tables(self, inputs: StepInputs, target: AttentionTarget, graph_size: int) -> torch.Tensor:
        """Memory for the rows' block tables: the buffer that a graph reads, or a new one."""
        if graph_size:
            captured = target.backend.captured_tables(graph_size, inputs.query_len)
            if captured is not None:
                return captured[:, : inputs.num_blocks]
        shape = len(inputs.slots), inputs.num_blocks
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)


def _adapters(inputs: StepInputs) -> npt.NDArray[np.int64]:
    """The adapter of each token. # [T]"""
    if inputs.adapters is None:
        return np.zeros(len(inputs.input_ids), dtype=np.int64)
    return np.repeat(inputs.adapters.astype(np.int64), inputs.query_lens)


def _metadata(
    inputs: StepInputs, target: AttentionTarget, tables: torch.Tensor | None, send: Send | None
) -> AttentionMetaData:
    block_tables = inputs.block_tables if tables is None else tables
    assert block_tables is not None, "block tables are on the host or on the device"
    return target.backend.build_metadata(
        query_lens=inputs.query_lens,
        seq_lens=inputs.seq_lens,
        block_tables=block_tables,
        slot_mapping=inputs.slot_mapping,
        num_decodes=inputs.num_decodes,
        slots=inputs.states,
        slots_after=inputs.states_after,
        num_by_token=inputs.num_by_token,
        query_len=inputs.query_len,
        send=send,
    )
