"""A GPU that is not there: kernels are launched as for it and compute nothing; and the engine's loop on top of it."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton.compiler
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.gpu.bench import Bench, Case, Values
from benchmarks.gpu.steps import BLOCK_SIZE, Loop, SizedRunner, load_shape
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner import loaded_model
from engine.runner.device import EagerGraph, Graph
from engine.runner.kernel_build import AbsentDevice
from engine.runner.launched_step import LaunchedStep
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import WarmUpRow, WarmUpStep
from models.architectures.config import CheckpointConfig, ModelConfig
from models.architectures.registry import ARCHITECTURES
from models.attention.triton import TritonAttentionBackend
from models.layers.base import CausalLM
from models.ops import triton as kernels
from models.ops.triton import configs, probe
from models.ops.triton.absent import AbsentDriver
from models.ops.triton.configs import Target, launch_of
from models.parallel.tensor_parallel import TensorParallel

Compile: TypeAlias = Callable[[Any, GPUTarget, dict[str, Any]], Any]
"""Stands where `triton.compiler.compile` does, of a source, a target and options."""


def nothing(*_: object) -> None:
    """What an idle kernel does, whatever it is given."""


IDLE_KERNEL = SimpleNamespace(run=nothing, launch_metadata=nothing, function=None, packed_metadata=None)
"""What Triton takes for a compiled kernel."""


class AbsentBench(Bench):
    """What is measured of the host where kernels are launched for a GPU that is not there."""

    def __init__(self, *, is_dry: bool = False) -> None:
        self.is_quick, self.is_dry = False, is_dry
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        torch.manual_seed(0)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


@contextmanager
def on(target: Target, compile: Compile = lambda src, target, options: IDLE_KERNEL) -> Iterator[None]:
    """Inside, a CPU's tensors are taken for those of such a GPU. `compile` hears of each form of a kernel once."""
    driver.set_active(AbsentDriver(target))
    with ExitStack() as stack:
        for place, name, stands_in in (
            (triton.compiler, "compile", compile),
            (configs, "INTERPRETER", target),
            (probe, "probe", nothing),
            (loaded_model, "select_backend", TritonAttentionBackend),
        ):
            stack.enter_context(patch.object(place, name, stands_in))
        launch_of.cache_clear()
        kernels.start(torch.device("cpu"))
        yield


# What a turn of the engine's loop takes of the host: to schedule, launch and read a decode step, without a device.
# Of a model of Qwen3-0.6B's layers and heads, whose weights and heads are small: what the host does is the same.
# Kernels are launched as for a GPU that is not there (`absent`); torch's products allocate what they return and
# compute nothing; a graph's replay does nothing. Copies and events are a CPU's.

_FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_CONTEXT = 1024
_PROMPT = 256
STEPS = 200
_PARTS: tuple[tuple[str, type, str], ...] = (
    ("schedule", Scheduler, "schedule"),
    ("launch", ModelRunner, "launch"),
    ("read", LaunchedStep, "result"),
    ("postprocess", Scheduler, "read_step"),
)
"""Of a turn, in order: a column, and the method that it is."""


class IdleDevice(AbsentDevice):
    """Its graphs are empty, and its memory is the host's."""

    def __init__(self) -> None:
        self.memory = None

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        del run
        return EagerGraph(lambda: None)


def weights_of_ones(
    path: Path, config: CheckpointConfig, *, dtype: torch.dtype, parallel: TensorParallel, **_: object
) -> CausalLM:
    """In place of `loader.load_model`: weights that take no memory."""
    assert isinstance(config, ModelConfig)
    model = ARCHITECTURES[config.architecture].model_class(config, parallel)
    for parameter in model.parameters():
        parameter.data = torch.ones(parameter.shape, dtype=dtype)
    return cast(CausalLM, model.eval())


def first_tokens(src: Any, target: object, options: object) -> Any:
    """A compiled kernel that does nothing, except that the argmax is always token 0, because tokens are read.

    Stands where Triton's compiler does.
    """
    del target, options
    if src.name != "argmax_kernel":
        return IDLE_KERNEL

    def run(*launch: Any) -> None:
        *_, tokens, peaks, _, _, _ = launch
        tokens.zero_()
        peaks.zero_()

    return SimpleNamespace(**{**vars(IDLE_KERNEL), "run": run})


def turn_cases(bench: Bench) -> Iterator[Case]:
    """By batch, replaying graphs and without."""
    for batch in bench.size((64, 256), (2,)):
        for has_graphs in (True, False):
            name = f"{batch} sequences, {'replayed' if has_graphs else 'eager'}"
            yield Case(name, lambda b=batch, g=has_graphs: measure_turn(bench, b, has_graphs=g))  # type: ignore[misc]
    for tokens in (0, _PROMPT):
        name = f"a prompt of {_PROMPT} tokens, {'replayed in pieces' if tokens else 'eager'}"
        yield Case(name, lambda t=tokens: measure_prompt(bench, t))  # type: ignore[misc]


def measure_prompt(bench: Bench, captured_tokens: int) -> Values:
    """The median of a prompt's step, with graphs for so many tokens."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "linear", _idle_product))
        runner = _runner(bench, 1, 64, has_graphs=True, piecewise_capture_tokens=captured_tokens)
        step = WarmUpStep([WarmUpRow(_PROMPT, _PROMPT)])
        took = []
        for _ in range(bench.size(STEPS, 2)):
            begin = time.perf_counter()
            runner.run_dummy_step(step)
            took.append(time.perf_counter() - begin)
    return {"a turn, ms": statistics.median(took) * 1e3}


def measure_turn(bench: Bench, batch: int, *, has_graphs: bool) -> Values:
    """Medians of a turn and of its parts, of which the reading waits for nothing."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "linear", _idle_product))
        loop = _loop(bench, batch, has_graphs=has_graphs)
        took = _timed(stack)
        turns = []
        for _ in range(bench.size(STEPS, 2)):
            begin = time.perf_counter()
            loop.turn()
            turns.append(time.perf_counter() - begin)
    parts = {name: statistics.median(took[name]) * 1e3 for name, _, _ in _PARTS}
    whole = statistics.median(turns) * 1e3
    return {"a turn, ms": whole, **{f"{name}, ms": ms for name, ms in parts.items()}}


def _loop(bench: Bench, batch: int, *, has_graphs: bool) -> Loop:
    steps = bench.size(STEPS, 2)
    length = bench.size(_CONTEXT, 3) + 3 * steps + 64
    runner = _runner(bench, batch, -(-length // BLOCK_SIZE), has_graphs=has_graphs, piecewise_capture_tokens=0)
    return Loop(bench, runner, batch, bench.size(_CONTEXT, 3), steps=3 * steps)


def _runner(bench: Bench, batch: int, blocks: int, *, has_graphs: bool, **fields: Any) -> SizedRunner:
    """For so many sequences of so many blocks."""
    config = Config.from_fields(
        num_kvcache_blocks=batch * (blocks + 1),
        kv_cache_block_size=BLOCK_SIZE,
        max_model_len=blocks * BLOCK_SIZE,
        max_num_seqs=batch,
        max_num_batched_tokens=max(16384, blocks * BLOCK_SIZE),
        enable_prefix_caching=False,
        cpu_operators=False,
        enforce_eager=not has_graphs,
        **({"cudagraph_capture_sizes": (batch,)} if has_graphs else {}),
        **fields,
    )
    loaded = load_shape(bench, config, _FIELDS, IdleDevice(), weights_of_ones)
    assert config.num_kvcache_blocks is not None
    runner = SizedRunner(loaded, config.num_kvcache_blocks)
    if runner.graphs is not None:
        while runner.prepare_while_idle():
            pass
        assert runner.graphs.captured_sizes, "the log says why no graph was captured"
    return runner


def _idle_product(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `F.linear` returns, with nothing in it."""
    del bias
    return x.new_empty(x.shape[0], weight.shape[0])


def _timed(stack: ExitStack) -> dict[str, list[float]]:
    """Seconds of each part, as they come, until the stack is left."""
    took: dict[str, list[float]] = defaultdict(list)

    def clocked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = method(*arguments, **options)
            took[name].append(time.perf_counter() - begin)
            return result

        return call

    for name, owner, method in _PARTS:
        stack.enter_context(patch.object(owner, method, clocked(name, getattr(owner, method))))
    return took
