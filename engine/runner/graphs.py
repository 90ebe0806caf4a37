"""Captured graphs of decode steps: `GraphRunner` captures them, and replays one of them for each step.

A graph is captured over fixed buffers for each of several batch sizes, and a batch is padded to the next size. There
is a `GraphRunner` for plain decodes, and one for rows that verify drafts; `step_graphs` holds both. All sizes are
captured before the server is ready, largest first, or one at a time between steps, smallest first, so that small
batches need not wait for the graphs of large ones. `GraphMemory` decides whether one more graph leaves enough memory
for steps. All graphs share one memory pool: the largest pass determines its size, and smaller ones add little.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import StepOutOfMemory
from engine.runner.device import Device, DeviceMemory, Graph, oom_in_step
from engine.runner.device_batch import DeviceInputs
from engine.runner.input_batch import RowBounds, StepInputs
from engine.runner.memory_sizing import gib
from models.attention.backend import NO_SLOT, AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.context import Context, ForwardContext, LoRARows, forward_context, get_forward_context
from models.ops.triton.grids import PIECE
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_MARGIN = 256 << 20
"""Bytes left free in addition to the largest step's, for fragmentation and for libraries that allocate late."""
_Integer = TypeVar("_Integer", bound=np.integer[Any] | np.bool_)
_log = logging.getLogger(__name__)

_STEPS_BETWEEN = 32
"""Steps between two captures under load: a capture and its test take as long as several steps."""

_TRIED_LENGTHS = (1, 2, PIECE + 30, 3)
"""Context lengths of the rows that a new graph is tested with, if the model allows them. One is longer than a split of
decode attention, so that split results are merged."""
_APART = 0.2
"""Largest distance of a replayed row from the eager one, relative to its norm. Libraries may sum in another order,
which stays below it; a wrong row exceeds it."""


class GraphMemory:
    """Decides whether there is memory for one more graph.

    It is constructed while no step runs, before the steps of the start: the largest of these shows how much memory a
    step takes.
    """

    def __init__(self, memory: DeviceMemory | None) -> None:
        """`memory`: the device's; None where graphs take no memory."""
        self._memory = memory
        self._of_steps: int | None = None
        self._at_rest = self._in_use = 0
        """Bytes in use between steps, and bytes in use before the pass that is measured."""
        self._of_pass = self._largest_pass = 0
        """Bytes of the measured pass, and of the largest captured pass."""
        self._num_graphs = self._of_graphs = self._of_last = 0
        """Number of captured graphs; bytes that all of them, and the last one, took from free memory."""
        if memory is not None:
            memory.give_back()
            memory.reset_peak()
            self._at_rest = memory.in_use()

    def begin(self) -> None:
        """Start measuring. The caller then runs the graph's pass eagerly, which shows its peak memory."""
        memory = self._memory
        if memory is None:
            return
        if self._of_steps is None:
            self._of_steps = memory.peak() - self._at_rest
        memory.reset_peak()
        self._in_use = memory.in_use()

    def shortage(self) -> str | None:
        """The reason why there is no memory for a graph of the measured pass; None if there is enough."""
        memory = self._memory
        if memory is None or self._of_steps is None:
            return None
        self._of_pass = memory.peak() - self._in_use
        needed = 0
        if self._of_pass > self._largest_pass:
            needed = self._of_pass
        elif self._num_graphs > 1:
            needed = self._of_last
        reserved, free = self._of_steps + _MARGIN, memory.free()
        # Steps may reuse memory that torch's allocator has cached; a graph's pool may not.
        reusable = max(0, memory.held() - memory.in_use() - self._of_graphs)
        if needed + reserved <= free + reusable and needed + _MARGIN <= free:
            return None
        return f"it may take {gib(needed)}, and steps need {gib(reserved)} of the {gib(free + reusable)} that are free"

    def capturing(self) -> AbstractContextManager[None]:
        """A context for the capture of the graph, which measures the graph's memory."""
        return nullcontext() if self._memory is None else self._measured(self._memory)

    @contextmanager
    def _measured(self, memory: DeviceMemory) -> Iterator[None]:
        before = memory.free()
        yield
        self._num_graphs += 1
        self._largest_pass = max(self._largest_pass, self._of_pass)
        self._of_last = max(0, before - memory.free())
        self._of_graphs += self._of_last


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """The sizes that all graphs of a `GraphRunner` share."""

    block_size: int
    max_blocks: int
    """Blocks of the longest sequence."""
    padding_block: int
    """A block that no sequence uses, which padding rows write to."""
    padding_slot: int
    """The padding rows' slot in block tables and in the layers' states."""
    query_len: int = 1
    """Tokens of a row: one plus the drafts that are verified with it."""
    has_adapters: bool = False
    """Whether rows may use LoRA adapters."""
    states_per_slot: int = 0
    """Recurrent states that a layer stores for each slot; 0 without recurrent layers."""

    @property
    def padding_state(self) -> int:
        """The padding rows' index in the layers' states."""
        return self.padding_slot * self.states_per_slot


Observing: TypeAlias = Callable[[int], AbstractContextManager[None]]


def not_observed(_size: int) -> AbstractContextManager[None]:
    return nullcontext()


class GraphRunner:
    """The graphs of one model for rows of a fixed number of tokens."""

    rows: ClassVar[str] = "Decodes of %d rows"
    """The unit of a size, for log lines."""

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        shape: GraphShape,
        parallel: TensorParallel = SINGLE_RANK,
        memory: GraphMemory | None = None,
        *,
        largest_first: bool = True,
        observing: Observing = not_observed,
        stream_layers: tuple[int, ...] = (),
    ) -> None:
        """`forward` is the model's pass. # 2 x [T] int64 -> [T, H]

        `sizes`: numbers of rows. `parallel`: the ranks that replay graphs together. `memory`: shared by the device's
        graph runners; None where there is only this one. `largest_first`: the order of captures. `observing`:
        a context for each pass, by its number of rows, which may copy results. `stream_layers`: layers whose
        residual streams a replay leaves in the forward context.
        """
        self._observing = observing
        self._stream_layers = stream_layers
        self._streams: dict[int, torch.Tensor] = {}
        """The residual streams that graphs output, by layer, allocated with `_hidden`. # each [max tokens, H]"""
        self._device, self._backend, self._forward = device, backend, forward
        self._shape, self._parallel = shape, parallel
        self._sizes = sorted(set(sizes))
        self._pending = sorted(self._sizes, reverse=not largest_first)
        """Sizes left to capture, the next one last."""
        self._captured: dict[int, Graph] = {}
        self._steps_left = 0
        most = self._sizes[-1] * shape.query_len
        # Token ids, positions, and adapters if rows may use them.
        num_columns = 3 if shape.has_adapters else 2
        self._tokens = list(torch.zeros(num_columns, most, dtype=torch.int64, device=device.torch_device))
        self._hidden: torch.Tensor | None = None
        """The output of all graphs, allocated by the first pass, which shows its width. # [max tokens, H]"""
        self._init_capture()
        self._memory = memory or GraphMemory(device.memory)
        self._has_warned = False

    def _init_capture(self) -> None:
        self._backend.init_capture(self._sizes[-1], self._shape.max_blocks, self._shape.query_len)

    def _metadata_for(self, size: int) -> AttentionMetaData | None:
        """The metadata with which a pass of `size` rows is captured; None if the backend supports no capture."""
        return self._backend.prepare_for_capture(size, self._shape.query_len)

    @property
    def query_len(self) -> int:
        """Tokens of a row."""
        return self._shape.query_len

    def give_up(self) -> None:
        """Capture no further sizes."""
        self._pending.clear()

    @property
    def padding_slot(self) -> int:
        """The slot mapping's entry for padding tokens."""
        return self._shape.padding_block * self._shape.block_size

    @property
    def has_pending(self) -> bool:
        """Whether there are sizes left to capture."""
        return bool(self._pending)

    @property
    def captured_sizes(self) -> list[int]:
        """Sizes that are replayed, smallest first."""
        return sorted(self._captured)

    def size_for(self, inputs: StepInputs) -> int:
        """Rows of the graph that replays a step; 0 where it runs eagerly: other rows, or no graph yet."""
        num_rows, length = len(inputs.query_lens), self._shape.query_len
        if inputs.query_len != length or inputs.num_decodes < num_rows or len(inputs.positions) > num_rows * length:
            return 0
        if inputs.adapters is not None and not self._shape.has_adapters:
            return 0
        return self.size_of(num_rows)

    def size_of(self, num_rows: int) -> int:
        """Rows of the graph that replays a decode of `num_rows` rows; 0 where none is captured yet."""
        return next((size for size in self._sizes if size >= num_rows and size in self._captured), 0)

    def pad(self, inputs: StepInputs, size: int) -> StepInputs:
        """A step padded to a graph of `size` rows; with size 0, the step unchanged."""
        missing = size - len(inputs.query_lens)
        if missing <= 0:
            return inputs
        shape = self._shape
        spare, length, num_rows = shape.padding_block, shape.query_len, size - missing
        tables = None
        if inputs.block_tables is not None:
            tables = np.full((size, inputs.num_blocks), spare, dtype=np.int32)
            tables[:num_rows] = inputs.block_tables
        pending_rows, pending_tokens = inputs.pending_rows, inputs.pending_tokens
        bounds = inputs.bounds
        if bounds is not None:
            bounds = RowBounds(
                _extended(bounds.counts, missing, 0),
                _extended(bounds.is_unread, missing, 0),
                _extended(bounds.num_blocks, missing, 0),
            )
        if len(pending_rows) == len(inputs.input_ids):
            # The padding slot has a last token too, so that one operation gathers those of all rows.
            pending_rows = pending_tokens = np.arange(size)
        return replace(
            inputs,
            input_ids=_extended(inputs.input_ids, missing * length, 0),
            positions=_extended(inputs.positions, missing * length, 0),
            rope_lengths=None if inputs.rope_lengths is None else _extended(inputs.rope_lengths, missing * length, 0),
            query_lens=_extended(inputs.query_lens, missing, length),
            seq_lens=_extended(inputs.seq_lens, missing, length),
            slot_mapping=_extended(inputs.slot_mapping, missing * length, self.padding_slot),
            block_tables=tables,
            num_decodes=size,
            slots=_extended(inputs.slots, missing, shape.padding_slot),
            states=None if inputs.states is None else _extended(inputs.states, missing, shape.padding_state),
            states_after=None
            if inputs.states_after is None
            else _extended(inputs.states_after, missing * length, shape.padding_state),
            num_by_token=size if inputs.num_by_token else 0,
            pending_rows=pending_rows,
            pending_tokens=pending_tokens,
            adapters=None if inputs.adapters is None else _extended(inputs.adapters, missing, 0),
            bounds=bounds,
        )

    def run(self, step: DeviceInputs, num_tokens: int) -> torch.Tensor:
        """Replay a padded step; `num_tokens` excludes the padding. # -> [num_tokens, H]

        The next replay overwrites the returned tensor.
        """
        given = [step.input_ids, step.positions]
        if self._shape.has_adapters:
            assert step.adapters is not None
            given.append(step.adapters)
        torch._foreach_copy_([tokens[: len(step.input_ids)] for tokens in self._tokens], given)
        self._backend.prepare_for_replay(step.metadata, step.graph_size)
        self._captured[step.graph_size].replay()
        assert self._hidden is not None
        if self._streams:
            get_forward_context().streams.update({n: stream[:num_tokens] for n, stream in self._streams.items()})
        return self._hidden[:num_tokens]

    def count_step(self) -> None:
        """Count a step, and capture a further size every `_STEPS_BETWEEN` steps."""
        if self._pending:
            self._steps_left -= 1
            if self._steps_left < 0:
                self.capture_next()

    def capture_next(self) -> bool:
        """Capture the next size; returns whether more remain. If a capture fails, steps of that size run eagerly.

        Ranks that compute together capture at the same time, and either all of them have a graph or none. Each rank
        first runs the pass without collectives; an exception of the pass after that is raised.
        """
        if not self._pending:
            return False
        size = self._pending.pop()
        self._steps_left = _STEPS_BETWEEN
        metadata = self._metadata_for(size)
        if metadata is None:
            _log.info("Decodes run eagerly: the attention backend %s captures no graphs", self._backend.name)
            self._pending.clear()
            return False
        start = time.perf_counter()
        with torch.inference_mode():
            run = self._pass(size, metadata)
            graph = self._capture(size, run) if self._is_fit(size, run) else None
            if graph is not None and not self._is_tried(size, run, graph):
                graph = None
        if graph is not None:
            self._captured[size] = graph
            _log.debug("%s were captured in %.2f s", self.rows % size, time.perf_counter() - start)
        if not self._pending and self._captured:
            self._log_captured()
        return bool(self._pending)

    def _log_captured(self) -> None:
        what = "Decodes" if self.query_len == 1 else f"Decodes of {self.query_len} tokens, drafts among them,"
        sizes = self.captured_sizes
        _log.info("%s replay %d graphs, of %d to %d rows", what, len(sizes), sizes[0], sizes[-1])

    def _is_fit(self, size: int, run: Callable[[], None]) -> bool:
        """Whether the eager pass succeeds on all ranks and leaves the memory that steps need there."""
        failure: Exception | None = None
        shortage: str | None = None
        self._memory.begin()
        try:
            # Without collectives, since a rank that fails in one would leave the others waiting.
            with oom_in_step(), self._parallel.without_collectives():
                self._run_alone(size, run)
            shortage = self._memory.shortage()
        except StepOutOfMemory as error:
            shortage = str(error)
        except Exception as error:  # noqa: BLE001, compilers of kernels and libraries may raise any
            failure = error
        if failure is not None:
            self._log_failure(size, failure)
        if shortage is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s run eagerly, and smaller ones if need be: memory does not suffice for a graph (%s); lower "
                "gpu_memory_utilization, or name smaller cudagraph_capture_sizes",
                self.rows % size,
                shortage,
            )
        if not self._all_agree(failure is None):
            # A graph of a smaller size would fail in the same way.
            self._pending.clear()
            return False
        return self._all_agree(shortage is None)

    def _run_alone(self, size: int, run: Callable[[], None]) -> None:
        self._write_padding_rows(size)
        run()
        self._device.record().synchronize()

    def _record(self, size: int, run: Callable[[], None]) -> Graph:
        del size
        return self._device.capture(run)

    def _replay(self, size: int, graph: Graph) -> None:
        del size
        graph.replay()

    def _capture(self, size: int, run: Callable[[], None]) -> Graph | None:
        """Capture the graph of a pass on all ranks, or on none."""
        if not self._parallel.is_alone:
            # The first run allocates the buffers of the collectives.
            run()
        graph: Graph | None = None
        try:
            with self._memory.capturing(), self._parallel.capturing():
                graph = self._captured_by_all(size, run)
        except RuntimeError as error:
            self._log_failure(size, error)
            graph = None
        if self._all_agree(graph is not None):
            return graph
        # A graph of a smaller size would fail in the same way, or leave no memory for steps.
        self._pending.clear()
        return None

    def _is_tried(self, size: int, run: Callable[[], None], graph: Graph) -> bool:
        """Whether a graph's replays give the results of the eager pass on all ranks."""
        try:
            with oom_in_step():
                is_right = self._is_right(size, run, graph)
        except (RuntimeError, StepOutOfMemory) as error:
            if not self._parallel.is_alone:
                # The other ranks wait in a collective of the pass that this rank left.
                raise
            self._log_failure(size, error)
            self._pending.clear()
            return False
        if self._all_agree(is_right):
            return True
        self._drop_all(size)
        return False

    def _is_right(self, size: int, run: Callable[[], None], graph: Graph) -> bool:
        """Whether replays equal the eager pass: some releases of ROCm replay graphs wrongly without an error.

        Models with recurrent states are not compared, since each pass changes the states.
        """
        if self._shape.states_per_slot or not self._device.computes:
            return True
        assert self._hidden is not None
        hidden = self._hidden[: size * self._shape.query_len]
        is_right = True
        # Padding rows share one slot of the cache, so all rows are equal. Every rank runs all context lengths, even
        # after a mismatch, since the others wait for it in collectives. The last block of the longest sequence may be
        # cut short.
        most = max(3, (self._shape.max_blocks - 1) * self._shape.block_size + 2 - self._shape.query_len)
        for trial, length in enumerate(_TRIED_LENGTHS):
            self._write_padding_rows(size, min(length, most), token=1 + trial)
            run()
            expected = hidden.to(torch.float32, copy=True)
            hidden.fill_(float("nan"))
            self._replay(size, graph)
            apart, norms = (hidden.float() - expected).norm(dim=-1), expected.norm(dim=-1)
            is_right &= bool(((apart <= _APART * norms) | ~norms.isfinite()).all())
        return is_right

    def _drop_all(self, size: int) -> None:
        """Drop all graphs, since a device that replays one graph wrongly may replay others wrongly."""
        _log.warning(
            "%s run eagerly, and those of other sizes: their graph does not reproduce the pass that it was captured "
            "of; another release of the driver or of ROCm may do better",
            self.rows % size,
        )
        self._captured.clear()
        self._pending.clear()

    def _captured_by_all(self, size: int, run: Callable[[], None]) -> Graph:
        """Capture a graph. Raises `RuntimeError` on all ranks if one of them failed."""
        failure: Exception | None = None
        try:
            graph = self._record(size, run)
        except Exception as error:  # noqa: BLE001, as above
            failure = error
        if not self._all_agree(failure is None):
            raise RuntimeError("another rank failed to" if failure is None else str(failure)) from failure
        return graph

    def _all_agree(self, is_so: bool) -> bool:
        return self._parallel.all_agree(is_so, self._device.torch_device)

    def _log_failure(self, size: int, error: Exception) -> None:
        _log.warning("%s, and smaller ones, run eagerly: capturing a graph failed: %s", self.rows % size, error)

    def _pass(self, size: int, metadata: AttentionMetaData) -> Callable[[], None]:
        """The function that a graph of `size` rows captures, run over padding rows."""
        shape = self._shape
        num_tokens = size * shape.query_len
        input_ids, positions, *adapters = (tokens[:num_tokens] for tokens in self._tokens)
        context = Context(positions=positions, is_prefill=False, batch_size=size, graph_bs=size)
        lora = LoRARows(adapters[0]) if adapters else None

        def run() -> None:
            with torch.inference_mode(), self._step(metadata, context, lora) as step, self._observing(size):
                hidden = self._forward(input_ids, positions)
                if self._hidden is None:
                    most = len(self._tokens[0])
                    self._hidden = hidden.new_zeros(most, hidden.shape[1])
                    self._streams = {n: each.new_zeros(most, each.shape[1]) for n, each in step.streams.items()}
                self._hidden[:num_tokens].copy_(hidden)
                for layer, stream in step.streams.items():
                    self._streams[layer][:num_tokens].copy_(stream)

        return run

    def _step(
        self, metadata: AttentionMetaData, context: Context, lora: LoRARows | None
    ) -> AbstractContextManager[ForwardContext]:
        """The forward context of a captured pass."""
        return forward_context(metadata, context, lora=lora, stream_layers=self._stream_layers)

    def _write_padding_rows(self, size: int, length: int = 1, token: int = 1) -> None:
        """Fill the buffers with padding rows of `token`, whose context in the padding block has `length` tokens."""
        shape = self._shape
        positions = np.arange(length - 1, length - 1 + shape.query_len)
        seq_len = length - 1 + shape.query_len
        # All block table entries are the padding block; tokens at positions beyond one block are not stored.
        slots = np.where(positions < shape.block_size, self.padding_slot + positions, NO_SLOT)
        num_blocks = -(-seq_len // shape.block_size)
        states_after = None
        if shape.states_per_slot and shape.query_len > 1:
            states_after = np.full(size * shape.query_len, shape.padding_state)
        metadata = self._backend.build_metadata(
            AttentionBatch(
                query_lens=np.full(size, shape.query_len, dtype=np.int64),
                seq_lens=np.full(size, seq_len, dtype=np.int64),
                block_tables=np.full((size, num_blocks), shape.padding_block, dtype=np.int32),
                slot_mapping=np.tile(slots, size),
                num_decodes=size,
                states=np.full(size, shape.padding_state) if shape.states_per_slot else None,
                states_after=states_after,
                num_by_token=size if states_after is not None else 0,
                query_len=shape.query_len,
            )
        )
        for tokens in self._tokens:
            tokens.zero_()
        self._tokens[0].fill_(token)
        self._tokens[1][: size * shape.query_len].view(size, -1).add_(
            torch.arange(length - 1, seq_len, device=self._device.torch_device)
        )
        self._backend.prepare_for_replay(metadata, size)


def _extended(values: npt.NDArray[_Integer], count: int, value: int) -> npt.NDArray[_Integer]:
    return np.concatenate((values, np.full(count, value, dtype=values.dtype)))
