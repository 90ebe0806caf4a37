"""`ResidentTables`: the block tables of all slots, kept on the device. A step sends the entries that changed."""

import numpy as np
import numpy.typing as npt
import torch

from models.upload import Send


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
