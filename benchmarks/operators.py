"""Where the CPU's time goes in a prompt and in a decode step: each compiled operator timed by itself."""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from benchmarks.decoding import ROUNDINGS, write_checkpoint
from benchmarks.report import Table
from engine.config.config import Config, PrecisionConfig
from engine.core.scheduler import Scheduler
from engine.runner.loaded_model import load_model, start_operators
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as EngineSequence
from models.architectures.config import ModelConfig
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.structures import Arguments, Step

PROMPT = 2048
BATCH, CONTEXT, STEPS = 8, 64, 9
_BLOCKS = 1024

_Seconds = dict[str, float]
"""Seconds of all operators of a kind and shape, in one step."""


class _Timed:
    """The operators, of which each run is timed."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.seconds: _Seconds = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def run(self, operations: Operations, step: Step, first: int = 0, *, may_pause: bool = False) -> int:
        del may_pause
        for arguments in operations.arguments[first:]:
            one = Operations((arguments,))
            began = perf_counter()
            self._library.run(one, step)
            self.seconds[_name_of(arguments)] += perf_counter() - began
        return len(operations) - first


def _name_of(arguments: Arguments) -> str:
    """A product's inputs and outputs, or the kind of another operator."""
    inner = next((each for each in _fields(arguments) if isinstance(each, Arguments)), arguments)
    outputs = getattr(inner, "out_features", None)
    if outputs is None:
        return type(arguments).__name__
    gated = ", gated" if "Gated" in type(arguments).__name__ else ""
    return f"product of {inner.in_features} inputs by {outputs} outputs{gated}"


def _fields(arguments: Arguments) -> Iterator[Any]:
    return (getattr(arguments, field[0]) for field in arguments._fields_)


def measure(path: Path, rounding: str, prompt: int, steps: int) -> tuple[_Seconds, _Seconds]:
    """Seconds by operator of a prompt, and medians of `steps` decode steps of `BATCH` sequences."""
    model, device = ModelConfig.from_checkpoint(path), torch.device("cpu")
    config = Config(
        num_kvcache_blocks=_BLOCKS,
        max_num_seqs=BATCH,
        max_num_batched_tokens=prompt,
        max_model_len=prompt + 64,
        eos_token_id=0,
        enable_prefix_caching=False,
        pack_cache=False,
        quantization_config=PrecisionConfig.model_validate({"quantization": rounding}),
    )
    operators = start_operators(config, device, torch.bfloat16)
    assert operators is not None, "the operators are built"
    loaded = load_model(config, path, model, device, torch.bfloat16, operators=operators)
    timed = _Timed(operators)
    runner = ModelRunner(replace(loaded, operators=cast("Library", timed)), _BLOCKS)
    _run(config, runner, timed, 1, CONTEXT, 2)
    of_prompt = _run(config, runner, timed, 1, prompt, 1)[0]
    decodes = _run(config, runner, timed, BATCH, CONTEXT, 1 + steps)[1:]
    return of_prompt, {name: statistics.median(each[name] for each in decodes) for name in decodes[0]}


def _run(config: Config, runner: ModelRunner, timed: _Timed, rows: int, length: int, steps: int) -> list[_Seconds]:
    """Seconds of the first steps of `rows` sequences, of which the first computes their prompts."""
    scheduler = Scheduler(config)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for row in range(rows):
        tokens = [3 + (7 * row + 11 * position) % 1500 for position in range(length)]
        scheduler.add(EngineSequence(tokens, config.kv_cache_block_size, params, id=row))
    found = []
    for _ in range(steps):
        timed.seconds.clear()
        scheduled = scheduler.schedule()
        assert scheduled is not None
        batch, seqs = scheduled
        output = runner.forward(batch)
        found.append(dict(timed.seconds))
        scheduler.postprocess(list(seqs.values()), output)
    return found


def operators_table(roundings: Sequence[str] = ROUNDINGS, prompt: int = PROMPT, steps: int = STEPS) -> Table:
    """One prompt, and the medians of `steps` decode steps, by each storage of the weights."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        columns = [seconds for rounding in roundings for seconds in measure(Path(name), rounding, prompt, steps)]
    names = sorted(set().union(*columns), key=lambda name: -sum(column.get(name, 0) for column in columns))
    rows = [(name, *(f"{column[name] * 1e3:.4g}" if name in column else "" for column in columns)) for name in names]
    rows.append(("all operators", *(f"{sum(column.values()) * 1e3:.4g}" for column in columns)))
    stored = ["bfloat16" if rounding == "auto" else rounding for rounding in roundings]
    return Table(
        "Operators",
        f"Milliseconds of the compiled operators, each timed by itself: random weights in the shape of a 0.6B model, "
        f"a prompt of {prompt} tokens, and a decode step of {BATCH} sequences after {CONTEXT} tokens (medians of "
        f"{steps}).",
        "none; it shows where a step's time goes.",
        ("", *(f"{what}, {each}" for each in stored for what in ("prompt", f"{BATCH} rows"))),
        rows,
    )
