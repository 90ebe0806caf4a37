"""Tokens per second through `LLMEngine`, compared with transformers' continuous batching."""

import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.checkpoints import QWEN3_06B, Checkpoint, write
from benchmarks.gpu.bench import Bench, Case, Values, first_line
from benchmarks.gpu.steps import random_ids
from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

_SHARE = 0.4
"""Share of the device's memory for each of the two, which run in turn."""
_DRY = Checkpoint(
    "dry",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
    },
)
_PEER = "transformers"


class Load(NamedTuple):
    """Requests that are sent at the same time."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens to generate."""
        return sum(self.max_tokens)


class Kaon:
    """`LLMEngine` in a process of its own."""

    def __init__(self, bench: Bench, path: Path) -> None:
        fields: dict[str, Any] = {"num_kvcache_blocks": 400} if bench.is_dry else {"gpu_memory_utilization": _SHARE}
        self._engine = LLMEngine(
            str(path),
            device=bench.device.type,
            max_num_seqs=256,
            max_model_len=bench.size(2304, 128),
            enable_prefix_caching=False,
            **fields,
        )

    def generate(self, load: Load) -> int:
        """Run a load. Returns the number of generated tokens."""
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in load.max_tokens]
        results = self._engine.generate(load.prompts, params, use_tqdm=False)
        return sum(len(result["token_ids"]) for result in results)

    def close(self) -> None:
        """End its process."""
        self._engine.close()


class Transformers:
    """The manager of `generate_batch`, with a length for each request."""

    def __init__(self, bench: Bench, path: Path) -> None:
        transformers = importlib.import_module("transformers")
        self._model = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=bench.dtype, trust_remote_code=False)
            .to(bench.device)
            .eval()
        )
        self._config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching: dict[str, Any] = (
            {"num_blocks": 64, "max_batch_tokens": 64} if bench.is_dry else {"max_memory_percent": 0.8}
        )
        self._batching = transformers.ContinuousBatchingConfig(**batching)

    def generate(self, load: Load) -> int:
        """Run a load. Returns the number of generated tokens. Raises `RuntimeError` if the manager stops."""
        count = 0
        with self._model.continuous_batching_context_manager(
            generation_config=self._config,
            continuous_batching_config=self._batching,
            timeout=30,
            persistent_manager=True,
        ) as manager:
            for prompt, most in zip(load.prompts, load.max_tokens, strict=True):
                manager.add_request(prompt, max_new_tokens=most, eos_token_id=-1)
            waiting = len(load.prompts)
            while waiting:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its generation ended before all requests were done")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"a request failed: {result.error}")
                    waiting -= 1
                    count += len(result.generated_tokens)
        return count

    def close(self) -> None:
        """Release its memory."""
        del self._model
        gc.collect()


def engine_cases(bench: Bench) -> Iterator[Case]:
    """Compare both engines by case; both start before the first case, and run in turn in each."""
    contestants = _Contestants(bench)
    mixed = "256 x 100 to 1024 / 100 to 1024"
    yield Case(mixed, lambda: contestants.measure(*[_mixed(bench)] * 2))
    for streams in bench.size((1, 64, 256) if bench.is_quick else (1, 8, 32, 64, 128, 256), (2,)):
        yield Case(f"{streams} x 1024 / 1024", lambda streams=streams: contestants.measure(*_loads(bench, streams)))  # type: ignore[misc]
    contestants.close()


class _Contestants:
    """A running engine, or the reason why it does not run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._running: dict[str, Kaon | Transformers] = {}
        self._failed: dict[str, str] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def measure(self, load: Load, of_both: Load) -> Values:
        """Kaon's rate with one load, and the rates of both with another. Raises what Kaon's failure raises.

        The peer's failure is reported in its column.
        """
        if self._folder is None:
            self._start()
        values: Values = {"Kaon, tok/s": self._rate("Kaon", load)}
        ours = values["Kaon, tok/s"]
        if of_both is not load:
            ours = values[f"Kaon, tok/s of {of_both.max_tokens[0]}"] = self._rate("Kaon", of_both)
        column = f"{_PEER}, tok/s" + ("" if of_both is load else f" of {of_both.max_tokens[0]}")
        if _PEER not in self._failed:
            try:
                values[column] = self._rate(_PEER, of_both)
                values["Kaon is"] = f"{ours / values[column]:.2f} x"  # type: ignore[operator]
            # A peer may fail with any error.
            except Exception as error:  # noqa: BLE001
                self._failed[_PEER] = first_line(error)
        if _PEER in self._failed:
            values[column] = self._failed[_PEER]
        return values

    def _rate(self, name: str, load: Load) -> float:
        begin = time.perf_counter()
        count = self._running[name].generate(load)
        took = time.perf_counter() - begin
        if count != load.num_tokens:
            raise RuntimeError(f"{name} generated {count} tokens of {load.num_tokens}")
        return count / took

    def close(self) -> None:
        """End the engines."""
        for one in self._running.values():
            one.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = write(_DRY if self._bench.is_dry else QWEN3_06B, Path(self._folder.name))
        warm = _even(self._bench, 2)._replace(max_tokens=[8, 8])
        kinds: dict[str, Callable[[Bench, Path], Kaon | Transformers]] = {"Kaon": Kaon, _PEER: Transformers}
        for name, kind in kinds.items():
            try:
                self._running[name] = kind(self._bench, path)
                self._running[name].generate(warm)
            # A peer may fail with any error.
            except Exception as error:
                if name != _PEER:
                    raise
                self._failed[name] = first_line(error)
        # Graphs of all sizes are captured between steps: a short run of all loads comes first.
        if not self._bench.is_dry:
            self._running["Kaon"].generate(_even(self._bench, 256)._replace(max_tokens=[64] * 256))


def _mixed(bench: Bench) -> Load:
    """The load of nano-vllm's published benchmark."""
    count, (least, most) = bench.size(256, 3), bench.size((100, 1024), (3, 9))
    rng = np.random.default_rng(0)
    lengths, tokens = rng.integers(least, most + 1, count), rng.integers(least, most + 1, count)
    return Load([random_ids(int(n), 1024, row) for row, n in enumerate(lengths)], tokens.tolist())


def _loads(bench: Bench, streams: int) -> tuple[Load, Load]:
    """Yield the loads; the second is small enough for a slow peer."""
    load = _even(bench, streams)
    return load, load._replace(max_tokens=[bench.size(128, 4)] * streams)


def _even(bench: Bench, streams: int) -> Load:
    length = bench.size(1024, 8)
    return Load([random_ids(length, 1024, row) for row in range(streams)], [length] * streams)
