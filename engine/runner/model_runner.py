"""`ModelRunner`: runs one rank's model step by step, with its KV cache and the rows of the running sequences.

A runner is complete once constructed; `engine.runner.start` has the phases before. The engine core calls `forward`, or
`launch` to schedule asynchronously; each step goes through `prepare_model`, `run_model` and sampling. Of several
ranks, rank 0 schedules and samples, and sends each step to the others, which call `follow`. They reduce their shards'
argmax tokens where all rows are greedy, so that no logits are sent. The steps of the start, which measure memory and
warm up, are run by each rank without messages, in the same order.

The order of this file: construction, the start, steps, their three phases, the model's pass, several ranks,
preparation between steps, adapters, and operators that are replaced. `OutputHead` computes logits and argmax tokens
from a pass's hidden states, and `StepDrafts` drafts after a step.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput, StepOutOfMemory
from engine.distributed.rank_steps import RankStepError, RankSteps, StepMessage, rank_batch
from engine.messages import PoolingParams
from engine.runner.device import DeviceMemory, oom_in_step
from engine.runner.device_batch import AttentionTarget, DeviceBatch, DeviceBlockTables, DeviceInputs
from engine.runner.drafting import DeviceDrafts
from engine.runner.input_batch import InputBatch, StepInputs, StepRows
from engine.runner.kernel_checks import leave_to_torch
from engine.runner.kv_cache import PageCommitter
from engine.runner.loaded_model import LoadedModel
from engine.runner.memory_sizing import CPU_BYTES_AT_FIRST
from engine.runner.output_head import OutputHead
from engine.runner.pooling import PooledVectors, PromptPooler, encoder_prompts
from engine.runner.sentinel import Sentinel, sentinel_interval
from engine.runner.step_drafts import Drafted, StepDrafts
from engine.runner.step_graphs import DecodeGraphs, make_graphs, why_no_graphs
from engine.runner.step_results import (
    LaunchedStep,
    StepCompletion,
    StepResult,
    accepted_tokens,
    mark_unusable,
    output_of,
)
from engine.runner.warm_up import StepSizes, WarmUpRow, WarmUpStep, compile_kernels, dummy_batch, dummy_prompt
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens, SampledTokens, Sampler
from engine.sampling.verification import NO_TOKEN
from models.attention.context import Context, forward_context, get_forward_context, set_kv_cache_data
from models.config.rope import RopeContext
from models.lora.adapters import Adapter, attach, capture_obstacle, detach, group_by_adapter
from models.ops import aiter, triton
from models.ops.cpu.collectives import SharedMemoryCollectives
from models.ops.cpu.program import NotRecordable, Program

_log = logging.getLogger(__name__)


_MOST_INTERPOSED_TOKENS = 512
"""The most tokens of a step that is computed while another step is paused; bounds the memory of its pass."""


class ModelRunner:
    """The model, its KV cache, and the rows of the running sequences on one device."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, num_slots: int | None = None) -> None:
        """Allocate a KV cache of `num_blocks`, and register it with the forward context.

        `num_slots`: the most running sequences; None for `max_num_seqs`. Raises `ValueError` if the allocation fails.
        """
        config = loaded.config
        self.loaded = loaded
        self.config, self.model_config, self.model = config, loaded.model_config, loaded.model
        self.parallel, self.device, self.dtype = loaded.parallel, loaded.device, loaded.dtype
        self.backend = loaded.backend
        self.tokens_across_dp: tuple[int, ...] = ()
        """The number of tokens of each replica in the next step, where replicas run in lockstep."""
        self.may_replay = False
        """Whether the next step of all replicas in lockstep is a decode that their graphs may replay together."""
        self.ranks: RankSteps | None = None
        """On rank 0, the link that sends each step to the other ranks, once they have started."""
        self._followed: dict[int, tuple[StepInputs, list[int] | None]] = {}
        """On other ranks, the steps by number whose tokens rank 0 has not sent yet; see `_store_followed`."""
        self._chooses_by_shard = False
        """Whether the ranks reduce their argmax tokens in the running step, instead of gathering logits."""
        self._last_step_seconds = 0.0

        self.num_slots = config.max_num_seqs if num_slots is None else num_slots
        # A cache of one block belongs to the step that measures memory.
        is_serving = num_blocks > 1
        # Graphs replay decodes, so a model that generates nothing has none, which needs no log line.
        why_eager = why_no_graphs(loaded) if loaded.generates else ""
        has_graphs = why_eager is None and is_serving
        self.padding_block = num_blocks if has_graphs or loaded.exchange is not None else None
        """A block of the cache that no sequence uses: dummy and padding rows write there."""
        self.caches = loaded.layer_caches()
        kv_cache_data = self.caches.allocate(
            num_blocks + (self.padding_block is not None), self.num_slots + has_graphs
        )
        set_kv_cache_data(kv_cache_data)
        pools = self.caches.pools if loaded.device_api.is_host else ()
        self.page_committer = PageCommitter(pools, torch.get_num_threads())
        self.input_batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size=config.kv_cache_block_size,
            vocab_size=self.model_config.vocab_size,
            seed=config.seed,
            device_has_tables=self.backend.reads_tables_on_device,
            num_lookahead_tokens=config.num_drafts + 2 if loaded.drafter is not None else 0,
            states_per_slot=self.caches.states_per_slot if self.caches.have_states else 0,
        )
        self.device_batch = DeviceBatch(loaded.device_api, config.max_num_seqs)
        self._drafts_on_device = False
        """Whether the ranks draft after the running step before the host has read it."""
        self.tables: DeviceBlockTables | None = None
        """Block tables on the device, where the attention backend reads them there."""
        if self.backend.reads_tables_on_device:
            self.tables = DeviceBlockTables(self.num_slots, self.input_batch.max_blocks, num_blocks, self.device)
        self.sentinel: Sentinel | None = None
        """Compares samples of the served results with torch."""
        interval = sentinel_interval(config, self.device)
        if interval and is_serving and loaded.generates and not loaded.compilation_level:
            self.sentinel = Sentinel(self.model, self.backend, self.parallel, self.device_batch, interval)
        self._is_dummy_run = False
        self._on_pause: Callable[[], object] | None = None
        """Called when the running step is interrupted; None where it cannot be."""
        self._is_interrupted, self._interrupting = False, threading.Lock()
        """Whether the step was interrupted since its last pause, and a lock under which this and the operators' flag
        change together."""
        self._num_blocks = num_blocks
        self.program: Program | None = None
        """The model's pass as one call; None where it runs operator by operator."""
        operators = loaded.operators if is_serving and not loaded.is_encoder else None
        if operators is not None:
            try:
                self.program = loaded.record_pass()
            except NotRecordable as reason:
                self.loaded = dataclasses.replace(loaded, why_unrecorded=str(reason))
                _log.info("Steps run operator by operator, and answers may depend on other requests: %s", reason)
        self.head = OutputHead(loaded, operators)
        self._interposed_program: Program | None = None
        """The pass with separate memory, for steps that are computed while another is paused; recorded while idle."""
        self._stream_layers = loaded.stream_layers
        self._graphs_take_adapters = bool(config.lora)
        """Whether graphs compute LoRA adapters: those that were loaded at the start, and no others."""
        self.sampler = Sampler()
        self.drafts: StepDrafts | None = None
        """The drafter and its part of each step, where a model drafts."""
        if loaded.drafter is not None:
            target = None
            if self.program is not None and self.head.greedy is not None:
                target = self.program, self.head.greedy
            self.drafts = StepDrafts(
                loaded,
                loaded.drafter,
                kv_cache_data,
                self.input_batch,
                self.sampler,
                operators,
                target,
                self.page_committer,
            )
        self.graphs: DecodeGraphs | None = None
        """Graphs that replay decode steps."""
        if has_graphs:
            self.graphs = self._make_graphs()
        elif why_eager and is_serving:
            _log.info("Decodes run eagerly: %s", why_eager)
        self.pooler: PromptPooler | None = None
        """Pools prompts, on rank 0 of a model that pools."""
        if loaded.pooling is not None and loaded.pooling_head is not None:
            self.pooler = PromptPooler(loaded.pooling, loaded.pooling_head, self.dtype)
        self._dummy: tuple[Context, DeviceInputs] | None = None
        """The step of `dummy_prefill`, prepared once, since other replicas wait for that pass."""
        if self.padding_block is not None and self.parallel.size == 1 and loaded.exchange is not None:
            self._dummy = dummy_prompt(
                self.backend,
                self.padding_block,
                config.kv_cache_block_size,
                self.device,
                have_states=self.caches.have_states,
            )

    def _make_graphs(self) -> DecodeGraphs:
        observed = {} if self.sentinel is None else {"observing": self.sentinel.of_graph}
        return make_graphs(
            self.loaded,
            self.caches,
            padding_block=self._num_blocks,
            padding_slot=self.num_slots,
            passes=None if self.drafts is None else self.drafts.passes,
            **observed,
        )

    @property
    def generates(self) -> bool:
        """Whether the model generates tokens; otherwise it only pools prompts."""
        return self.loaded.generates

    @property
    def max_interposed_tokens(self) -> int:
        """The most tokens of a step that is computed while another is paused; 0 if none may be."""
        is_plain = self.parallel.is_alone and self.loaded.exchange is None and not self.loaded.stream_layers
        if self.program is None or not is_plain:
            return 0
        return min(_MOST_INTERPOSED_TOKENS, self.program.max_tokens)

    @property
    def max_rounds(self) -> int:
        """The most rounds in which a step verifies drafts."""
        return 1 if self.drafts is None else self.drafts.drafter.max_rounds

    @property
    def rope(self) -> RopeContext | None:
        """How a sequence's rotary frequencies depend on its length; None if they do not."""
        return self.model_config.rope_context(self.config.max_model_len or self.model_config.max_model_len)

    @property
    def window(self) -> int | None:
        """Number of tokens that a query attends to, its own included; None if it attends to all before it."""
        return self.caches.window

    @property
    def blocks_at_first(self) -> int | None:
        """Number of blocks that are allocated before cached blocks are evicted; None for all blocks."""
        if self.device.type != "cpu" or self.caches.block_bytes == 0:
            return None
        return -(-CPU_BYTES_AT_FIRST // (self.loaded.num_local_ranks * self.caches.block_bytes))

    @property
    def step_sizes(self) -> StepSizes:
        """The limits of a step's size."""
        config = self.config
        return StepSizes(config.max_num_batched_tokens, self.num_slots, self.loaded.max_model_len, config.num_drafts)

    # -- the start, and dummy steps -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run a prefill of one token, so that torch's lazy initialisation happens before the first request; on a GPU,
        also the steps with which Triton compiles the kernels that requests will need."""
        self.run_dummy_step(WarmUpStep([WarmUpRow(1, 1)]))
        if self.loaded.compilation_level:
            # Code that torch compiles for one token cannot run other numbers of tokens.
            self.run_dummy_step(WarmUpStep([WarmUpRow(2, 2)]))
        if triton.active():
            compile_kernels(self.step_sizes, self.run_dummy_step, self.parallel)
        if self.sentinel is not None:
            with self.parallel.without_collectives():
                self.sentinel.rehearse(lambda: self.run_dummy_step(WarmUpStep([WarmUpRow(2, 1)], 1)))
        self.sampler.warm_up(self.model_config.vocab_size, self.device)
        self.page_committer.commit_initial()

    def capture_at_start(self) -> None:
        """Capture all graphs, unless the settings capture them between steps. All ranks call it after `warm_up`."""
        if self.graphs is not None and self.config.compilation_config.capture == "start":
            self.graphs.capture_all()

    def run_dummy_step(self, step: WarmUpStep) -> None:
        """Compute dummy sequences. All write to one block: the padding block, or the first, which a real sequence
        overwrites before it is read."""
        pooling = None if self.loaded.generates else PoolingParams()
        batch = dummy_batch(step, self.config.kv_cache_block_size, self.padding_block or 0, pooling)
        if self.drafts is not None:
            # The drafter's passes launch further kernels.
            batch.num_next_drafts = [self.config.num_drafts] * batch.total_seqs_num
        with self.loaded.compiling():
            self._compute(batch)

    def dummy_prefill(self) -> None:
        """Compute a dummy token while no sequence runs, since other replicas need this replica's experts."""
        if self.may_replay:
            self.run_dummy_step(WarmUpStep([WarmUpRow(1, 1)], 1))
            return
        if self._dummy is None:
            self.run_dummy_step(WarmUpStep([WarmUpRow(1, 1)]))
            return
        context, token = self._dummy
        metadata = self.loaded.dp_metadata(1, self.tokens_across_dp)
        with torch.inference_mode(), oom_in_step(), forward_context(token.metadata, context, metadata):
            self._hidden_states(token, 1, has_adapters=False)

    # -- steps --------------------------------------------------------------------------------------------------------

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Compute one step and sample a token for each row whose last known token it computes."""
        return self.forward_with_pauses(batch, None)

    def forward_with_pauses(
        self, batch: ScheduledBatch, on_pause: Callable[[], object] | None
    ) -> ScheduledBatchOutput:
        """As `forward`; after each `interrupt`, the recorded pass pauses between two operators for `on_pause`, and log
        probabilities of prompts between two slices."""
        # A pause is for messages, and none are due before the step: the outputs of the previous one have been sent.
        self.page_committer.commit_after_step(self._last_step_seconds)
        start = time.perf_counter()
        self._on_pause = on_pause
        try:
            with oom_in_step(), self._replacing_refused_operators():
                output = self._compute(batch)
        finally:
            self._on_pause = None
        self._last_step_seconds = time.perf_counter() - start
        self._count_step()
        return output

    def interrupt(self) -> None:
        """Pause the step that runs `forward_with_pauses`, or the next that does. Called in any thread."""
        assert self.loaded.operators is not None, "steps that pause are run by the operators"
        with self._interrupting:
            self._is_interrupted = True
            self.loaded.operators.interrupt()

    def withdraw_interruption(self) -> None:
        """Do not pause the next step for an `interrupt` after which no step has paused."""
        assert self.loaded.operators is not None, "steps that pause are run by the operators"
        with self._interrupting:
            self._is_interrupted = False
            self.loaded.operators.withdraw_interruption()

    def forward_interposed(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """As `forward`, for at most `max_interposed_tokens`, before or while a step with other rows is paused."""
        self._record_interposed()
        program, on_pause = self.program, self._on_pause
        self.program, self._on_pause = self._interposed_program, None
        try:
            with oom_in_step():
                return self._compute(batch)
        finally:
            self.program, self._on_pause = program, on_pause

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Enqueue a step on the device, and its sampling unless that needs tokens that are not read yet.

        At most two steps may be in flight: read, or wait for, a step before launching the second one after it.
        """
        self.page_committer.commit_after_step(self._last_step_seconds)
        start = time.perf_counter()
        with oom_in_step(), self._aborting_on_all_ranks(), self._replacing_refused_operators():
            with torch.inference_mode():
                inputs, on_device = self.prepare_model(batch, is_launched=True)
                result = self.run_model(inputs, on_device, batch.prompt_spans)
            self.input_batch.reserve_tokens(inputs)
            step = self._launched(batch, inputs, on_device, result)
            if inputs.sampling is not None and not step.drafts_on_device:
                step.launch_sampler(inputs.sampling)
        self._last_step_seconds = time.perf_counter() - start
        if self.sentinel is not None and not self.device_batch.device.is_host:
            self.sentinel.note_host_seconds(self._last_step_seconds)
        self._count_step()
        return step

    def can_replay(self, batch: ScheduledBatch) -> bool:
        """Whether a graph may replay a step, provided that all replicas in lockstep replay one."""
        is_plain = not (batch.total_seqs_num_prefill or batch.prompt_spans or batch.draft_tokens)
        is_captured = self._graphs_take_adapters or not any(seq.adapter for seq in batch.sequences)
        return self.graphs is not None and is_plain and is_captured

    def _compute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        # The operators need neither of the contexts, whose code takes as long as several rows.
        if self.drafts is not None and (verified := self.drafts.verify(batch)) is not None:
            return verified
        with torch.inference_mode(), self._aborting_on_all_ranks():
            inputs, on_device = self.prepare_model(batch)
            result = self.run_model(inputs, on_device, batch.prompt_spans)
            if self.parallel.rank:
                if self.drafts is not None:
                    self.drafts.draft(batch, inputs, None, result.drafted_from, by_shard=self._chooses_by_shard)
                return ScheduledBatchOutput({})
            output = self.postprocess(batch, inputs, result.logits, result.drafted_from)
            output.prompt_logprobs = result.prompt_logprobs
            if result.pooled is not None:
                result.pooled.add_to(output, batch.req_ids, result.pooled.values.cpu())
            return output

    def _launched(
        self, batch: ScheduledBatch, inputs: StepInputs, on_device: DeviceInputs, result: StepResult
    ) -> LaunchedStep:
        """The `LaunchedStep` of a step whose pass was launched."""
        drafted_from, drafts_on_device = result.drafted_from, self._drafts_on_device

        def sample(
            logits: torch.Tensor | LaunchedTokens, inputs: StepInputs, rows: SamplingRows
        ) -> tuple[LaunchedTokens, DeviceDrafts | None]:
            tokens = self.launch_sampler(logits, inputs, rows)
            if self.drafts is not None and drafts_on_device:
                by_shard = self._chooses_by_shard
                return tokens, self.drafts.draft_on_device(
                    batch, inputs, on_device, self.device_batch, tokens, drafted_from, by_shard=by_shard
                )
            self._store_tokens_on_device(batch, inputs, on_device.sampled_slots, tokens.token_ids, drafted_from)
            return tokens, None

        def finish(inputs: StepInputs, sampled: SampledTokens, drafts: DeviceDrafts | None) -> ScheduledBatchOutput:
            return self.finish(batch, inputs, sampled, drafted_from, device_drafts=drafts, is_launched=True)

        def add_vectors(output: ScheduledBatchOutput, pooled: PooledVectors, values: torch.Tensor) -> None:
            pooled.add_to(output, batch.req_ids, values)

        work = StepCompletion(self.input_batch.resolve, sample, finish, add_vectors)
        return LaunchedStep(inputs, result, self.device_batch, self.ranks, work, drafts_on_device=drafts_on_device)

    def _count_step(self) -> None:
        """Count a step for capturing graphs; with several ranks, `prepare_model` counts it."""
        if self.graphs is not None and self.parallel.is_alone:
            self.graphs.count_step()

    @contextmanager
    def _aborting_on_all_ranks(self) -> Iterator[None]:
        """Abort the step on the other ranks if it raises inside. Raises `RankStepError` if one of them raised."""
        if self.ranks is None:
            yield
            return
        last = self.ranks.number
        try:
            yield
        except BaseException as error:
            if self.ranks.number > last:
                self.ranks.abandon(self.ranks.number, error)
            raise

    # -- the three phases of a step -----------------------------------------------------------------------------------

    def prepare_model(self, batch: StepRows, *, is_launched: bool = False) -> tuple[StepInputs, DeviceInputs]:
        """Apply the batch to the stored rows, and build the step's arrays on the host and on the device.

        Rank 0 sends the step to the others as soon as the rows are known. `is_launched`: the next step may be launched
        before this one's tokens are read.
        """
        self.input_batch.apply(batch)
        self._is_dummy_run = is_dummy = isinstance(batch, ScheduledBatch) and batch.is_dummy_run
        if self.sentinel is not None and not is_dummy:
            for operator in sorted(self.sentinel.take_found()):
                self.leave_to_torch(operator)
        if isinstance(batch, ScheduledBatch):
            self._drafts_on_device = (
                is_launched and self.drafts is not None and self.drafts.drafter.can_draft_on_device(batch)
            )
            if self.ranks is not None:
                self._send_to_ranks(self.ranks, batch, is_launched=is_launched)
        if self.graphs is not None and not self.parallel.is_alone and not is_dummy:
            # All ranks count every step that rank 0 sends, failed ones too, and so capture graphs at the same step.
            self.graphs.count_step()
        inputs = self.input_batch.step_inputs(batch, None if self.graphs is None else self.graphs.uniform_rows)
        highest_block = int(inputs.slot_mapping.max()) // self.config.kv_cache_block_size
        if highest_block != self.padding_block:
            self.page_committer.use(highest_block)
        size = self._graph_size(batch, inputs)
        padded = inputs if self.graphs is None else self.graphs.pad(inputs, size)
        target = AttentionTarget(
            self.backend,
            self.tables,
            bool(self.config.lora),
            self.config.kv_cache_block_size,
            self.input_batch.states_per_slot,
        )
        return inputs, self.device_batch.assemble(padded, self.input_batch.table_changes, target, size)

    def _send_to_ranks(self, ranks: RankSteps, batch: ScheduledBatch, *, is_launched: bool) -> None:
        self._chooses_by_shard = self.input_batch.are_greedy(batch.slots)
        ranks.begin(
            batch,
            is_greedy=self._chooses_by_shard,
            tokens_across_dp=self.tokens_across_dp,
            may_replay=self.may_replay,
            is_deferred=is_launched and not self._drafts_when_read(batch),
            drafts_on_device=self._drafts_on_device,
        )

    def _drafts_when_read(self, batch: StepRows) -> bool:
        """Whether the drafter may draft after a launched step once its tokens are read."""
        if self.drafts is None or self._drafts_on_device:
            return False
        return bool(batch.draft_tokens) or any(batch.num_next_drafts)

    def _graph_size(self, batch: StepRows, inputs: StepInputs) -> int:
        """Number of rows of the graph that replays a step; 0 if none does."""
        if self.graphs is None:
            return 0
        if self.parallel.token_exchange is not None:
            return self.graphs.size_of(max(1, *self.tokens_across_dp)) if self.may_replay else 0
        is_captured = inputs.adapters is None or self._graphs_take_adapters
        return self.graphs.size_for(inputs) if is_captured and not batch.prompt_spans else 0

    def run_model(self, inputs: StepInputs, on_device: DeviceInputs, prompt_spans: list[PromptSpan]) -> StepResult:
        """Run the model's pass, and compute the logits, argmax tokens or pooled vectors from its hidden states."""
        num_rows = len(inputs.query_lens)
        context = Context(
            positions=on_device.positions,
            is_prefill=inputs.num_decodes < num_rows,
            batch_size=num_rows,
            graph_bs=on_device.graph_size,
            prompts=encoder_prompts(inputs, self.device) if self.loaded.is_encoder else None,
        )
        lora = None
        if inputs.adapters is not None and not on_device.graph_size:
            lora = group_by_adapter(inputs.adapters, inputs.query_lens, self.device)
        num_tokens, has_adapters = len(inputs.input_ids), inputs.adapters is not None
        dp_metadata = self.loaded.dp_metadata(num_tokens, self.tokens_across_dp)
        layers = self._stream_layers
        with forward_context(on_device.metadata, context, dp_metadata, lora=lora, stream_layers=layers) as step:
            sentinel = self._sentinel_of(inputs)
            with nullcontext() if sentinel is None else sentinel.observing(on_device.graph_size):
                hidden = self._hidden_states(on_device, num_tokens, has_adapters=has_adapters)  # [T, H]
            if sentinel is not None:
                sentinel.note_step(inputs, on_device.metadata)
            prompt_logprobs = None
            if prompt_spans:
                prompt_logprobs = self.head.prompt_logprobs(hidden, prompt_spans, self._pause_if_interrupted)
            pooled = None
            if inputs.pooled and self.pooler is not None:
                pooled = self.pooler.pool(hidden, inputs.pooled)
            drafted_from = None if self.drafts is None else self.drafts.states_of(hidden, step.streams)
            if len(on_device.last_tokens) < len(hidden):
                hidden = hidden[on_device.last_tokens]
            logits = self.head.logits_or_tokens(hidden, inputs, by_shard=self._chooses_by_shard)
            return StepResult(logits, prompt_logprobs, pooled, drafted_from)

    def _sentinel_of(self, inputs: StepInputs) -> Sentinel | None:
        """The sentinel, if it samples this step's results, else None."""
        if self.sentinel is None or inputs.bounds is not None:
            return None
        is_served = not self._is_dummy_run or self.sentinel.is_rehearsing
        return self.sentinel if is_served and self.sentinel.is_due(inputs) else None

    def postprocess(
        self,
        batch: ScheduledBatch,
        inputs: StepInputs,
        logits: torch.Tensor | LaunchedTokens,
        drafted_from: torch.Tensor | None = None,
    ) -> ScheduledBatchOutput:
        """Sample, wait for the tokens, and `finish` the step."""
        assert inputs.sampling is not None, "the tokens of all steps before have been read"
        sampled = self.launch_sampler(logits, inputs, inputs.sampling).read()
        return self.finish(batch, inputs, sampled, drafted_from)

    def launch_sampler(
        self, logits: torch.Tensor | LaunchedTokens, inputs: StepInputs, rows: SamplingRows
    ) -> LaunchedTokens:
        """Enqueue sampling, unless the model's head computed the tokens. # [S, V] float32, overwritten"""
        if isinstance(logits, LaunchedTokens):
            return logits
        proposals = None if self.drafts is None or self._is_dummy_run else self.drafts.drafter.proposals(inputs)
        if proposals is not None:
            rows = dataclasses.replace(rows, proposals=proposals)
        send = None if self.device_batch.device.is_host else self.device_batch.uploads.send
        return self.sampler.launch(logits, rows, send)

    def finish(
        self,
        batch: ScheduledBatch,
        inputs: StepInputs,
        sampled: SampledTokens,
        drafted_from: torch.Tensor | None = None,
        device_drafts: DeviceDrafts | None = None,
        *,
        is_launched: bool = False,
    ) -> ScheduledBatchOutput:
        """Store a step's tokens for the next step, draft after them, and return both by sequence.

        `drafted_from`: the hidden states that a drafter reads. # [T, features]
        `device_drafts`: drafts that were made before the step was read.
        """
        sampled = mark_unusable(sampled, inputs)
        if self.drafts is None:
            drafted = Drafted(self.input_batch.store_tokens(inputs, sampled.token_ids))
        else:
            drafted = self.drafts.finish(
                batch,
                inputs,
                sampled.token_ids,
                drafted_from,
                device_drafts,
                is_launched=is_launched,
                by_shard=self._chooses_by_shard,
            )
        if self.ranks is not None:
            self.ranks.end([] if drafted.is_shared else accepted_tokens(sampled.token_ids, drafted.accepted))
        output = output_of(batch, inputs, sampled, drafted.accepted, self.dtype)
        drafted.add_to(output, batch.req_ids)
        return output

    def _store_tokens_on_device(
        self,
        batch: StepRows,
        inputs: StepInputs,
        slots: torch.Tensor,
        token_ids: torch.Tensor | None,
        drafted_from: torch.Tensor | None,
    ) -> None:
        """Store rank 0's sampled tokens by slot on every rank's device, where the next step reads them.

        # [S], [S] int64; `token_ids`: on rank 0

        Stores nothing where drafts are made once the step is read, since the next step then has its tokens on the
        host.
        """
        if self._drafts_when_read(batch):
            return
        if self.drafts is not None:
            self.drafts.store_states(batch, inputs, drafted_from)
        if inputs.has_drafts or not len(slots):
            return
        last_tokens = self.device_batch.last_tokens
        token_ids = torch.empty_like(slots) if token_ids is None else token_ids.to(last_tokens.device)
        last_tokens.index_copy_(0, slots, self.parallel.broadcast(token_ids))

    # -- the model's pass ---------------------------------------------------------------------------------------------

    def _hidden_states(self, step: DeviceInputs, num_tokens: int, *, has_adapters: bool) -> torch.Tensor:
        """Final hidden states of the step's tokens, without padding. # [num_tokens, H]"""
        hidden = self._run_pass(step, num_tokens, has_adapters=has_adapters)
        if isinstance(self.parallel.collectives, SharedMemoryCollectives):
            self.parallel.collectives.check()
        return hidden

    def _run_pass(self, step: DeviceInputs, num_tokens: int, *, has_adapters: bool) -> torch.Tensor:
        if self.graphs is not None and step.graph_size:
            return self.graphs.run(step, num_tokens)
        is_observed = self.sentinel is not None and self.sentinel.is_observing
        if self.graphs is not None and not has_adapters and not is_observed:
            hidden = self.graphs.run_in_pieces(step, num_tokens)
            if hidden is not None:
                return hidden
        if self.program is None or has_adapters or is_observed or num_tokens > self.program.max_tokens:
            return self.model(step.input_ids, step.positions)
        operands = step.metadata.step
        assert operands is not None, "a recorded program runs where the CPU operators read the step"
        experts, exchange = self.parallel.experts, self.loaded.exchange
        dp_metadata = self.loaded.dp_metadata(num_tokens, self.tokens_across_dp)
        operands.is_dummy = bool(experts and dp_metadata and dp_metadata.is_dummy(experts.replica))
        if self._on_pause is None:
            hidden = self.program.run(step.input_ids, step.positions, operands)
        else:
            tokens = step.input_ids, step.positions
            hidden = self.program.run_with_pauses(*tokens, operands, self._pause_if_interrupted)
        if self._stream_layers:
            streams = zip(self._stream_layers, self.program.others(num_tokens), strict=True)
            get_forward_context().streams.update(streams)
        if exchange is not None:
            exchange.check()
        return hidden

    def _pause_if_interrupted(self) -> None:
        """Call `_on_pause` if the running step was interrupted since the last call."""
        if self._is_interrupted and self._on_pause is not None:
            self._is_interrupted = False
            self._on_pause()

    # -- several ranks ------------------------------------------------------------------------------------------------

    def lead(self, ranks: RankSteps) -> None:
        """Send each step from now on to the other ranks, which have started."""
        self.ranks = ranks

    def follow(self, message: StepMessage) -> None:
        """Compute this rank's part of a step that rank 0 sent."""
        self.page_committer.commit_after_step(self._last_step_seconds)
        for number, tokens in message.sampled:
            # Rank 0 never sends the tokens of earlier steps that failed.
            self._followed = {each: inputs for each, inputs in self._followed.items() if each >= number}
            followed = self._followed.pop(number, None)
            if followed is not None:
                self._store_followed(*followed, np.array(tokens, dtype=np.int64))
        batch = rank_batch(message, self.config.kv_cache_block_size)
        self._chooses_by_shard = message.is_greedy
        self.tokens_across_dp, self.may_replay = message.tokens_across_dp, message.may_replay
        self._drafts_on_device = message.drafts_on_device
        with torch.inference_mode(), self._replacing_refused_operators():
            inputs, on_device = self.prepare_model(batch)
            result = self.run_model(inputs, on_device, batch.prompt_spans)
            by_shard = self._chooses_by_shard
            if self.drafts is not None and not message.is_deferred:
                self.drafts.draft(batch, inputs, None, result.drafted_from, by_shard=by_shard)
                return
            self._followed[message.number] = inputs, message.num_next_drafts if message.drafts_on_device else None
            if not message.is_deferred:
                return
            self.input_batch.reserve_tokens(inputs)
            if self.drafts is not None and message.drafts_on_device:
                self.drafts.draft_on_device(
                    batch, inputs, on_device, self.device_batch, None, result.drafted_from, by_shard=by_shard
                )
            else:
                self._store_tokens_on_device(batch, inputs, on_device.sampled_slots, None, result.drafted_from)

    def _store_followed(self, inputs: StepInputs, drafted: list[int] | None, token_ids: npt.NDArray[np.int64]) -> None:
        """Store the tokens that rank 0 sampled in an earlier step, with `NO_TOKEN` at positions that were not
        accepted.

        `drafted`: number of drafts of each row made on the device; None where none were.
        """
        if inputs.bounds is not None:
            inputs = self.input_batch.resolve(inputs)
        self.input_batch.store_tokens(inputs, token_ids, np.flatnonzero(token_ids != NO_TOKEN))
        if self.drafts is not None and drafted is not None:
            self.drafts.drafter.settle(inputs, drafted)

    # -- between steps ------------------------------------------------------------------------------------------------

    def prepare_while_idle(self) -> bool:
        """Do one unit of preparation for later steps while the engine is idle. Returns whether more remains."""
        if self.sentinel is not None and self.sentinel.catch_up():
            return True
        # Other ranks receive no message between steps.
        if self.graphs is not None and self.parallel.is_alone and self.graphs.capture_next():
            return True
        return self._record_interposed() or self.page_committer.commit_idle()

    def _record_interposed(self) -> bool:
        """Record the pass of interposed steps, if steps may be interposed; False if it was recorded before."""
        if self._interposed_program is not None or not self.max_interposed_tokens:
            return False
        self._interposed_program = self.loaded.record_pass(num_tokens=self.max_interposed_tokens)
        return True

    def release_cache(self) -> None:
        """See `PageCommitter.release`. Has no effect on a GPU, whose cache is not in host memory."""
        self.page_committer.release()

    def device_memory(self) -> tuple[int, int]:
        """Bytes of a GPU's memory that this process holds, and the GPU's total; zeros on a CPU."""
        if self.device.type == "cpu":
            return 0, 0
        memory = DeviceMemory(self.device)
        return memory.held(), memory.total()

    def sentinel_counts(self) -> tuple[int, int]:
        """Numbers of comparisons of served results with torch, and of mismatches, since the start."""
        sentinel = self.sentinel
        return (0, 0) if sentinel is None else (sentinel.num_checks, len(sentinel.mismatches))

    # -- LoRA adapters ------------------------------------------------------------------------------------------------

    def read_adapter(self, path: str) -> Adapter:
        """Read an adapter's files, in any thread. Raises `ValueError` with one sentence for an invalid adapter."""
        if self.loaded.is_encoder:
            raise ValueError(f"{self.model_config.architecture} is an encoder, which takes no LoRA adapter")
        if self.loaded.compilation_level:
            raise ValueError(
                f"compilation_level is {self.loaded.compilation_level}, whose layers take the adapters of the start "
                "only; name it with --lora at the start, or set compilation_level to 0"
            )
        return Adapter.read(self.model, Path(path))

    def load_adapter(self, number: int, path: str, adapter: Adapter) -> None:
        """Attach the adapter that was read from `path` on all ranks, between two steps.

        Raises `ValueError` with one sentence if any rank cannot; then no rank has changed.
        """
        try:
            with oom_in_step():
                attach(self.model, number, adapter, dtype=self.dtype, device=self.device)
            obstacle = None if self.graphs is None else capture_obstacle(self.model)
            if obstacle is not None:
                raise ValueError(f"{obstacle}, and graphs are being captured; start the server with --enforce-eager")
            if self.ranks is not None:
                self.ranks.change_adapter(number, path)
        except BaseException as error:
            self.unload_adapter(number)
            if isinstance(error, RankStepError | StepOutOfMemory):
                raise ValueError(str(error)) from error
            raise
        self._graphs_take_adapters = False

    def unload_adapter(self, number: int) -> None:
        """Remove an adapter that no row uses any more, on all ranks, between two steps."""
        detach(self.model, number)
        self._graphs_take_adapters = False
        if self.ranks is not None:
            self.ranks.change_adapter(number, None)

    # -- operators whose results are found to be wrong while they serve -----------------------------------------------

    def leave_to_torch(self, operator: str) -> None:
        """Have plain torch compute an operator from the next step on. Every rank calls this at the same step."""
        if operator == "all_reduce":
            # A CPU's collectives have no second implementation.
            leave_fast_sum = getattr(self.parallel.collectives, "leave_fast_sum", None)
            if leave_fast_sum is not None:
                leave_fast_sum()
                _log.error("The sums over ranks are computed by the library of torch from now on")
        elif not triton.active() or triton.leaves(operator):
            _log.error("Nothing else computes %s here; restart the server, and check this machine", operator)
            return
        else:
            try:
                backend = leave_to_torch(operator, self.model, self.device)
            except ValueError as error:
                _log.error("Operator %s stays as it is: %s", operator, error)
                return
            aiter.leave(operator)
            if backend is not None:
                self.backend = backend
                self.loaded = dataclasses.replace(self.loaded, backend=backend)
                if self.drafts is not None:
                    self.drafts.passes.backend = backend
                if self.sentinel is not None:
                    self.sentinel.backend = backend
            _log.error("Plain torch computes %s from now on, slowly", operator)
        if self.graphs is not None:
            # The graphs were captured with the wrong operator.
            self.graphs = self._make_graphs()

    @contextmanager
    def _replacing_refused_operators(self) -> Iterator[None]:
        """Leave an operator to torch if its kernel is refused inside. The step fails, and is computed again."""
        try:
            yield
        except RuntimeError as error:
            operator = getattr(error, "refused_operator", None)
            if operator is not None:
                self.leave_to_torch(operator)
            raise
