"""Graphs of steps with prompts: `PieceRunner` captures a pass except the operators that read the step's rows.

    graph 0 -> attention of layer 0 -> graph 1 -> attention of layer 1 -> ... -> graph L

A short prompt's pass is bound by the host, which launches hundreds of kernels. For several numbers of tokens, each
layer is captured as one graph, and its attention or recurrence is launched eagerly for the step's own rows. Each graph
writes the inputs of the next eager call to buffers that all layers share, and reads the result of the previous call
from another buffer. Rows of the buffers beyond the step's tokens hold stale data, and their results are not used.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from engine.runner.device import Device, Graph
from engine.runner.device_batch import DeviceInputs
from engine.runner.graphs import GraphMemory, GraphRunner, GraphShape
from models.attention.backend import NO_SLOT, AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.context import Between, Context, OfTokens, forward_context
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_log = logging.getLogger(__name__)

_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of tokens to capture below the configured limit, which is captured as well."""


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
