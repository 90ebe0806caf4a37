"""`TritonMetaData`: a step as the GPU's kernels read it, and `on_device`, which takes it there in one copy."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.forward_context import AttentionMetaData
from models.kernels.triton.pieces import MAX_PIECES, PIECE, num_pieces

Lengths = npt.NDArray[np.int64]

_ALIGNMENT = 16
"""Bytes, which kernels are compiled for."""
_TORCH_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What the host knows of a step's rows."""

    queries: Lengths  # [B], tokens computed
    contexts: Lengths  # [B], tokens attended to


@dataclass(slots=True, kw_only=True)
class TritonMetaData(AttentionMetaData):
    """A step; its tensors are on the device. Rows of length 0 fill a captured graph up, and compute nothing."""

    items: torch.Tensor  # [at least the items] int32, the pieces of the decodes: see `list_pieces`
    num_items: torch.Tensor  # [1] int32
    lengths: HostLengths | None
    """None in a captured graph: they are another at each replay."""
    tile_tables: dict[int, torch.Tensor] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """What layers make of the step once, for all of their kind."""

    def tiles(self, tokens: int) -> torch.Tensor:
        """The spans after the decodes in tiles of so many tokens, those with most keys first. # [tiles, 2] int32"""
        if tokens not in self.tile_tables:
            (table,) = on_device([self._tiles(tokens)], self.seq_lens.device)
            self.tile_tables[tokens] = table.view(-1, 2)
        return self.tile_tables[tokens]

    def pieces(self, block_size: int) -> int:
        """The most pieces that a decode has, or may have in a captured graph."""
        if self.lengths is None:
            return min(MAX_PIECES, -(-self.block_tables.shape[1] * block_size // PIECE))
        return int(num_pieces(self.lengths.contexts[: self.num_decodes]).max())

    def _tiles(self, tokens: int) -> npt.NDArray[np.int32]:
        assert self.lengths is not None, "a captured graph has decodes only"
        queries = self.lengths.queries[self.num_decodes :]
        counts = -(-queries // tokens)
        rows = np.repeat(np.arange(len(queries)), counts)
        firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
        keys = (self.lengths.contexts[self.num_decodes :] - queries)[rows] + firsts
        order = np.argsort(-keys, kind="stable")
        return np.stack((rows[order] + self.num_decodes, firsts[order]), axis=1).astype(np.int32)


def on_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int32 or int64 on the device, by one copy from pinned memory that the host does not wait for."""
    places, total = [], 0
    for array in arrays:
        places.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type != "cpu")
    host = packed.numpy()
    for array, place in zip(arrays, places, strict=True):
        host[place : place + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = packed.to(device, non_blocking=True)
    return [
        there[place : place + array.nbytes].view(_TORCH_TYPES[array.dtype]).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]
