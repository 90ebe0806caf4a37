"""Captured graphs of steps: `make_graphs` decides which are captured, `DecodeGraphs` chooses a graph for each step.

`PieceRunner` captures a pass with prompts except the operators that read the step's rows:

    graph 0 -> attention of layer 0 -> graph 1 -> attention of layer 1 -> ... -> graph L

A short prompt's pass is bound by the host, which launches hundreds of kernels. For several numbers of tokens, each
layer is captured as one graph, and its attention or recurrence is launched eagerly for the step's own rows. Each graph
writes the inputs of the next eager call to buffers that all layers share, and reads the result of the previous call
from another buffer. Rows of the buffers beyond the step's tokens hold stale data, and their results are not used.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import nn

from engine.runner.device import Device, Graph
from engine.runner.device_batch import DeviceInputs
from engine.runner.draft_passes import DraftPasses
from engine.runner.graphs import GraphMemory, GraphRunner, GraphShape, Observing, not_observed
from engine.runner.input_batch import StepInputs, UniformRows
from engine.runner.kv_cache import LayerCaches
from engine.runner.loaded_model import LoadedModel
from engine.speculative.drafts import max_verified_rows
from models.attention.backend import NO_SLOT, AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.context import Between, Context, OfTokens, forward_context
from models.layers.base import KVCacheSpec
from models.layers.block_sparse import BlockSparseAttention
from models.layers.compressed import CompressedAttention
from models.layers.rotary import RotaryByLength
from models.loading.checkpoint import TransformersConfig
from models.lora.adapters import capture_obstacle
from models.ops import triton
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_log = logging.getLogger(__name__)

_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of tokens to capture below the configured limit, which is captured as well."""


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
        pieces: "PieceRunner | None" = None,
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
    if not loaded.device_api.has_graphs or config.compilation_config.enforce_eager:
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
    config, parallel, device = loaded.config, loaded.parallel, loaded.device_api
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

    def runner(sizes: Sequence[int], shape: GraphShape, observing: Observing = not_observed) -> GraphRunner:
        return GraphRunner(
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

    plain = runner(sizes, shape, observing)
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
        of_drafts.append(runner(fitting, of_length))
    drafting: Sequence[GraphRunner] = ()
    if passes is not None:
        of_drafter = dataclasses.replace(shape, states_per_slot=0, has_adapters=False)
        drafting = passes.make_graphs(device, backend, sizes_of, of_drafter, memory, largest_first=largest_first)
    return DecodeGraphs(plain, of_drafts, config.max_num_batched_tokens, pieces, drafting)


class _Call(NamedTuple):
    """An eager call between two graphs."""

    call: OfTokens
    tokens: tuple[torch.Tensor | None, ...]  # [size, ...] each
    out: torch.Tensor  # [size, ...]

    def run(self, num_tokens: int) -> None:
        """Run the call on the step's tokens, without padding tokens."""
        tokens = [None if each is None else each[:num_tokens] for each in self.tokens]
        self.out[:num_tokens].copy_(self.call(*tokens))


class _NotInGraphs:
    """Replaces the metadata inside graphs and raises when it is read: a layer that reads metadata outside of
    `between_graphs`, as the code of transformers does, cannot be captured.
    """

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"a layer reads the step's {name} where graphs would keep that of the capture")


class _Pass(NamedTuple):
    """A captured pass."""

    graphs: Sequence[Graph]
    calls: Sequence[_Call]
    """The eager calls, one after each graph except the last."""
    size: int

    def run(self, num_tokens: int) -> None:
        """Replay the pass for a step of at most `size` tokens. The forward context must be the step's."""
        for graph, call in zip(self.graphs, self.calls, strict=False):
            graph.replay()
            call.run(num_tokens)
        self.graphs[-1].replay()

    def replay(self) -> None:
        """See `Graph`."""
        self.run(self.size)


class PieceRunner(GraphRunner):
    """The graphs of one model for fixed numbers of tokens, in any rows."""

    rows = "Steps with prompts of %d tokens"

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        max_tokens: int,
        shape: GraphShape,
        parallel: TensorParallel = SINGLE_RANK,
        memory: GraphMemory | None = None,
    ) -> None:
        """As `GraphRunner`, for steps of up to `max_tokens`. The first, largest capture allocates the buffers."""
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}
        self._outs: list[torch.Tensor] = []
        """The buffers of the calls between graphs, in the order of the pass. # each [max_tokens, ...]"""
        self._between: Between = self._note
        sizes = [size for size in _SIZES if size < max_tokens] + [max_tokens]
        super().__init__(device, backend, forward, sizes, shape, parallel, memory)

    def run(self, step: DeviceInputs, num_tokens: int) -> torch.Tensor:
        """See `GraphRunner`. The forward context must be the step's."""
        ids, positions = self._tokens
        torch._foreach_copy_([ids[:num_tokens], positions[:num_tokens]], [step.input_ids, step.positions])
        captured = self._captured[self.size_of(num_tokens)]
        assert isinstance(captured, _Pass)
        assert self._hidden is not None
        captured.run(num_tokens)
        return self._hidden[:num_tokens]

    @property
    def _longest(self) -> int:
        """The most tokens of a padding row, without the longest sequence's last block, which may be partial."""
        return max(1, (self._shape.max_blocks - 1) * self._shape.block_size)

    def _init_capture(self) -> None:
        """No initialisation, since attention is not captured."""

    def _log_captured(self) -> None:
        sizes = self.captured_sizes
        _log.info("Steps with prompts of up to %d tokens replay graphs, one of each part of a layer", sizes[-1])

    def _metadata_for(self, size: int) -> AttentionMetaData:
        """Metadata of padding tokens, in rows of the longest sequence's length."""
        shape, longest = self._shape, self._longest
        lengths = np.full(-(-size // longest), longest, dtype=np.int64)
        lengths[-1] = size - longest * (len(lengths) - 1)
        positions = np.arange(size) % longest
        # All block table entries are the padding block; keys at positions beyond one block are not stored.
        slots = np.where(positions < shape.block_size, self.padding_slot + positions, NO_SLOT)
        num_blocks = -(-int(lengths.max()) // shape.block_size)
        return self._backend.build_metadata(
            AttentionBatch(
                query_lens=lengths,
                seq_lens=lengths,
                block_tables=np.full((len(lengths), num_blocks), shape.padding_block, dtype=np.int32),
                slot_mapping=slots,
                num_decodes=0,
                states=np.full(len(lengths), shape.padding_state) if shape.states_per_slot else None,
            )
        )

    def _pass(self, size: int, metadata: AttentionMetaData) -> Callable[[], None]:
        input_ids, positions = (tokens[:size] for tokens in self._tokens)
        context = Context(positions=positions, is_prefill=True, batch_size=len(metadata.seq_lens))

        def run() -> None:
            with torch.inference_mode(), forward_context(metadata, context) as step:
                step.between = self._between
                if self._between != self._note:
                    step.attn_metadata = cast(AttentionMetaData, _NotInGraphs())
                hidden = self._forward(input_ids, positions)
                if self._hidden is None:
                    self._hidden = hidden.new_zeros(len(self._tokens[0]), hidden.shape[1])
                self._hidden[:size].copy_(hidden)

        return run

    def _note(
        self, call: OfTokens, tokens: tuple[torch.Tensor | None, ...], shared: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Run a call that no graph can hold during an eager pass, and allocate its buffers."""
        for number, each in enumerate(tokens):
            if each is not None:
                self._buffer(number, each)
        out = call(*tokens, *shared)
        self._outs.append(self._buffer("out", out))
        return out

    def _run_alone(self, size: int, run: Callable[[], None]) -> None:
        self._outs.clear()
        super()._run_alone(size, run)

    def _buffer(self, use: object, like: torch.Tensor) -> torch.Tensor:
        """The buffer that all layers share for one use and row shape. # [size, ...] -> [max_tokens, ...]"""
        key = use, like.shape[1:], like.stride(), like.dtype
        if key not in self._buffers:
            shape = len(self._tokens[0]), *like.shape[1:]
            buffer = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer.zero_()
        return self._buffers[key]

    def _record(self, size: int, run: Callable[[], None]) -> Graph:
        calls: list[_Call] = []

        def run_in_pieces(cut: Callable[[], None]) -> None:
            def between(
                call: OfTokens, tokens: tuple[torch.Tensor | None, ...], shared: tuple[torch.Tensor, ...]
            ) -> torch.Tensor:
                buffers = [
                    None if each is None else self._buffer(number, each)[:size] for number, each in enumerate(tokens)
                ]
                given = [each for each in tokens if each is not None]
                torch._foreach_copy_([each for each in buffers if each is not None], given)
                cut()
                out = self._outs[len(calls)][:size]
                calls.append(_Call(call, (*buffers, *shared), out))
                return out

            self._between = between
            try:
                run()
            finally:
                self._between = self._note

        return _Pass(self._device.capture_pieces(run_in_pieces), calls, size)

    def _replay(self, size: int, graph: Graph) -> None:
        metadata = self._metadata_for(size)
        positions = self._tokens[1][:size]
        context = Context(positions=positions, is_prefill=True, batch_size=len(metadata.seq_lens))
        with torch.inference_mode(), forward_context(metadata, context):
            graph.replay()

    def _write_padding_rows(self, size: int, length: int = 1, token: int = 1) -> None:
        """Fill the buffers with padding tokens; `length` has no effect."""
        ids, positions = self._tokens
        ids.fill_(token)
        torch.remainder(torch.arange(size, device=ids.device), self._longest, out=positions[:size])
