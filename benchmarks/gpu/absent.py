"""An emulated GPU: kernels are launched as for the real one and compute nothing; and the engine's loop over it."""

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
from engine.commands.kernel_build import AbsentDevice
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.runner import loaded_model
from engine.runner.device import EagerGraph, Graph
from engine.runner.model_runner import ModelRunner
from engine.runner.step_results import LaunchedStep
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
"""A replacement of `triton.compiler.compile`: it receives a source, a target and options."""


def nothing(*_: object) -> None:
    """The result of an idle kernel for any arguments."""


IDLE_KERNEL = SimpleNamespace(run=nothing, launch_metadata=nothing, function=None, packed_metadata=None)
"""An object that Triton accepts as a compiled kernel."""


class AbsentBench(Bench):
    """Costs on the host of launching kernels for an emulated GPU."""

    def __init__(self, *, is_dry: bool = False) -> None:
        self.is_quick, self.is_dry = False, is_dry
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        torch.manual_seed(0)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


@contextmanager
def on(target: Target, compile: Compile = lambda src, target, options: IDLE_KERNEL) -> Iterator[None]:
    """Within it, tensors of the CPU count as tensors of the emulated GPU. `compile` is called once for each form of a
    kernel."""
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


# Host time of a turn of the engine's loop: to schedule, launch and read a decode step, without a device. The model has
# the layers and heads of Qwen3-0.6B, with small weights and head dimensions: the host's work is the same. Kernels are
# launched as for an emulated GPU (`absent`); torch's products allocate their results and compute nothing; a graph's
# replay does nothing. Copies and events are those of a CPU.

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
"""The phases of a turn, in order: the column, and the method that is timed."""


class IdleDevice(AbsentDevice):
    """A device whose graphs are empty and whose memory is the host's."""

    def __init__(self) -> None:
        self.memory = None

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        del run
        return EagerGraph(lambda: None)


def weights_of_ones(
    path: Path, config: CheckpointConfig, *, dtype: torch.dtype, parallel: TensorParallel, **_: object
) -> CausalLM:
    """A replacement of `loader.load_model`: weights that occupy no memory."""
    assert isinstance(config, ModelConfig)
    model = ARCHITECTURES[config.architecture].model_class(config, parallel)
    for parameter in model.parameters():
        parameter.data = torch.ones(parameter.shape, dtype=dtype)
    return cast(CausalLM, model.eval())


def first_tokens(src: Any, target: object, options: object) -> Any:
    """A compiled kernel that does nothing, except that the argmax is always token 0, because tokens are read.

    It replaces Triton's compiler.
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
    """Time turns for each batch size, with and without graphs."""
    for batch in bench.size((64, 256), (2,)):
        for has_graphs in (True, False):
            name = f"{batch} sequences, {'replayed' if has_graphs else 'eager'}"
            yield Case(name, lambda b=batch, g=has_graphs: measure_turn(bench, b, has_graphs=g))  # type: ignore[misc]
    for tokens in (0, _PROMPT):
        name = f"a prompt of {_PROMPT} tokens, {'replayed in pieces' if tokens else 'eager'}"
        yield Case(name, lambda t=tokens: measure_prompt(bench, t))  # type: ignore[misc]


def measure_prompt(bench: Bench, captured_tokens: int) -> Values:
    """The median time of a prompt's step, with graphs for `tokens` tokens."""
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
    """Medians of a turn and of its phases; reading waits for nothing."""
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
    """Write the block tables of `batch` sequences of `blocks` blocks each."""
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
    """A tensor like the result of `F.linear`, not initialised."""
    del bias
    return x.new_empty(x.shape[0], weight.shape[0])


def _timed(stack: ExitStack) -> dict[str, list[float]]:
    """Collect the seconds of each phase until the stack is closed."""
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
