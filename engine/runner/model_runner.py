"""`ModelRunner`: runs one rank's model, step by step: `prepare_model`, `run_model`, `postprocess`.

Owned by the engine core, which calls `load`, `kv_cache_size`, `allocate_kv_cache`, `warm_up`, and then `forward`.
"""

import dataclasses
import functools
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.distributed.host_resources import available_host_memory
from engine.messages import TokenLogprobs
from engine.runner.device import TorchDeviceMemory, at_start, device_of, in_step
from engine.runner.device_batch import DeviceInputs, Place, ResidentTables
from engine.runner.graphs import DecodeGraphs, make_graphs, why_no_graphs
from engine.runner.input_batch import InputBatch, StepInputs, StepRows
from engine.runner.kernel_checks import check_kernels
from engine.runner.kv_cache import KV_CACHE_DTYPES, CommittedBlocks, LayerCaches
from engine.runner.memory_sizing import CPU_BYTES_AT_FIRST, KVCacheSize, cpu_budget, gpu_budget, kv_cache_size
from engine.runner.step_launcher import LaunchedStep, StepLauncher, mark_unusable, output_of
from engine.runner.warm_up import (
    StepSizes,
    WarmUpRow,
    WarmUpStep,
    compile_kernels,
    dummy_batch,
    dummy_prompt,
    run_largest_step,
)
from engine.sampling.logprobs import read_prompt_logprobs
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens, SampledTokens, Sampler
from engine.speculative.drafts import most_choices
from models.architectures.config import CheckpointConfig, ModelConfig
from models.attention.backend import AttentionBackend, select_backend
from models.attention.context import Context, DPMetadata, forward_context, set_kv_cache_data
from models.attention.cpu_native import NativeMetaData
from models.layers.base import CausalLM
from models.loading.loader import load_model
from models.lora.adapters import group_by_adapter, load_adapters
from models.ops import triton
from models.ops.cpu import runtime
from models.ops.cpu.program import NotRecordable, Program, record
from models.ops.cpu.runtime import Library
from models.ops.cpu.sampling import GreedyHead
from models.parallel.tensor_parallel import SINGLE_RANK, Exchange, TensorParallel
from models.quantization.config import ROUNDINGS

# [recorded_pass] `record_pass`: the model's pass on a CPU as one call of the compiled operators. Used by the model
# runner.


def record_pass(
    operators: Library,
    model: CausalLM,
    backend: AttentionBackend,
    num_tokens: int,
    dp_metadata: DPMetadata | None,
) -> Program:
    """Of up to so many tokens. What it needs for the largest step takes memory as far as steps have used it.

    Raises `NotRecordable`.
    """
    none = np.zeros(0, dtype=np.int64)
    metadata = backend.build_metadata(
        query_lens=none, seq_lens=none, block_tables=np.zeros((0, 1), np.int32), slot_mapping=none, num_decodes=0
    )

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = Context(positions=positions, is_prefill=False, batch_size=0)
        with forward_context(metadata, context, dp_metadata):
            return model(input_ids, positions)

    return record(operators, forward, num_tokens)


# [compiled_model] Where torch compiles the model (`compilation_level`): whether it can, and what is said when it
# fails.
#
# `models.layers.compilation`, and with it torch's compiler, is imported only where it was asked for.


def compile_model(level: int, model: CausalLM, model_config: CheckpointConfig, *, has_operators: bool) -> None:
    """Have the layers compiled by the steps of the start, at level 3. Raises `ValueError` where they cannot be.

    `has_operators`: whether the CPU's compiled operators compute the model.
    """
    if level == 0:
        return
    reason = None
    if has_operators:
        reason = "the CPU's operators compute this model already; set cpu_operators to false"
    elif not isinstance(model_config, ModelConfig):
        reason = f"{model_config.architecture} runs by {model_config.runs_by}, which is not cut at its attention"
    if reason is not None:
        raise ValueError(f"compilation_level is {level}, but {reason}, or set compilation_level to 0")
    from models.layers.compilation import compile_layers

    num_layers = compile_layers(model)
    _log.info("torch compiles %d layers, between their calls of attention", num_layers)


def compiling(level: int) -> AbstractContextManager[None]:
    """Around a step of the start. Raises `ValueError`, in words, where torch fails to compile what the step runs."""
    if level == 0:
        return nullcontext()
    from models.layers.compilation import compile_errors_as_value_errors

    return compile_errors_as_value_errors()


_log = logging.getLogger(__name__)


class ModelRunner:
    """The model, its KV cache, and the rows of the running sequences on one device."""

    model: CausalLM
    caches: LayerCaches
    committed: CommittedBlocks
    program: Program | None = None
    """The model's pass as one call; None where it runs operator by operator."""
    replicas_here: int = 1
    """That share the host's memory."""
    tokens_across_dp: tuple[int, ...] = ()
    """How many each replica computes in the next step, where they do so in lockstep."""
    spare_block: int | None = None
    """Of the cache, which no sequence uses: dummy steps between those of sequences write there."""
    graphs: DecodeGraphs | None = None
    """Where decode steps are replayed."""
    tables: ResidentTables | None = None
    """Block tables on the device, where the attention backend reads them there."""
    _step_seconds = 0.0
    """Of the last one."""
    _num_slots = 0
    """Sequences that may run, for which layers keep states."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        model_config: CheckpointConfig,
        device: torch.device,
        dtype: torch.dtype,
        parallel: TensorParallel = SINGLE_RANK,
        available_bytes: int | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        """The CPU's operators run on as many threads as torch does.

        `available_bytes`: of the host's memory, for the weights; None: what is available when they are loaded.
        `backend`: of attention; None: the device's.
        """
        self.parallel = parallel
        self.available_bytes = available_bytes
        self.operators = None
        if device.type == "cpu" and dtype is torch.bfloat16 and config.cpu_operators:
            self.operators = runtime.start(torch.get_num_threads())
        self.config = config
        self.model_path = model_path
        self.model_config = model_config
        self.device = device
        self.dtype = dtype
        self.max_model_len = config.max_model_len or model_config.max_model_len
        self.backend = select_backend(device) if backend is None else backend
        self.sampler = Sampler()
        self.input_batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=config.kv_cache_block_size,
            vocab_size=model_config.vocab_size,
            seed=config.seed,
            device_has_tables=self.backend.reads_tables_on_device,
        )

    @functools.cached_property
    def launcher(self) -> StepLauncher:
        """Runs steps ahead of the host."""
        return StepLauncher(self, device_of(self.device), self.config.max_num_seqs)

    def load(self, *, progress: bool = False) -> None:
        """Read the checkpoint. Raises `CheckpointError` for a bad one, `ValueError` for one that cannot run so."""
        with at_start("the model", "serve a smaller or a quantised one"):
            self.model = self.read_weights(progress=progress)
        load_adapters(self.model, self.config.lora_paths, dtype=self.dtype, device=self.device)
        has_operators = self.operators is not None
        compile_model(self._compilation_level, self.model, self.model_config, has_operators=has_operators)
        self.caches = LayerCaches(
            self.model.kv_cache_layers(),
            self.backend,
            block_size=self.config.kv_cache_block_size,
            num_slots=self.config.max_num_seqs,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=KV_CACHE_DTYPES[self.config.quantization_config.kv_cache_dtype],
        )
        if self.caches.have_states and self.config.num_drafts:
            raise ValueError(
                f"num_speculative_tokens is {self.config.num_drafts}, but {self.model_config.architecture} "
                "keeps recurrent states, which cannot take back a draft that is rejected; leave it out"
            )
        if self.caches.have_states and self.config.enable_prefix_caching:
            # What a recurrent layer knows of a prefix is in its sequence's state, and in no block.
            self.config = self.config.model_copy(update={"enable_prefix_caching": False})

    def read_weights(self, *, progress: bool) -> CausalLM:
        """The model with the checkpoint's weights."""
        available = available_host_memory() if self.available_bytes is None else self.available_bytes
        # Rope types that depend on the context's length depend on the length that is served.
        served = dataclasses.replace(self.model_config, max_model_len=self.max_model_len)
        return load_model(
            self.model_path,
            served,
            dtype=self.dtype,
            device=self.device,
            progress=progress,
            parallel=self.parallel,
            available_bytes=available if self.device.type == "cpu" else None,
            weight_bits=ROUNDINGS.get(self.config.quantization_config.quantization, 16),
        )

    @property
    def window(self) -> int | None:
        """Tokens that a query of the loaded model sees, its own included; None: all before it."""
        return self.caches.window

    @property
    def blocks_at_first(self) -> int | None:
        """Blocks of the cache that are used before cached ones are given out; None: all of them."""
        if self.device.type != "cpu" or self.caches.block_bytes == 0:
            return None
        return -(-CPU_BYTES_AT_FIRST // (self._num_ranks * self.caches.block_bytes))

    def kv_cache_size(self) -> KVCacheSize:
        """How large a KV cache fits beside the loaded model, once its kernels are checked. Raises `ValueError` when
        none does, or they are wrong.
        """
        self.backend = check_kernels(self)
        sizes = {"block_bytes": self.caches.block_bytes, "slot_bytes": self.caches.slot_bytes}
        return kv_cache_size(
            self.config,
            max_model_len=self.max_model_len,
            budget=lambda: (
                cpu_budget(self.config, activations=self._activation_bytes(), ranks=self._num_ranks)
                if self.device.type == "cpu"
                else gpu_budget(
                    self.config, TorchDeviceMemory(self.device), self.worst_case_step, agree=self._agree, **sizes
                )
            ),
            **sizes,
        )

    def allocate_kv_cache(self, num_blocks: int, num_slots: int | None = None) -> None:
        """Make what the layers keep, and register it with the forward context. `num_slots`: None is `max_num_seqs`."""
        on_host = self.device.type == "cpu"
        why_eager = why_no_graphs(self.config, self.launcher.device, self.parallel, self.model)
        # A cache of one block is the profiling step's.
        has_graphs = why_eager is None and num_blocks > 1
        self.spare_block = num_blocks if has_graphs or self._is_in_lockstep else None
        self._num_slots = spare_slot = self.config.max_num_seqs if num_slots is None else num_slots
        caches = self.caches.allocate(num_blocks + (self.spare_block is not None), spare_slot + has_graphs)
        set_kv_cache_data(caches)
        self.committed = CommittedBlocks(self.caches.pools if on_host else (), torch.get_num_threads())
        if self.backend.reads_tables_on_device:
            self.tables = None  # Not both at a time.
            self.tables = ResidentTables(spare_slot, self.input_batch.max_blocks, num_blocks, self.device)
        self.graphs = None
        if has_graphs:
            self.graphs = make_graphs(
                self.config,
                self.launcher.device,
                self.parallel,
                self.model,
                self.backend,
                self.caches,
                max_model_len=self.max_model_len,
                spare_block=num_blocks,
                spare_slot=spare_slot,
            )
        elif why_eager and num_blocks > 1:
            _log.info("Decodes run eagerly: %s", why_eager)
        self.program = None
        self.greedy_head = None
        if self.operators is not None and num_blocks > 1:
            try:
                self.program = self._record(self.operators)
            except NotRecordable as reason:
                _log.info("Steps run operator by operator: %s", reason)
            if isinstance(self.model_config, ModelConfig):
                hidden_size, max_rows = self.model_config.hidden_size, self._most_choices
                self.greedy_head = GreedyHead.of(self.operators, self._own_logits, hidden_size, max_rows)

    def _activation_bytes(self) -> int:
        """What the largest step may commit beside weights and cache, as far as it is known before one has run."""
        if self.operators is None:
            return 0
        set_kv_cache_data(self.caches.allocate(1, 1))
        try:
            return self._record(self.operators).num_bytes + (self._exchange.num_bytes if self._exchange else 0)
        except NotRecordable:
            return 0
        finally:
            set_kv_cache_data({})

    def _agree(self, is_so: bool) -> bool:
        return self.parallel.agree(is_so, self.device)

    @property
    def _compilation_level(self) -> int:
        return self.config.compilation_config.compilation_level

    @property
    def _num_ranks(self) -> int:
        """Of all replicas here: those that share the host's memory."""
        return self.parallel.size * self.replicas_here

    @property
    def _is_in_lockstep(self) -> bool:
        """Whether each pass is one of other replicas too."""
        return self._exchange is not None

    @property
    def _exchange(self) -> Exchange | None:
        return None if self.parallel.experts is None else self.parallel.experts.exchange

    def _dp_metadata(self, num_tokens: int) -> DPMetadata | None:
        """What each replica computes in a pass in which this one computes so many, dummies included."""
        if self.parallel.experts is None or self._exchange is None:
            return None
        # Before the first step all replicas compute the same, to measure and to warm up.
        return DPMetadata(self.tokens_across_dp or (num_tokens,) * self.parallel.experts.num_replicas)

    def _record(self, operators: Library) -> Program:
        """The pass as one call. Raises `NotRecordable`."""
        num_tokens = self.config.max_num_batched_tokens
        return record_pass(operators, self.model, self.backend, num_tokens, self._dp_metadata(num_tokens))

    def warm_up(self) -> None:
        """Run one prefill of a token, so that what torch sets up on first use is set up before the first request; on
        a GPU all that makes Triton compile what requests will need."""
        self._dummy_step(WarmUpStep([WarmUpRow(1, 1)]))
        if self._compilation_level:
            # What is compiled for one token is of its own.
            self._dummy_step(WarmUpStep([WarmUpRow(2, 2)]))
        if triton.active():
            sizes = self._step_sizes._replace(max_num_seqs=self._num_slots)
            compile_kernels(sizes, self._dummy_step, self.parallel)
        self.sampler.warm_up(self.model_config.vocab_size, self.device)
        self.committed.at_start()

    def worst_case_step(self, num_seqs: int) -> None:
        """The step that takes most memory, where so many sequences may run.

        Raises `ValueError`, a sentence, where there is not as much.
        """
        self.allocate_kv_cache(1, num_seqs)
        run_largest_step(self._step_sizes._replace(max_num_seqs=num_seqs), self._dummy_step)
        set_kv_cache_data({})

    @property
    def _most_choices(self) -> int:
        """Tokens that are chosen in a step."""
        most = self.config.max_num_seqs
        return most_choices(most) if self.config.num_drafts else most

    @property
    def _step_sizes(self) -> StepSizes:
        config = self.config
        return StepSizes(config.max_num_batched_tokens, config.max_num_seqs, self.max_model_len, config.num_drafts)

    def _dummy_step(self, step: WarmUpStep) -> None:
        """Compute sequences of nobody's. All write to one block: to the first, which a real sequence overwrites before
        use, or to a spare one."""
        batch = dummy_batch(step, self.config.kv_cache_block_size, self.spare_block or 0)
        with compiling(self._compilation_level):
            self._compute(batch)

    def dummy_prefill(self) -> None:
        """A pass over a token that is nobody's, while no sequence runs: other replicas need this one's experts."""
        context, token = self._dummy
        with torch.inference_mode(), in_step(), forward_context(token.metadata, context, self._dp_metadata(1)):
            self._hidden_states(token, 1, has_adapters=False)

    @functools.cached_property
    def _dummy(self) -> tuple[Context, DeviceInputs]:
        assert self.spare_block is not None
        block_size, have_states = self.config.kv_cache_block_size, self.caches.have_states
        return dummy_prompt(self.backend, self.spare_block, block_size, self.device, have_states=have_states)

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Compute one step and sample a token for each row whose last known token it computes."""
        # Before a step, the outputs of the last one have been sent.
        self.committed.after_step(self._step_seconds)
        start = time.perf_counter()
        with in_step():
            output = self._compute(batch)
        self._step_seconds = time.perf_counter() - start
        self._after_step()
        return output

    def _after_step(self) -> None:
        # Of several ranks, each counts as a step begins.
        if self.graphs is not None and self.parallel.size == 1:
            self.graphs.count_step()

    def prepare_ahead(self) -> bool:
        """Do a little of what makes later steps quicker; whether there is more of it."""
        # Other ranks hear of steps only.
        if self.graphs is not None and self.parallel.size == 1 and self.graphs.capture_next():
            return True
        return self.committed.at_rest()

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin a step whose rows may need tokens that the device has sampled and nobody has read."""
        self.committed.after_step(self._step_seconds)
        start = time.perf_counter()
        with in_step():
            step = self.launcher.launch(batch)
        self._step_seconds = time.perf_counter() - start
        self._after_step()
        return step

    def _compute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        with torch.inference_mode():
            inputs, on_device = self.prepare_model(batch)
            logits, prompt_logprobs = self.run_model(inputs, on_device, batch.prompt_spans)
            output = self.postprocess(batch, inputs, logits)
            output.prompt_logprobs = prompt_logprobs
            return output

    def prepare_model(self, batch: StepRows) -> tuple[StepInputs, DeviceInputs]:
        """Bring the rows up to date, and build the step's arrays, here and on the device."""
        self.input_batch.apply(batch)
        return self._step_inputs(batch)

    def _step_inputs(self, batch: StepRows) -> tuple[StepInputs, DeviceInputs]:
        inputs = self.input_batch.step_inputs(batch, None if self.graphs is None else self.graphs.alike)
        highest_block = int(inputs.slot_mapping.max()) // self.config.kv_cache_block_size
        if highest_block != self.spare_block:
            self.committed.use(highest_block)
        size = 0 if self.graphs is None or batch.prompt_spans else self.graphs.size_for(inputs)
        shown = inputs if self.graphs is None else self.graphs.pad(inputs, size)
        place = Place(self.backend, self.tables, self.caches.have_states, bool(self.config.lora))
        return inputs, self.launcher.batch.assemble(shown, self.input_batch.table_changes, place, size)

    def run_model(
        self, inputs: StepInputs, on_device: DeviceInputs, prompt_spans: list[PromptSpan]
    ) -> tuple[torch.Tensor | LaunchedTokens, dict[int, list[TokenLogprobs]] | None]:
        """The logits of the rows that sample a token, and the prompts' log probabilities. # [S, V] float32

        The tokens themselves, where each row takes the likeliest and the model's head tells it without logits.
        """
        num_rows = len(inputs.query_lens)
        context = Context(
            positions=on_device.positions,
            is_prefill=inputs.num_decodes < num_rows,
            batch_size=num_rows,
            graph_bs=on_device.graph_size,
        )
        lora = None
        if inputs.adapters is not None and not on_device.graph_size:
            lora = group_by_adapter(inputs.adapters, inputs.query_lens, self.device)
        num_tokens, has_adapters = len(inputs.input_ids), inputs.adapters is not None
        with forward_context(on_device.metadata, context, self._dp_metadata(num_tokens), lora=lora):
            hidden = self._hidden_states(on_device, num_tokens, has_adapters=has_adapters)  # [T, H]
            prompt_logprobs = None
            if prompt_spans:
                prompt_logprobs = self._prompt_logprobs(hidden, prompt_spans)
            if len(on_device.last_tokens) < len(hidden):
                hidden = hidden[on_device.last_tokens]
            return self._choices(hidden, inputs), prompt_logprobs

    def _prompt_logprobs(self, hidden: torch.Tensor, spans: list[PromptSpan]) -> dict[int, list[TokenLogprobs]]:
        """By sequence. # hidden [T, H]"""
        return read_prompt_logprobs(hidden, self.model.compute_logits, spans, self.model_config.vocab_size)

    def _choices(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor | LaunchedTokens:
        """See `run_model`. # [S, H]"""
        head = self._greedy_head_for(hidden, inputs)
        if head is not None and inputs.sampling is not None and inputs.sampling.is_greedy:
            return LaunchedTokens.of_host(*head.choose(hidden))
        return self.model.compute_logits(hidden)

    def _greedy_head_for(self, hidden: torch.Tensor, inputs: StepInputs) -> GreedyHead | None:
        head = self.greedy_head
        return head if head is not None and inputs.adapters is None and len(hidden) <= head.max_rows else None

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the tokens whose rows of the head are here. # [S, H] -> [S, tokens] float32"""
        return self.model.compute_logits(hidden)

    def _keep(self, inputs: StepInputs, token_ids: npt.NDArray[np.int64]) -> None:
        """Remember what the step's rows sampled, for the next step."""
        self.input_batch.keep(inputs, token_ids)

    def _hidden_states(self, step: DeviceInputs, num_tokens: int, *, has_adapters: bool) -> torch.Tensor:
        """Of the step's tokens but for those that pad it. # [num_tokens, H]"""
        if self.graphs is not None and step.graph_size:
            return self.graphs.run(step, num_tokens)
        if self.program is None or has_adapters or num_tokens > self.program.max_tokens:
            return self.model(step.input_ids, step.positions)
        assert isinstance(step.metadata, NativeMetaData)
        experts, dp_metadata = self.parallel.experts, self._dp_metadata(num_tokens)
        step.metadata.step.is_dummy = bool(experts and dp_metadata and dp_metadata.is_dummy(experts.replica))
        hidden = self.program.run(step.input_ids, step.positions, step.metadata.step)
        if self._exchange is not None:
            self._exchange.check()
        return hidden

    def postprocess(
        self, batch: ScheduledBatch, inputs: StepInputs, logits: torch.Tensor | LaunchedTokens
    ) -> ScheduledBatchOutput:
        """Sample, wait for the tokens, and `finish` the step."""
        assert inputs.sampling is not None, "the tokens of all steps before have been read"
        return self.finish(batch, inputs, self.launch_sampler(logits, inputs.sampling).read())

    def launch_sampler(self, logits: torch.Tensor | LaunchedTokens, rows: SamplingRows) -> LaunchedTokens:
        """Have the device sample, unless the model's head did. # [S, V] float32, overwritten"""
        if isinstance(logits, LaunchedTokens):
            return logits
        device = self.launcher.device
        return self.sampler.launch(logits, rows, None if device.is_host else self.launcher.uploads.send)

    def finish(self, batch: ScheduledBatch, inputs: StepInputs, sampled: SampledTokens) -> ScheduledBatchOutput:
        """Keep a step's tokens for the next one, and report them by sequence."""
        sampled = mark_unusable(sampled, inputs)
        self._keep(inputs, sampled.token_ids)
        return output_of(batch, inputs, sampled, self.dtype)
