"""Model steps on a GPU: runners of Qwen3's shapes, decode steps, prefills, and the idle time between steps."""

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Case, Mark, Values
from engine.batch import ScheduledBatch
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.core.step_pipeline import StepPipeline
from engine.distributed.flight_record import FlightRecord
from engine.messages import RequestOutput
from engine.runner.device import Device
from engine.runner.loaded_model import LoadedModel, load_model
from engine.runner.model_runner import ModelRunner
from engine.runner.step_results import LaunchedStep
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.architectures.config import CheckpointConfig, ModelConfig
from models.architectures.registry import ARCHITECTURES
from models.attention.context import set_kv_cache_data
from models.attention.triton import TritonAttentionBackend
from models.layers.base import CausalLM
from models.parallel.tensor_parallel import TensorParallel

BLOCK_SIZE = 16
_VOCABULARY = 151936


def _shape(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": tied,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6B": _shape(1024, 3072, 28, 16),
    "1.7B": _shape(2048, 6144, 28, 16),
    "4B": _shape(2560, 9728, 36, 32),
    "8B": _shape(4096, 12288, 36, 32, tied=False),
}
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def fields_of(bench: Bench, shape: str) -> dict[str, Any]:
    """The config.json of a model; of a tiny one in a dry run."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **(_TINY if bench.is_dry else SHAPES[shape]),
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


def random_weights(
    path: Path,
    config: CheckpointConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
    **_: object,
) -> CausalLM:
    """A replacement of `loader.load_model`: a model of random weights."""
    assert isinstance(config, ModelConfig)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = ARCHITECTURES[config.architecture].model_class(config, parallel)
    finally:
        torch.set_default_dtype(previous)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return cast(CausalLM, model.eval())


class SizedRunner(ModelRunner):
    """A model runner that knows how many bytes its steps read."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: all weights; of embeddings that are not also the head, only the rows of its
        tokens."""
        assert isinstance(self.model_config, ModelConfig)
        total = sum(parameter.nbytes for parameter in self.model.parameters())
        config = self.model_config
        return total - (0 if config.tie_word_embeddings else self.embedding_parameters * self.dtype.itemsize)

    @property
    def embedding_parameters(self) -> int:
        """Bytes of the table of embeddings."""
        assert isinstance(self.model_config, ModelConfig)
        return self.model_config.vocab_size * self.model_config.hidden_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.caches.block_bytes // BLOCK_SIZE


def load_shape(
    bench: Bench, config: Config, fields: Mapping[str, Any], device_api: Device, read_weights: Callable[..., CausalLM]
) -> LoadedModel:
    """A model with these fields of config.json, which attends by Triton."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(fields))
        return load_model(
            config,
            Path(name),
            ModelConfig.from_checkpoint(Path(name)),
            bench.device,
            bench.dtype,
            operators=None,
            backend=TritonAttentionBackend(bench.device),
            device_api=device_api,
            read_weights=read_weights,
        )


def runner_of(
    bench: Bench, shape: str, *, max_num_seqs: int, max_model_len: int, num_blocks: int, sizes: tuple[int, ...] = ()
) -> SizedRunner:
    """A runner with a cache of random numbers, and graphs of these sizes to capture; with no sizes, it runs eagerly.

    Memory of the previous runner is freed first, if its caller holds no reference. Raises `MemoryError` with one
    sentence if the device has too little memory.
    """
    set_kv_cache_data({})
    # Steps and their runner refer to each other until the collector runs.
    gc.collect()
    config = Config.from_fields(
        num_kvcache_blocks=num_blocks,
        kv_cache_block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(16384, max_model_len),
        enable_prefix_caching=False,
        enforce_eager=not sizes,
        **({"cudagraph_capture_sizes": sizes} if sizes else {}),
    )
    loaded = load_shape(bench, config, fields_of(bench, shape), bench.device_api, random_weights)
    needed, free = num_blocks * loaded.layer_caches().block_bytes, bench.free_bytes()
    if needed > free:
        raise MemoryError(f"a KV cache of {needed / 2**30:.1f} GiB does not fit, {free / 2**30:.1f} GiB are free")
    runner = SizedRunner(loaded, num_blocks)
    for pool in runner.caches.pools:
        # Layer by layer: random numbers for all layers at once would need as much memory again.
        for page in range(pool.shape[1]):
            pool[:, page].normal_()
    while runner.prepare_while_idle():
        pass
    return runner


# A batch that decodes step after step, each launched before the previous one is read.

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids."""
    found: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return found


class Decodes:
    """Sequences with equal contexts, whose cached values are the pool's random numbers."""

    def __init__(self, bench: Bench, runner: SizedRunner, batch: int, context: int, *, steps: int) -> None:
        """For at most `steps` steps, in blocks in shuffled order."""
        self._bench, self._runner = bench, runner
        blocks = -(-(context + steps + 1) // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(batch * blocks).tolist()
        self._seqs = [
            Sequence(random_ids(context, runner.model_config.vocab_size, row), BLOCK_SIZE, _GREEDY, id=row)
            for row in range(batch)
        ]
        for row, seq in enumerate(self._seqs):
            seq.slot, seq.block_table = row, order[row * blocks : (row + 1) * blocks]
        self._context, self._steps_left, self._is_new = context, steps, True
        self._running: LaunchedStep | None = None

    def step(self) -> None:
        """Launch a step, read the previous one, and sample this one's tokens, as the engine does."""
        assert self._steps_left, "more steps than there are blocks for"
        self._steps_left -= 1
        count = len(self._seqs)
        launched = self._runner.launch(
            ScheduledBatch(
                {seq.id: seq for seq in self._seqs},
                [1] * count,
                count,
                total_tokens_num_decode=count,
                total_seqs_num=count,
                total_seqs_num_decode=count,
                context_lens=[self._context] * count,
                new_seqs=self._seqs if self._is_new else (),
            )
        )
        self._context, self._is_new = self._context + 1, False
        if self._running is not None:
            self._running.result()
        launched.sample()
        self._running = launched

    def timed(self, count: int) -> list[float]:
        """Seconds of `count` steps, from the end of each on the device to the end of the next."""
        marks: list[Mark] = []
        for _ in range(count + 1):
            self.step()
            marks.append(self._bench.mark())
        self._bench.synchronize()
        return [begin.seconds_to(end) for begin, end in itertools.pairwise(marks)]

    def finish(self) -> None:
        """Read the step that runs."""
        if self._running is not None:
            self._running.result()
        self._running = None


# Decode steps by shape and batch, with graphs and without, against reading weights and caches once.

_STEPS, _WARM = 40, 4
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
_QUICK_BATCHES = (1, 64, 256)
_EAGER_BATCHES = (1, 64)


@dataclass
class _Runners:
    """A runner at a time: each uses the memory of the previous one."""

    bench: Bench
    batches: tuple[int, ...]
    context: int
    _shape: str = ""
    _runner: SizedRunner | None = None

    def of(self, shape: str) -> SizedRunner:
        if self._runner is None or self._shape != shape:
            self._runner = None
            most = max(self.batches)
            length = self.context + _STEPS + _WARM + 2
            blocks = -(-length // BLOCK_SIZE)
            self._runner = runner_of(
                self.bench,
                shape,
                max_num_seqs=most,
                max_model_len=blocks * BLOCK_SIZE,
                num_blocks=most * blocks,
                sizes=self.batches,
            )
            self._shape = shape
        return self._runner


def decode_cases(bench: Bench) -> Iterator[Case]:
    """Measure the largest model first, which is the most similar to those served."""
    shapes = ("8B", "0.6B") if bench.is_quick else tuple(reversed(tuple(SHAPES)))
    batches = bench.size(_QUICK_BATCHES if bench.is_quick else _BATCHES, (1, 3))
    runners = _Runners(bench, batches, bench.size(1024, 3))
    for shape in bench.size(shapes, shapes[:1]):
        for batch in batches:
            for has_graphs in (True, False):
                if has_graphs or batch in bench.size(_EAGER_BATCHES, (3,)):
                    yield _case(runners, shape, batch, has_graphs)


def _case(runners: _Runners, shape: str, batch: int, has_graphs: bool) -> Case:
    how = "graphs" if has_graphs else "eager"
    return Case(f"{shape}, {batch}, {how}", lambda: _measure(runners, shape, batch, has_graphs))


def _measure(runners: _Runners, shape: str, batch: int, has_graphs: bool) -> Values:
    bench, runner = runners.bench, runners.of(shape)
    graphs = runner.graphs
    if not has_graphs:
        runner.graphs = None
    elif graphs is None or batch not in graphs.captured_sizes:
        raise RuntimeError("no graph of this size was captured; the log says why")
    try:
        steps = bench.size(_STEPS, 2)
        decodes = Decodes(bench, runner, batch, runners.context, steps=steps + _WARM + 1)
        decodes.timed(bench.size(_WARM - 1, 1))
        took = statistics.median(decodes.timed(steps))
        decodes.finish()
    finally:
        runner.graphs = graphs
    num_bytes = runner.weight_bytes + batch * runners.context * runner.token_bytes
    bound = bench.bound(num_bytes=num_bytes)
    return {
        "ms": took * 1e3,
        "bound, ms": bound * 1e3,
        "of the bound": bound / took,
        "tokens/s": batch / took,
        "GB read": num_bytes / 1e9,
    }


# A prompt's pass with the sizes of an 8B model, compared with its operations at the matrix rate.

_REPEATS = 5


def prefill_cases(bench: Bench) -> Iterator[Case]:
    """Measure whole prompts, and a chunk after computed tokens."""
    longest = bench.size(8192, 16)
    runners: list[SizedRunner] = []
    for length, cached in ((longest, 0), (longest // 4, 0), (longest // 4, longest * 3 // 4)):
        name = f"8B, {length} tokens" + (f" behind {cached}" if cached else "")
        yield Case(name, lambda length=length, cached=cached: _prefill_measure(bench, runners, length, cached))  # type: ignore[misc]


def _prefill_measure(bench: Bench, runners: list[SizedRunner], length: int, cached: int) -> Values:
    longest = bench.size(8192, 16)
    if not runners:
        blocks = longest // BLOCK_SIZE + 1
        runners.append(
            runner_of(bench, "8B", max_num_seqs=1, max_model_len=blocks * BLOCK_SIZE, num_blocks=2 * blocks)
        )
    (runner,) = runners
    ids, took = itertools.count(), []
    for _ in range(1 if bench.is_dry else _REPEATS):
        seq = Sequence(
            random_ids(cached + length, runner.model_config.vocab_size, next(ids)),
            BLOCK_SIZE,
            SamplingParams(temperature=0.0, max_tokens=4),
            id=next(ids),
        )
        seq.slot, seq.block_table = 0, list(range(seq.num_blocks))
        begin = bench.mark()
        step = runner.launch(
            ScheduledBatch(
                {seq.id: seq},
                [length],
                length,
                total_tokens_num_prefill=length,
                total_seqs_num=1,
                total_seqs_num_prefill=1,
                new_seqs=[seq],
            )
        )
        end = bench.mark()
        step.result()
        bench.synchronize()
        took.append(begin.seconds_to(end))
    median, operations = statistics.median(took), operations_of(runner, length, cached)
    bound = bench.bound(operations=operations)
    return {
        "ms": median * 1e3,
        "bound, ms": bound * 1e3,
        "of the matrix rate": bound / median,
        "tokens/s": length / median,
        "TFLOP": operations / 1e12,
    }


def operations_of(runner: SizedRunner, length: int, cached: int) -> float:
    """Operations: two per weight and token, for the head of the last token only; four per dimension and head of each
    pair of a query and a key."""
    config = runner.model_config
    assert isinstance(config, ModelConfig)
    table = runner.embedding_parameters
    layers = sum(weight.numel() for weight in runner.model.parameters())
    layers -= table if config.tie_word_embeddings else 2 * table
    pairs = length * cached + length * (length + 1) / 2
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 2.0 * layers * length + 2.0 * table + attention


# How long the device is idle between two decode steps of the engine's loop, with deferred output.

_GAP_STEPS, _GAP_WARM = 60, 10
_FEWEST_KERNELS = 20
"""The least number of activities of a replayed pass; other launches have fewer."""


class Interval(NamedTuple):
    """An activity on the device; times in nanoseconds."""

    begin: int
    end: int
    launch: int
    """The launch of the host to which it belongs: all kernels of a replayed graph have the same."""


class Loop:
    """The scheduler and the runner, driven as by the engine core; outputs are discarded."""

    def __init__(self, bench: Bench, runner: SizedRunner, batch: int, context: int, *, steps: int) -> None:
        """Compute the prompts of `batch` sequences, which then decode for `steps` steps."""
        self.scheduler = Scheduler(runner.config, rope=runner.rope)
        record = FlightRecord.of_its_own(runner.config.max_num_seqs)
        self.pipeline = StepPipeline(self.scheduler, runner, record, depth=2)
        params = SamplingParams(temperature=0.0, max_tokens=steps + _GAP_WARM + 8, ignore_eos=True)
        vocab_size = runner.model_config.vocab_size
        self.scheduler.extend(
            Sequence(random_ids(context, vocab_size, row), BLOCK_SIZE, params, id=row) for row in range(batch)
        )
        self.num_outputs = 0
        while self.num_outputs < batch:
            self.turn()
        for _ in range(bench.size(_GAP_WARM, 0)):
            self.turn()

    def on_read(self, outputs: list[RequestOutput], kind: str, seconds: float) -> None:
        """Count a step's outputs."""
        self.num_outputs += len(outputs)

    def turn(self) -> None:
        """Run one turn of the engine's loop."""
        if (failed := self.pipeline.advance(self.on_read)) is not None:
            raise RuntimeError(f"a step failed: {failed}")


def gap_cases(bench: Bench) -> Iterator[Case]:
    """Measure with the smallest model, whose steps are the shortest and leave the host the least time."""
    for batch in bench.size((64, 256), (2,)):
        yield Case(f"0.6B, {batch}", lambda batch=batch: _gap_measure(bench, batch))  # type: ignore[misc]


def _gap_measure(bench: Bench, batch: int) -> Values:
    context, steps = bench.size(1024, 3), bench.size(_GAP_STEPS, 2)
    length = context + 3 * steps + _GAP_WARM + 32
    blocks = -(-length // BLOCK_SIZE)
    runner = runner_of(
        bench,
        "0.6B",
        max_num_seqs=batch,
        max_model_len=blocks * BLOCK_SIZE,
        num_blocks=batch * (blocks + 1),
        sizes=(batch,),
    )
    loop = Loop(bench, runner, batch, context, steps=3 * steps)
    marks = []
    begin = time.perf_counter()
    for _ in range(steps):
        loop.turn()
        marks.append(bench.mark())
    bench.synchronize()
    took = statistics.median(one.seconds_to(other) for one, other in itertools.pairwise(marks))
    values: Values = {"step, ms": took * 1e3, "whole loop, ms a step": (time.perf_counter() - begin) / steps * 1e3}
    activity = torch.profiler.ProfilerActivity.CPU if bench.is_dry else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(steps):
            loop.turn()
        bench.synchronize()
    if bench.is_dry:
        return values
    gaps = idle_between_passes(_intervals(profile))
    if not gaps:
        raise RuntimeError("the profiler recorded no replayed passes")
    ordered = sorted(gaps)
    values["gap, us"] = statistics.median(ordered) / 1e3
    values["gap p99, us"] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] / 1e3
    return values


def _intervals(profile: torch.profiler.profile) -> list[Interval]:
    """The device's activities, recorded by the profiler."""
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    return [
        Interval(event.start_ns(), event.start_ns() + event.duration_ns(), event.correlation_id())
        for event in results.events()
        if event.device_type() != torch._C._autograd.DeviceType.CPU
    ]


def idle_between_passes(intervals: SequenceABC[Interval], fewest: int = _FEWEST_KERNELS) -> list[int]:
    """Nanoseconds without activity, from the end of each replayed pass to the start of the next.

    A pass is a launch with `fewest` activities or more.
    """
    by_launch: dict[int, list[Interval]] = defaultdict(list)
    for each in intervals:
        by_launch[each.launch].append(each)
    passes = sorted(
        (min(one.begin for one in some), max(one.end for one in some))
        for some in by_launch.values()
        if len(some) >= fewest
    )
    gaps = []
    for (_, end), (begin, _) in itertools.pairwise(passes):
        idle, busy_until = 0, end
        for each in sorted(one for one in intervals if one.end > end and one.begin < begin):
            idle += max(0, each.begin - busy_until)
            busy_until = max(busy_until, each.end)
        gaps.append(idle + max(0, begin - busy_until))
    return gaps
