"""`GraphRunner`: replays the model's pass of a decode batch from captured graphs. Owned by the model runner.

A graph is captured over fixed buffers for each of some batch sizes, largest first, and a batch is padded to the next.
Serving starts eagerly; `capture_next` captures one size at a time behind live traffic.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.device import Device, Graph
from engine.worker.input_batch import StepInputs
from models.attention.base import AttentionBackend
from models.forward_context import AttentionMetaData, Context, forward_context

_log = logging.getLogger(__name__)

_STEPS_BETWEEN = 32
"""Steps between two captures while there is work: a capture takes as long as a few of them."""


class GraphRunner:
    """Graphs of one model on one device, which share a pool of memory."""

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        *,
        block_size: int,
        max_blocks: int,
        spare_block: int,
    ) -> None:
        """`forward` is the model's pass. # 2 x [T] int64 -> [T, H]

        `max_blocks`: of the longest sequence. Rows that pad a batch write to `spare_block`, which is no sequence's.
        """
        self._device, self._backend, self._forward = device, backend, forward
        self._sizes = sorted(set(sizes))
        self._pending = list(self._sizes)
        self._captured: dict[int, Graph] = {}
        self._block_size, self._spare_block = block_size, spare_block
        self._steps_left = 0
        self._input_ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device.torch_device)
        self._positions = torch.zeros_like(self._input_ids)
        self._hidden: torch.Tensor | None = None
        """What all graphs write their rows to; as wide as the model, which the first capture shows."""
        backend.init_capture(self._sizes[-1], max_blocks)

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes that are replayed, smallest first."""
        return sorted(self._captured)

    def size_for(self, inputs: StepInputs) -> int:
        """Rows of the graph that replays a step; 0 where it runs eagerly: prompts, adapters, no graph yet."""
        num_rows = len(inputs.query_lens)
        if inputs.num_decodes < num_rows or len(inputs.positions) > num_rows or inputs.adapters is not None:
            return 0
        fitting = (size for size in self._sizes if size >= num_rows and size in self._captured)
        return next(fitting, 0)

    def pad(self, inputs: StepInputs, size: int) -> StepInputs:
        """As attention is to see a step of `size` rows: what is missing are nobody's, of one token. 0: as is."""
        missing = size - len(inputs.query_lens)
        if missing <= 0:
            return inputs
        spare = self._spare_block
        tables = np.full((size, inputs.block_tables.shape[1]), spare, dtype=np.int32)
        tables[: size - missing] = inputs.block_tables
        return replace(
            inputs,
            query_lens=_extended(inputs.query_lens, missing, 1),
            seq_lens=_extended(inputs.seq_lens, missing, 1),
            slot_mapping=_extended(inputs.slot_mapping, missing, spare * self._block_size),
            block_tables=tables,
            num_decodes=size,
        )

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData, size: int
    ) -> torch.Tensor:
        """Replay a step of N rows, whose metadata is of the padded one. # 2 x [N] int64 -> [N, H]

        The next replay overwrites what is returned.
        """
        num_rows = len(input_ids)
        self._input_ids[:num_rows].copy_(input_ids)
        self._positions[:num_rows].copy_(positions)
        self._input_ids[num_rows:size].zero_()
        self._positions[num_rows:size].zero_()
        self._backend.prepare_for_replay(metadata, size)
        self._captured[size].replay()
        assert self._hidden is not None
        return self._hidden[:num_rows]

    def after_step(self) -> None:
        """Capture a further size once in a while, behind live traffic."""
        if self._pending:
            self._steps_left -= 1
            if self._steps_left < 0:
                self.capture_next()

    def capture_next(self) -> bool:
        """Capture the largest size that is not captured; whether there are more. What fails leaves steps eager."""
        if not self._pending:
            return False
        size = self._pending.pop()
        self._steps_left = _STEPS_BETWEEN
        metadata = self._backend.prepare_for_capture(size)
        if metadata is None:
            _log.info("Decodes run eagerly: the attention backend %s captures no graphs", self._backend.name)
            self._pending.clear()
            return False
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                self._captured[size] = self._capture(size, metadata)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            # A smaller one would fail the same way, or leave no memory for steps.
            _log.warning("Decodes of up to %d rows run eagerly: capturing a graph failed: %s", size, error)
            self._pending.clear()
            return False
        _log.debug("a graph of %d rows was captured in %.2f s", size, time.perf_counter() - start)
        if not self._pending:
            _log.info("Decodes replay %d graphs, of %d to %d rows", len(self._captured), *self._ends)
        return bool(self._pending)

    @property
    def _ends(self) -> tuple[int, int]:
        return self.captured_sizes[0], self.captured_sizes[-1]

    def _capture(self, size: int, metadata: AttentionMetaData) -> Graph:
        input_ids, positions = self._input_ids[:size], self._positions[:size]
        context = Context(positions=positions, is_prefill=False, batch_size=size, graph_bs=size)

        def run() -> None:
            with torch.inference_mode(), forward_context(metadata, context):
                hidden = self._forward(input_ids, positions)
                if self._hidden is None:
                    self._hidden = hidden.new_zeros(self._sizes[-1], hidden.shape[1])
                self._hidden[:size].copy_(hidden)

        # The pass is run once before it is captured: its rows must be nobody's.
        ones = np.ones(size, dtype=np.int64)
        nobodys = self._backend.build_metadata(
            query_lens=ones,
            seq_lens=ones,
            block_tables=np.full((size, 1), self._spare_block, dtype=np.int32),
            slot_mapping=self._spare_block * self._block_size * ones,
            num_decodes=size,
        )
        self._input_ids.zero_()
        self._positions.zero_()
        self._backend.prepare_for_replay(nobodys, size)
        return self._device.capture(run)


def capture_sizes(wanted: Sequence[int], max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, of at most `max_num_seqs` rows: those wanted, or 1, 2, 4, 8, and every 16th to 512."""
    if not wanted:
        wanted = [1, 2, 4, 8, *range(16, min(max_num_seqs, 512) + 16, 16)]
    return sorted({min(size, max_num_seqs) for size in wanted})


def _extended(values: npt.NDArray[np.int64], count: int, value: int) -> npt.NDArray[np.int64]:
    return np.concatenate((values, np.full(count, value, dtype=np.int64)))
