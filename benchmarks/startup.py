"""Time to start a server, to load a checkpoint, and to continue after the engine has died: three tables."""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import httpx
import psutil

from benchmarks.checkpoints import write_random
from benchmarks.report import Table
from benchmarks.served import Served, chunks
from engine.client.llm_engine import LLMEngine
from engine.client.replica import Journal, JournalEntry
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams

STARTS = 7


class Start(NamedTuple):
    """One start: seconds, and resident bytes after a request."""

    ready_seconds: float
    api_bytes: int
    core_bytes: int
    api_maps_torch: bool


def start_once() -> Start:
    """Start `kaon serve`, wait for its start line, send one request, and end it."""
    began = time.monotonic()
    with Served() as server:
        ready = time.monotonic() - began
        body = {"model": "kaon-demo", "prompt": "The capital of France is", "max_tokens": 4}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
        maps_torch = any("torch" in mapped.path for mapped in server.process.memory_maps())
        return Start(ready, server.process.memory_info().rss, server.core.memory_info().rss, maps_torch)


def startup_table(repeats: int = STARTS) -> Table:
    """Medians over `repeats` warm starts."""
    start_once()
    starts = [start_once() for _ in range(repeats)]
    seconds = sorted(start.ready_seconds for start in starts)
    rows = [
        ("command to ready, median s", f"{statistics.median(seconds):.2f}"),
        ("fastest and slowest, s", f"{seconds[0]:.2f} to {seconds[-1]:.2f}"),
        ("API process, resident MB", f"{max(start.api_bytes for start in starts) / 1e6:.0f}"),
        ("API process maps torch", "yes" if any(start.api_maps_torch for start in starts) else "no"),
        ("engine core, resident MB", f"{max(start.core_bytes for start in starts) / 1e6:.0f}"),
    ]
    return Table(
        "Start of the embedded model",
        f"{repeats} starts of `kaon serve` with files in the page cache; memory after one request.",
        "ready within 3 s on two cores; API process at most 150 MB and free of torch.",
        ("figure", "measured"),
        rows,
    )


# Loading a checkpoint that is in the page cache: bandwidth compared with that of reading its files, and peak memory.
# Each measurement is a process of its own: memory that a process touches for the first time costs more than memory
# that it reuses, and a loader can only use the first kind.

LOADS = 5


def loading_table(repeats: int = LOADS) -> Table:
    """Medians over `repeats` processes for each measurement, in turn."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write_checkpoint(directory)
        shards = [file.stat().st_size for file in directory.glob("*.safetensors")]
        model_bytes = sum(shards)
        seconds: dict[str, list[float]] = {}
        peaks = []
        for _ in range(repeats + 1):
            for what in _MEASUREMENTS:
                reported = subprocess.check_output([sys.executable, "-m", "benchmarks.startup", what, name])
                result = json.loads(reported)
                seconds.setdefault(what, []).append(result["seconds"])
                peaks.append(result["peak_bytes"] if what == "load" else 0)
    # The first round fills the page cache.
    medians = {what: statistics.median(found[1:]) for what, found in seconds.items()}
    rows = [
        (what, f"{medians[name]:.2f}", f"{model_bytes / medians[name] / 1e9:.2f}")
        for name, what in (
            ("reuse", "read the files into memory in use"),
            ("fresh", "read the files into fresh memory"),
            ("load", "load the model"),
        )
    ]
    beyond = max(peaks) - model_bytes - max(shards)
    rows.append((f"peak beyond the model and a shard: {beyond / 1e6:.0f} MB", "", ""))
    return Table(
        "Loading",
        f"A checkpoint of {model_bytes / 1e6:.0f} MB in {len(shards)} files, in the page cache; medians of {repeats}.",
        "at least 70 % of the read bandwidth; peak memory at most the model, one file and 300 MB.",
        ("", "s", "GB/s"),
        rows,
    )


def _write_checkpoint(directory: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=14,
        num_attention_heads=16,
        max_position_embeddings=4096,
    )
    write_random(directory, config, largest_file="180MB")


def _load(directory: Path) -> float:
    import torch

    from models.architectures.config import ModelConfig
    from models.loading.loader import load_model
    from models.ops.cpu import runtime

    config = ModelConfig.from_checkpoint(directory)
    runtime.start(torch.get_num_threads())
    torch.empty(1).zero_()
    began = time.perf_counter()
    load_model(directory, config, dtype=torch.bfloat16, device=torch.device("cpu"), progress=False)
    return time.perf_counter() - began


def _read(directory: Path, *, touched: bool) -> float:
    import numpy as np

    files = sorted(directory.glob("*.safetensors"))
    memory = np.empty(sum(file.stat().st_size for file in files), dtype=np.uint8)
    if touched:
        memory.fill(1)
    began, place = time.perf_counter(), memory.data
    for file in files:
        with file.open("rb", buffering=0) as content:
            while size := content.readinto(place[: 1 << 24]):
                place = place[size:]
    return time.perf_counter() - began


_MEASUREMENTS: dict[str, Callable[[Path], float]] = {
    "reuse": lambda directory: _read(directory, touched=True),
    "fresh": lambda directory: _read(directory, touched=False),
    "load": _load,
}


def _measure(what: str, directory: Path) -> None:
    """Print the seconds of one measurement in this process, and its peak memory beyond that before it."""
    import torch  # noqa: F401, its memory is not the loader's

    before = psutil.Process().memory_info().rss
    seconds = _MEASUREMENTS[what](directory)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024 - before}))


# Costs of surviving the engine's death: the time from a kill to the first resumed token, and the journal while nothing
# dies. The server that is killed is a real one; the journal's cost is measured on one engine in this process, with and
# without the journal in turn.

KILLS = 7
ROUNDS = 15
STREAMS = 32
TOKENS = 400
STEPS = 2000


async def _stream(server: Served, arrivals: list[float]) -> None:
    """Read one stream to its end; the times of its chunks are appended to `arrivals`."""
    body = {"model": "kaon-demo", "prompt": "A story", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    async for _ in chunks(server.port, "/v1/completions", body):
        arrivals.append(time.monotonic())


async def recovery(server: Served, streams: int) -> tuple[float, float]:
    """Seconds from the core's kill to the first token of the first and of the last stream that continues."""
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    tasks = [asyncio.create_task(_stream(server, times)) for times in arrivals]
    while min(map(len, arrivals)) < 50:
        await asyncio.sleep(0.01)
    server.core.kill()
    killed = time.monotonic()
    await asyncio.gather(*tasks)
    # Chunks that were sent before the core died still arrive; the longest gap after the kill is the interruption.
    resumed = [max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])[1] for times in arrivals]
    return min(resumed) - killed, max(resumed) - killed


def ratios() -> list[float]:
    """Ratio of the throughput with the journal to that without, over rounds of two turns each; one core serves
    both."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    found = []
    with LLMEngine(cpu_kvcache_gib=0.25) as engine:

        def rate(record: Callable[[Journal, StepOutputs], list[JournalEntry]]) -> float:
            with mock.patch.object(Journal, "record", record):
                began = time.perf_counter()
                engine.generate(["A story"] * STREAMS, params, use_tqdm=False)
                return STREAMS * TOKENS / (time.perf_counter() - began)

        recorded = Journal.record
        rate(recorded)
        for _ in range(ROUNDS):
            # Drift of the machine affects both alike.
            first, second, third, fourth = (rate(each) for each in (recorded, _record_ends, _record_ends, recorded))
            found.append((first + fourth) / (second + third))
    return found


def _record_ends(journal: Journal, step: StepOutputs) -> list[JournalEntry]:
    """A replacement of `Journal.record` without tokens: requests still end."""
    for output in step.outputs:
        if output.finished:
            del journal._entries[output.request_id]
    return []


def journal_cost() -> tuple[float, float]:
    """Microseconds and bytes per token of `Journal.record`, with a token for each request in each step."""

    def filled() -> Journal:
        journal = Journal()
        params = SamplingParams(max_tokens=STEPS, temperature=0.0)
        journal.send(journal.add([AddRequest(id, [1, 2, 3], params) for id in range(STREAMS)]))
        return journal

    steps = [
        StepOutputs([RequestOutput(id, [300 + (step + id) % 1000]) for id in range(STREAMS)]) for step in range(STEPS)
    ]
    seconds = []
    for _ in range(5):
        journal = filled()
        began = time.perf_counter()
        for step in steps:
            journal.record(step)
        seconds.append(time.perf_counter() - began)
    journal = filled()
    tracemalloc.start()
    for step in steps:
        journal.record(step)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(seconds) / (STEPS * STREAMS) * 1e6, grown / (STEPS * STREAMS)


def recovery_table(kills: int = KILLS) -> Table:
    """Medians over the rounds."""
    with Served("--cpu-kvcache-gib", "0.25") as server:
        alone = [asyncio.run(recovery(server, 1))[0] for _ in range(kills)]
        many = [asyncio.run(recovery(server, STREAMS)) for _ in range(kills)]
    microseconds, size = journal_cost()
    compared = ratios()
    firsts, lasts = zip(*many, strict=True)
    rows = [
        ("kill to first resumed token, one stream, s", _spread(alone)),
        (f"the same, the first of {STREAMS} streams, s", _spread(firsts)),
        (f"the same, the last of {STREAMS} streams, s", _spread(lasts)),
        ("journal, µs a token", f"{microseconds:.2f}"),
        ("journal, bytes a token", f"{size:.1f}"),
        ("throughput with the journal over that without", _spread(compared, 3)),
    ]
    return Table(
        "Surviving the engine's death",
        f"SIGKILL of the engine core under streams of the embedded model, median (fastest to slowest) of {kills}. "
        f"Throughput: {STREAMS} requests of {TOKENS} tokens on one engine, {ROUNDS} rounds, each of two turns "
        "with the journal and two without.",
        "first resumed token within 5 s on two cores; the journal at most 2 µs a token, throughput at least 0.99.",
        ("figure", "measured"),
        rows,
    )


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    _measure(sys.argv[1], Path(sys.argv[2]))
