"""`DraftPasses`: runs a drafter's forward passes by the compiled operators, by captured graphs or by torch.

`DraftGraphs` replays a graph for rows with equal numbers of entries. A first pass has up to one entry for each token
that a step has verified, and a pass after it has one. Rows with fewer entries than the longest are padded at the front
with entries that were computed before. Those are stored in the padding block, and their outputs are not used.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.runner.device import Device, Uploads
from engine.runner.graphs import GraphMemory, GraphRunner, GraphShape
from engine.runner.input_batch import DraftSpan
from engine.runner.loaded_model import LoadedModel
from engine.speculative.drafts import max_sampled_tokens
from models.attention.backend import NO_ROWS, AttentionBackend, AttentionBatch, AttentionMetaData
from models.attention.context import Context, ForwardContext, LoRARows, forward_context
from models.layers.base import DraftLM
from models.ops.cpu.collectives import SharedMemoryCollectives
from models.ops.cpu.draft_chain import ChainHeads, DraftChain
from models.ops.cpu.program import NotRecordable, Program, record
from models.ops.cpu.runtime import Library
from models.ops.cpu.sampling import GreedyHead, SampledHead
from models.ops.cpu.structures import Sampling
from models.ops.memory import mapped_zeros, upload
from models.ops.types import LayerCache
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

_log = logging.getLogger(__name__)

Ints: TypeAlias = npt.NDArray[np.int64]


class DraftPasses:
    """A drafter's forward passes over its caches: recorded where the CPU's operators compute, else run by torch."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: DraftLM,
        caches: dict[str, LayerCache],
        operators: Library | None,
        target: tuple[Program, GreedyHead] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """`caches`: from `drafter_caches`. `operators` record the passes; None where torch runs them.

        `target`: the recorded pass and the head of the target, if it has both. `sampling`: the sampling parameters of
        all slots, if the operators may sample drafts.
        """
        self._loaded, self._model, self._caches = loaded, model, caches
        self.max_tokens = loaded.config.max_num_batched_tokens + loaded.config.max_num_seqs
        """The most entries of a pass: a step's tokens plus one sampled token per row."""
        self.backend = loaded.backend
        self.graphs: DraftGraphs | None = None
        """Graphs that replay passes over rows of few entries."""
        self._first: Program | None = None
        self._next: Program | None = None
        self.head: GreedyHead | None = None
        """Computes argmax tokens without storing logits."""
        self.chain: DraftChain | None = None
        """Computes several drafts of each row in one call."""
        self._num_logits_bytes = 0
        if operators is not None:
            self._record(operators, target, sampling)

    @property
    def are_recorded(self) -> bool:
        """Whether a pass is one call of the operators."""
        return self._first is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that recorded passes commit for the largest step."""
        programs = {id(each): each for each in (self._first, self._next) if each is not None}
        return sum(each.num_bytes for each in programs.values()) + self._num_logits_bytes

    def prepare(self, span: DraftSpan, counts: Ints, ends: Ints) -> AttentionMetaData:
        """Prepare a pass over the last `counts` entries before `ends` of each row."""
        num_rows = len(counts)
        return self.backend.build_metadata(
            AttentionBatch(
                query_lens=counts,
                seq_lens=ends,
                block_tables=span.block_tables,
                slot_mapping=span.slot_mapping,
                num_decodes=num_rows if len(span.token_ids) == num_rows else 0,
            )
        )

    def run(
        self,
        metadata: AttentionMetaData,
        span: DraftSpan,
        states: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        """Run a prepared pass. # states [T, features] -> [T, hidden_size]

        The result is valid until the next pass. `states` are the target's in a first pass, and else the drafter's.
        `tokens`: the entries' tokens on the device, where the host has not read them. # [T] int64
        """
        loaded = self._loaded
        program = self._first if is_first else self._next
        token_ids, positions = torch.from_numpy(span.token_ids), torch.from_numpy(span.positions)
        if program is not None and metadata.step is not None:
            output = program.run(token_ids, positions, metadata.step, states)
        else:
            if not loaded.device_api.is_host:
                token_ids, positions = upload([span.token_ids, span.positions], loaded.device)
            token_ids = token_ids if tokens is None else tokens
            if states is None:
                states = torch.empty(0, device=loaded.device)
            output = self._compute(metadata, token_ids, positions, states, is_first=is_first)
        if isinstance(loaded.parallel.collectives, SharedMemoryCollectives):
            loaded.parallel.collectives.check()
        return output

    def run_on_device(
        self,
        metadata: AttentionMetaData,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        """Run a pass over decodes whose arrays are on the device, by a graph where there is one. # [T] -> [T, H]

        `states` need not cover the padding rows of a graph. The other arguments are as in `run`.
        """
        runner = None
        if self.graphs is not None and metadata.num_decodes == len(metadata.seq_lens):
            runner = self.graphs.of_rows(metadata.num_decodes, metadata.query_len, is_first=is_first)
        if runner is not None:
            return runner.replay(metadata, token_ids, positions, states)
        if states is None:
            states = torch.empty(0, device=self._loaded.device)
        else:
            states = F.pad(states, (0, 0, 0, len(token_ids) - len(states)))
        return self._compute(metadata, token_ids, positions, states, is_first=is_first)

    def _compute(
        self,
        metadata: AttentionMetaData,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        """Run a pass by torch."""
        num_rows = len(metadata.seq_lens)
        is_prefill = len(token_ids) > num_rows * metadata.query_len
        context = Context(positions, is_prefill=is_prefill, batch_size=num_rows, is_draft=True)
        with forward_context(metadata, context, kv_cache_data=self._caches):
            output: torch.Tensor = self._model(
                token_ids, positions, self._model.combine(states) if is_first else states
            )
        return output

    def make_graphs(
        self,
        device: Device,
        backend: AttentionBackend,
        sizes: Mapping[int, Sequence[int]],
        shape: GraphShape,
        memory: GraphMemory,
        *,
        largest_first: bool,
    ) -> "list[DraftGraphRunner]":
        """Create the graphs that passes replay from now on. Returns their runners, which the caller has to capture.

        `sizes`: numbers of rows, by the number of entries per row. `backend`: used by the graphs and by eager passes.
        """
        model, loaded = self._model, self._loaded

        def runner(features: int, length: int, *, combines: bool) -> DraftGraphRunner:
            of_length = replace(shape, query_len=length)
            return DraftGraphRunner(
                device,
                backend,
                model,
                self._caches,
                features,
                loaded.dtype,
                sizes[length],
                of_length,
                loaded.parallel,
                memory,
                combines=combines,
                largest_first=largest_first,
            )

        features = len(model.hidden_layers) * loaded.hidden_size
        first = [runner(features, length, combines=True) for length in sorted(sizes)]
        following = first[0]
        if type(model).combine is not DraftLM.combine:
            following = runner(model.hidden_size, 1, combines=False)
        self.backend, self.graphs = backend, DraftGraphs(device, first, following)
        return self.graphs.runners

    def _record(
        self, operators: Library, target: tuple[Program, GreedyHead] | None, sampling: Sampling | None
    ) -> None:
        """Record the passes, where the drafter's code only calls operators."""
        loaded, model = self._loaded, self._model
        metadata = loaded.backend.build_metadata(NO_ROWS)
        if metadata.step is None:
            return

        def recorded(columns: int, *, is_first: bool) -> Program:
            def forward(
                input_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor | None = None
            ) -> torch.Tensor:
                context = Context(positions=positions, is_prefill=False, batch_size=0, is_draft=True)
                if states is None:
                    states = torch.empty(0)
                with forward_context(metadata, context, kv_cache_data=self._caches):
                    output: torch.Tensor = model(input_ids, positions, model.combine(states) if is_first else states)
                    return output

            return record(operators, forward, self.max_tokens, columns)

        try:
            self._first = self._next = recorded(len(model.hidden_layers) * loaded.hidden_size, is_first=True)
            if type(model).combine is not DraftLM.combine:
                self._next = recorded(model.hidden_size, is_first=False)
        except NotRecordable as reason:
            self._first = self._next = None
            _log.info("Drafts are computed operator by operator: %s", reason)
        if loaded.parallel.size == 1:
            max_rows = loaded.config.max_num_seqs
            self.head = GreedyHead.of(operators, model.compute_logits, model.hidden_size, max_rows)
        if self._first is not None and self._next is not None and self.head is not None:
            if model.hidden_layers != (-1,) or loaded.exchange is not None:
                target = None
            greedy = ChainHeads(self.head, None if target is None else target[1])
            self.chain = DraftChain(
                operators,
                self._first,
                self._next,
                greedy,
                self._sampled_heads(greedy, sampling),
                block_size=loaded.config.kv_cache_block_size,
                max_len=loaded.max_model_len,
                target=None if target is None else target[0],
                sampling=sampling,
            )

    def _sampled_heads(
        self, greedy: ChainHeads[GreedyHead], sampling: Sampling | None
    ) -> ChainHeads[SampledHead] | None:
        """Heads for argmax and for sampling that share the weights and the memory of the logits."""
        config = self._loaded.config
        if config.drafts_by_rejection:
            return None
        most_rows = max_sampled_tokens(config.max_num_seqs)
        num_logits = most_rows * max(head.vocab_size for head in greedy if head is not None)
        self._num_logits_bytes = num_logits * torch.float32.itemsize
        if sampling is None:
            return None
        logits = torch.frombuffer(mapped_zeros(self._num_logits_bytes), dtype=torch.float32)
        target = greedy.target
        return ChainHeads(
            SampledHead(greedy.drafter, logits, sampling),
            SampledHead(target, logits, sampling) if target is not None else None,
        )


class DraftGraphRunner(GraphRunner):
    """Graphs of a drafter's pass over rows of one number of entries."""

    rows: ClassVar[str] = "Drafting passes of %d rows"

    def __init__(
        self,
        device: Device,
        backend: AttentionBackend,
        model: DraftLM,
        caches: dict[str, LayerCache],
        features: int,
        dtype: torch.dtype,
        sizes: Sequence[int],
        shape: GraphShape,
        parallel: TensorParallel = SINGLE_RANK,
        memory: GraphMemory | None = None,
        *,
        combines: bool,
        largest_first: bool = True,
    ) -> None:
        """`features`: size of the hidden states that a pass reads, 0 if it reads none. `combines`: whether these
        states are the target's, which `DraftLM.combine` takes. `caches` are the drafter's.
        """
        self._model, self._caches, self._combines = model, caches, combines
        num_entries = max(sizes) * shape.query_len
        self._states = torch.zeros(num_entries, features, dtype=dtype, device=device.torch_device)
        super().__init__(device, backend, self._compute, sizes, shape, parallel, memory, largest_first=largest_first)

    def draft(
        self,
        span: DraftSpan,
        ends: Ints,
        states: torch.Tensor | None,
        rows: Ints,
        uploads: Uploads,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The drafter's output for the last entry of each row, which ends at `ends`. # [B] -> [B, hidden_size]

        `span` has `query_len` entries of each row; `rows` is the row of `states` of each entry. # [T]
        `tokens`: the entries' tokens on the device, if the host has not read them. # [T] int64
        The next replay overwrites the returned tensor.
        """
        num_rows, length, shape = len(ends), self.query_len, self._shape
        size = self.size_of(num_rows)
        missing = size - num_rows
        tables = np.full((size, span.block_tables.shape[1]), shape.padding_block, dtype=np.int32)
        tables[:num_rows] = span.block_tables
        upload = uploads.begin()
        ids, positions, index = upload.add([span.token_ids, span.positions, rows])
        metadata = self._backend.build_metadata(
            AttentionBatch(
                query_lens=np.full(size, length, dtype=np.int64),
                seq_lens=np.concatenate((ends, np.full(missing, length, dtype=np.int64))),
                block_tables=tables,
                slot_mapping=np.concatenate((span.slot_mapping, np.full(missing * length, self.padding_slot))),
                num_decodes=size,
                query_len=length,
            ),
            send=upload.add,
        )
        upload.go()
        states = None if states is None else states[index]
        output = self.replay(metadata, ids if tokens is None else tokens, positions, states)
        return output[: len(rows)].view(num_rows, length, -1)[:, -1]

    def replay(
        self, metadata: AttentionMetaData, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor | None
    ) -> torch.Tensor:
        """The drafter's output for all entries of some rows. # [T], [T], [T, features] -> [T, hidden_size]

        The next replay overwrites the returned tensor.
        """
        num_entries, size = len(ids), self.size_of(len(ids) // self.query_len)
        torch._foreach_copy_([each[:num_entries] for each in self._tokens], [ids, positions])
        for each in self._tokens:
            each[num_entries : size * self.query_len].zero_()
        if states is not None:
            self._states[: len(states)].copy_(states)
        self._backend.prepare_for_replay(metadata, size)
        self._captured[size].replay()
        assert self._hidden is not None
        return self._hidden[:num_entries]

    def _log_captured(self) -> None:
        sizes = self.captured_sizes
        _log.info(
            "Drafting passes of %d entries a row replay %d graphs, of %d to %d rows",
            self.query_len,
            len(sizes),
            sizes[0],
            sizes[-1],
        )

    def _compute(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states = self._states[: len(input_ids)]
        output: torch.Tensor = self._model(
            input_ids, positions, self._model.combine(states) if self._combines else states
        )
        return output

    def _step(
        self, metadata: AttentionMetaData, context: Context, lora: LoRARows | None
    ) -> AbstractContextManager[ForwardContext]:
        return forward_context(metadata, replace(context, is_draft=True), lora=lora, kv_cache_data=self._caches)

    def _write_padding_rows(self, size: int, length: int = 1, token: int = 1) -> None:
        super()._write_padding_rows(size, length, token)
        self._states.fill_(0.1 * token)


class DraftGraphs:
    """The graphs of a drafter's first passes, by entries per row, and of its following passes of one entry."""

    def __init__(self, device: Device, first: Sequence[DraftGraphRunner], following: DraftGraphRunner) -> None:
        self._uploads = Uploads(device)
        self._first = {runner.query_len: runner for runner in first}
        self._following = following

    @property
    def runners(self) -> list[DraftGraphRunner]:
        """All runners without duplicates, in the order in which they are captured."""
        return list(dict.fromkeys((*self._first.values(), self._following)))

    def runner_for(self, ends: Ints, length: int, *, is_first: bool) -> DraftGraphRunner | None:
        """The graphs for a pass over at most `length` entries of each row before `ends`; None to run eagerly. # [B]"""
        return None if int(ends.min()) < length else self.of_rows(len(ends), length, is_first=is_first)

    def of_rows(self, num_rows: int, length: int, *, is_first: bool) -> DraftGraphRunner | None:
        """The graphs for a pass over `length` entries of each row; None to run eagerly."""
        runner = self._first.get(length) if is_first else self._following
        return runner if runner is not None and runner.size_of(num_rows) else None

    def draft(
        self,
        runner: DraftGraphRunner,
        span: DraftSpan,
        begins: Ints,
        ends: Ints,
        states: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The drafter's output for the last entry of each row's `[begins, ends)`. # [B] -> [B, hidden_size]

        `span` has `runner.query_len` entries of each row up to `ends`, and `states` those from `begins` on. `tokens`:
        those of one entry of each row, on the device, if the host has not read them. # [B] int64
        """
        length, counts = runner.query_len, ends - begins
        slot_mapping, rows = span.slot_mapping, np.arange(len(span.token_ids))
        if (counts < length).any():
            # Each row's last entry comes last; padding entries at the front may read any state.
            rows = np.repeat(np.cumsum(counts) - length, length) + np.tile(np.arange(length), len(counts))
            is_padding = np.tile(np.arange(length), len(counts)) < np.repeat(length - counts, length)
            rows[is_padding] = 0
            slot_mapping = np.where(is_padding, runner.padding_slot, slot_mapping)
        return runner.draft(span._replace(slot_mapping=slot_mapping), ends, states, rows, self._uploads, tokens)
