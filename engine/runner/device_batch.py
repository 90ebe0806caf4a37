"""`ResidentTables`: the block tables of all slots, kept on the device. A step sends the entries that changed."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.device import Device, Downloads, Uploads
from engine.runner.input_batch import StepInputs, TableChanges
from models.attention.backend import AttentionBackend, AttentionMetaData
from models.ops.memory import Send


class ResidentTables:
    """A copy of the input batch's table, one step behind at most; one more row is nobody's."""

    def __init__(self, num_slots: int, max_blocks: int, spare_block: int, device: torch.device) -> None:
        """The row of slot `num_slots`, which pads captured graphs, names nothing but `spare_block`."""
        self._tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self._tables[num_slots] = spare_block
        self._flat = self._tables.view(-1)
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, places: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32], send: Send) -> None:
        """Have entries on their way, by their places in the flat table; one that is named twice has one value."""
        if len(places):
            changed, values = send([places, blocks])
            self._sent = changed, values

    def gather(self, slots: torch.Tensor, into: torch.Tensor) -> None:
        """Write what was sent to the table, and then the beginnings of these slots' rows to `into`.

        # [B] int64 -> [B, num_blocks] int32
        """
        if self._sent is not None:
            self._flat.index_copy_(0, *self._sent)
            self._sent = None
        torch.index_select(self._tables[:, : into.shape[1]], 0, slots, out=into)


# [device_batch] `DeviceBatch`: what the device keeps of the batch by slot, and a step's inputs, which are assembled
# there.
#
# Used by the model runner. On a GPU all of a step's arrays go in one copy; last tokens and block tables are there.


class DeviceInputs(NamedTuple):
    """A step on the device: B rows of T tokens, those included that pad a captured graph; S sample a token."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    last_tokens: torch.Tensor  # [S] int64, index in the T tokens of each sampled row's last one
    sampled_slots: torch.Tensor  # [S] int64
    metadata: AttentionMetaData
    graph_size: int = 0
    """Rows of the graph that replays the step; 0: it runs eagerly."""
    adapters: torch.Tensor | None = None  # [T] int64, of a step that replays a graph, where there are any


class Place(NamedTuple):
    """Where a step's attention computes."""

    backend: AttentionBackend
    tables: ResidentTables | None
    """None where the backend reads tables on the host."""
    have_states: bool
    """Whether layers keep states by slot."""
    graphs_take_adapters: bool
    """Whether a graph is told each token's LoRA adapter."""


class DeviceBatch:
    """The last token of each slot, and how a step's arrays get to the device."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self.device = device
        self.uploads, self.downloads = Uploads(device), Downloads(device)
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device.torch_device)
        """Of each slot, what it sampled last; and one of nobody's, for rows that pad captured graphs."""

    def assemble(self, inputs: StepInputs, changes: TableChanges, place: Place, graph_size: int) -> DeviceInputs:
        """A step, padded already if it replays a graph of `graph_size` rows, as the device sees it.

        Tokens that nobody has read are taken from where they were sampled.
        """
        if self.device.is_host and place.tables is None:
            return self._on_host(inputs, place, graph_size)
        upload = self.uploads.begin()
        are_all_unread = len(inputs.unread_rows) == len(inputs.input_ids)
        known = [] if are_all_unread else [inputs.input_ids, inputs.unread_tokens, inputs.slots[inputs.unread_rows]]
        positions, last_tokens, sampled, slots, *tokens = upload.add(
            [inputs.positions, inputs.last_tokens, inputs.sampled_slots, inputs.slots, *known]
        )
        tables = None
        if place.tables is not None:
            tables = self._room_for_tables(inputs, place, graph_size)
            place.tables.send(*changes.entries(), upload.add)
        metadata = _metadata(inputs, place, tables, upload.add)
        adapters = None
        if graph_size and place.graphs_take_adapters:
            (adapters,) = upload.add([_adapters(inputs)])
        upload.go()
        changes.forget()
        if place.tables is not None and tables is not None:
            place.tables.gather(slots, tables)
        if are_all_unread:
            ids = self.last_tokens.index_select(0, slots)
        else:
            ids, unread, unread_slots = tokens
            if len(unread):
                ids.index_copy_(0, unread, self.last_tokens.index_select(0, unread_slots))
        return DeviceInputs(ids, positions, last_tokens, sampled, metadata, graph_size, adapters)

    def _on_host(self, inputs: StepInputs, place: Place, graph_size: int) -> DeviceInputs:
        """Nothing is copied: the device reads the host's arrays, before the next step is made."""
        if len(inputs.unread_rows):
            unread_slots = torch.from_numpy(inputs.slots[inputs.unread_rows])
            inputs.input_ids[inputs.unread_tokens] = self.last_tokens[unread_slots].numpy()
        return DeviceInputs(
            torch.from_numpy(inputs.input_ids),
            torch.from_numpy(inputs.positions),
            torch.from_numpy(inputs.last_tokens),
            torch.from_numpy(inputs.sampled_slots),
            _metadata(inputs, place, None, None),
            graph_size,
            torch.from_numpy(_adapters(inputs)) if graph_size and place.graphs_take_adapters else None,
        )

    def _room_for_tables(self, inputs: StepInputs, place: Place, graph_size: int) -> torch.Tensor:
        """For the rows' tables: where a graph reads them, or of the step's own."""
        if graph_size:
            captured = place.backend.captured_tables(graph_size, inputs.query_len)
            if captured is not None:
                return captured[:, : inputs.num_blocks]
        shape = len(inputs.slots), inputs.num_blocks
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)


def _adapters(inputs: StepInputs) -> npt.NDArray[np.int64]:
    """Of each token. # [T]"""
    if inputs.adapters is None:
        return np.zeros(len(inputs.input_ids), dtype=np.int64)
    return np.repeat(inputs.adapters.astype(np.int64), inputs.query_lens)


def _metadata(inputs: StepInputs, place: Place, tables: torch.Tensor | None, send: Send | None) -> AttentionMetaData:
    block_tables = inputs.block_tables if tables is None else tables
    assert block_tables is not None, "somebody has the tables"
    return place.backend.build_metadata(
        query_lens=inputs.query_lens,
        seq_lens=inputs.seq_lens,
        block_tables=block_tables,
        slot_mapping=inputs.slot_mapping,
        num_decodes=inputs.num_decodes,
        slots=inputs.slots if place.have_states else None,
        query_len=inputs.query_len,
        send=send,
    )
