"""Captured graphs of steps: `make_graphs` decides which are captured, `DecodeGraphs` chooses a graph for each step."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from engine.runner.device_batch import DeviceInputs
from engine.runner.draft_graphs import DraftGraphRunner
from engine.runner.draft_passes import DraftPasses
from engine.runner.graphs import GraphMemory, GraphRunner, GraphShape, Observing, not_observed
from engine.runner.input_batch import StepInputs, UniformRows
from engine.runner.kv_cache import LayerCaches
from engine.runner.loaded_model import LoadedModel
from engine.runner.pieces import PieceRunner
from engine.speculative.drafts import max_verified_rows
from models.layers.base import KVCacheSpec
from models.layers.block_sparse import BlockSparseAttention
from models.layers.compressed import CompressedAttention
from models.layers.rotary import RotaryByLength
from models.loading.checkpoint import TransformersConfig
from models.lora.adapters import capture_obstacle
from models.ops import triton

_log = logging.getLogger(__name__)


def capture_sizes(wanted: Sequence[int], max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, at most `max_num_seqs`: those of `wanted`, or 1, 2, 4, 8 and multiples of 16 to 512."""
    if not wanted:
        wanted = [1, 2, 4, 8, *range(16, min(max_num_seqs, 512) + 16, 16)]
    return sorted({min(size, max_num_seqs) for size in wanted})


class DecodeGraphs:
    """`GraphRunner`s of plain decodes, of rows that verify each number of drafts, and, in pieces, of other steps."""

    def __init__(
        self,
        plain: GraphRunner,
        of_drafts: Sequence[GraphRunner] = (),
        max_tokens: int = 0,
        pieces: PieceRunner | None = None,
        drafting: Sequence[GraphRunner] = (),
    ) -> None:
        """`of_drafts`: graphs for rows of one token and the drafts verified with it, longest rows first.

        `max_tokens`: the most tokens of a step. `drafting`: graphs of a drafter's passes, captured with the others.
        """
        self._drafting = drafting
        self._runners = {each.query_len: each for each in (plain, *of_drafts)}
        self._plain = plain
        self._pieces = pieces
        self.uniform_rows: UniformRows | None = None
        if of_drafts:
            self.uniform_rows = UniformRows(of_drafts[0].query_len, of_drafts[0].padding_slot, max_tokens)
        """The common length of rows in steps that verify drafts; None where no step verifies drafts."""

    @property
    def captured_sizes(self) -> list[int]:
        """Batch sizes of plain decodes that are replayed, smallest first."""
        return self._plain.captured_sizes

    def size_for(self, inputs: StepInputs) -> int:
        """Rows of the graph that replays a step; 0 where the step runs eagerly."""
        runner = self._runners.get(inputs.query_len)
        return 0 if runner is None else runner.size_for(inputs)

    def size_of(self, num_rows: int) -> int:
        """Rows of the graph that replays a plain decode of `num_rows` rows; 0 if none is captured yet."""
        return self._plain.size_of(num_rows)

    def pad(self, inputs: StepInputs, size: int) -> StepInputs:
        """A step padded to a graph of `size` rows; with size 0, the step unchanged."""
        return self._runners[inputs.query_len].pad(inputs, size) if size else inputs

    def run(self, step: DeviceInputs, num_tokens: int) -> torch.Tensor:
        """Replay a padded step; `num_tokens` excludes the padding. # -> [num_tokens, H]

        The next replay overwrites the returned tensor.
        """
        return self._runners[step.metadata.query_len].run(step, num_tokens)

    def run_in_pieces(self, step: DeviceInputs, num_tokens: int) -> torch.Tensor | None:
        """Run a step of any rows by the graphs of `PieceRunner`; None where none was captured for `num_tokens`.

        The forward context must be the step's, without adapters. The next replay overwrites the returned tensor.
        # -> [num_tokens, H]
        """
        if self._pieces is None or not self._pieces.size_of(num_tokens):
            return None
        return self._pieces.run(step, num_tokens)

    def count_step(self) -> None:
        """Count a step and capture one more size every few steps, sizes of plain decodes first."""
        self._unfinished.count_step()
        self._settle()

    def capture_next(self) -> bool:
        """Capture the next size; returns whether more remain. If a capture fails, steps of that size run eagerly."""
        self._unfinished.capture_next()
        self._settle()
        return self._unfinished.has_pending

    def _settle(self) -> None:
        """Abandon all sizes if every capture of a plain decode failed or computed a wrong result."""
        if not self._plain.has_pending and not self._plain.captured_sizes:
            for runner in self._all:
                runner.give_up()

    def capture_all(self) -> None:
        """Capture all sizes, in the same order on all ranks: the captured collectives must match."""
        start = time.perf_counter()
        while self._unfinished.has_pending:
            self.capture_next()
        _log.info("Graphs were captured in %.1f s", time.perf_counter() - start)

    @property
    def _unfinished(self) -> GraphRunner:
        """The first runner that has sizes to capture, or the last one."""
        return next((runner for runner in self._all if runner.has_pending), self._all[-1])

    @property
    def _all(self) -> list[GraphRunner]:
        return [*self._runners.values(), *([] if self._pieces is None else [self._pieces]), *self._drafting]


def why_no_graphs(loaded: LoadedModel) -> str | None:
    """The reason why decodes run eagerly, or "" where it needs no explanation; None where they are captured."""
    config, parallel = loaded.config, loaded.parallel
    if not loaded.seam.has_graphs or config.compilation_config.enforce_eager:
        return ""
    modules = list(cast(nn.Module, loaded.model).modules())
    if any(isinstance(module, RotaryByLength) for module in modules):
        return (
            "transformers computes rotary positions by lengths that it reads on the host; set max_model_len to "
            "the original context"
        )
    if isinstance(loaded.model_config, TransformersConfig) and not all(
        isinstance(spec, KVCacheSpec) for spec in loaded.model.kv_cache_layers()
    ):
        return "transformers computes recurrent states and selected keys by lengths that Kaon reads on the host"
    is_selective = any(isinstance(module, BlockSparseAttention | CompressedAttention) for module in modules)
    if is_selective and not triton.takes("attention"):
        return "torch computes block-sparse and compressed attention, from lengths that it reads on the host"
    if parallel.token_exchange is not None and config.compilation_config.capture != "start":
        return "replicas that exchange tokens capture graphs together, at the start; set capture to start"
    if parallel.token_exchange is None and parallel.experts is not None and parallel.experts.exchange is not None:
        return "a graph captures no exchange between replicas on a CPU"
    if not parallel.is_captured:
        return "a graph captures no exchange between ranks on a CPU"
    return capture_obstacle(loaded.model) if config.lora else None


def make_graphs(
    loaded: LoadedModel,
    caches: LayerCaches,
    *,
    padding_block: int,
    padding_slot: int,
    observing: Observing = not_observed,
    passes: DraftPasses | None = None,
) -> DecodeGraphs:
    """Graphs of a model whose caches have a padding block and a padding slot.

    `observing`: a context for passes of plain decodes, in which the sentinel copies what they compute. `passes`: the
    drafter's passes, which replay the drafter's graphs.
    """
    config, parallel, device = loaded.config, loaded.parallel, loaded.seam
    backend, model, stream_layers = loaded.backend, loaded.model, loaded.stream_layers
    shape = GraphShape(
        block_size=config.kv_cache_block_size,
        max_blocks=-(-loaded.max_model_len // config.kv_cache_block_size),
        padding_block=padding_block,
        padding_slot=padding_slot,
        has_adapters=bool(config.lora),
        states_per_slot=caches.states_per_slot if caches.have_states else 0,
    )
    sizes = capture_sizes(config.compilation_config.cudagraph_capture_sizes, config.max_num_seqs)
    memory = GraphMemory(device.memory)
    largest_first = config.compilation_config.capture == "start"
    plain = GraphRunner(
        device,
        backend,
        model,
        sizes,
        shape,
        parallel,
        memory,
        largest_first=largest_first,
        observing=observing,
        stream_layers=stream_layers,
    )
    if parallel.token_exchange is not None:
        # Replicas agree on numbers of tokens only, so each would pad rows that verify drafts, or prompts, differently.
        return DecodeGraphs(plain)
    pieces = None
    most = min(config.compilation_config.piecewise_capture_tokens, config.max_num_batched_tokens)
    if most and device.has_pieces:
        if config.compilation_config.compilation_level:
            _log.info("Steps with prompts run eagerly: layers that torch compiles are not cut into graphs")
        elif stream_layers:
            _log.info("Steps with prompts run eagerly: the model that drafts reads streams within the model")
        else:
            # Steps with prompts that use adapters run eagerly.
            of_pieces = dataclasses.replace(shape, has_adapters=False)
            pieces = PieceRunner(device, backend, model, most, of_pieces, parallel, memory)
    of_drafts = []
    sizes_of = {1: sizes}
    for num_drafts in range(config.num_drafts, 0, -1):
        most = max_verified_rows(config.max_num_seqs, num_drafts)
        of_length = dataclasses.replace(shape, query_len=1 + num_drafts)
        fitting = sizes_of[1 + num_drafts] = sorted({min(size, most) for size in sizes})
        of_drafts.append(
            GraphRunner(
                device,
                backend,
                model,
                fitting,
                of_length,
                parallel,
                memory,
                largest_first=largest_first,
                stream_layers=stream_layers,
            )
        )
    drafting: list[DraftGraphRunner] = []
    if passes is not None:
        of_drafter = dataclasses.replace(shape, states_per_slot=0, has_adapters=False)
        drafting = passes.make_graphs(device, backend, sizes_of, of_drafter, memory, largest_first=largest_first)
    return DecodeGraphs(plain, of_drafts, config.max_num_batched_tokens, pieces, drafting)
