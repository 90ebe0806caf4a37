"""`TritonMetaData`: a step as the GPU's kernels read it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.forward_context import AttentionMetaData
from models.kernels.triton.pieces import MAX_PIECES, PIECE, num_pieces
from models.upload import upload

Lengths = npt.NDArray[np.int64]


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
            (table,) = upload([self._tiles(tokens)], self.seq_lens.device)
            self.tile_tables[tokens] = table.view(-1, 2)
        return self.tile_tables[tokens]

    def pieces(self, block_size: int) -> int:
        """The most pieces that a decode has, or may have in a captured graph."""
        if self.lengths is None:
            return min(MAX_PIECES, -(-self.block_tables.shape[1] * block_size // PIECE))
        if "pieces" not in self.plans:
            self.plans["pieces"] = int(num_pieces(self.lengths.contexts[: self.num_decodes]).max())
        most: int = self.plans["pieces"]
        return most

    def _tiles(self, tokens: int) -> npt.NDArray[np.int32]:
        assert self.lengths is not None, "a captured graph has decodes only"
        queries = self.lengths.queries[self.num_decodes :]
        counts = -(-queries // tokens)
        rows = np.repeat(np.arange(len(queries)), counts)
        firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
        keys = (self.lengths.contexts[self.num_decodes :] - queries)[rows] + firsts
        order = np.argsort(-keys, kind="stable")
        return np.stack((rows[order] + self.num_decodes, firsts[order]), axis=1).astype(np.int32)
