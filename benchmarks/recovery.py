"""What surviving the engine's death costs: from a kill to the first resumed token, and the journal while nothing dies.

Run as `python -m benchmarks.recovery`. The server that is killed is a real one; what the journal costs is seen on one
engine in this process, with the journal and without in turn.
"""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.report import Table
from engine.core_process import CORE_MODULE
from engine.journal import Entry, Journal
from engine.llm_engine import LLMEngine
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
KILLS = 7
ROUNDS = 15
STREAMS = 32
TOKENS = 400
STEPS = 2000


class Served:
    """`kaon serve` with the embedded model."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "server", "serve", "--port", "0", "--cpu-kvcache-gib", "0.25"]
        self.process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True)
        line: str = self.process.stdout.readline()
        self.port = int(next(word for word in line.split() if word.startswith("http://")).rpartition(":")[2])

    def kill_core(self) -> None:
        (core,) = (child for child in self.process.children() if CORE_MODULE in child.cmdline())
        core.kill()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


async def stream(port: int, tokens: int, arrivals: list[float] | None = None) -> None:
    """One stream to its end. The times at which its chunks came go to `arrivals`."""
    fields = {"model": "kaon-demo", "prompt": "A story", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "temperature": 0})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    while line := await reader.readline():
        if arrivals is not None and line.startswith(b"data: {"):
            arrivals.append(time.monotonic())
        if line == b"data: [DONE]\n":
            writer.close()
            return
    raise RuntimeError("the stream was cut")


async def recovery(server: Served, streams: int) -> tuple[float, float]:
    """Seconds from the core's kill to the first token of the first and of the last stream that goes on."""
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    tasks = [asyncio.create_task(stream(server.port, 2000, times)) for times in arrivals]
    while min(map(len, arrivals)) < 50:
        await asyncio.sleep(0.01)
    server.kill_core()
    killed = time.monotonic()
    await asyncio.gather(*tasks)
    # What was on its way when the core died still arrives; the silence after it is the longest there is.
    resumed = [max(itertools.pairwise(times), key=lambda pair: pair[1] - pair[0])[1] for times in arrivals]
    return min(resumed) - killed, max(resumed) - killed


def ratios() -> list[float]:
    """Throughput with the journal over that without, of rounds of two turns each; one core serves both."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    found = []
    with LLMEngine(cpu_kvcache_gib=0.25) as engine:

        def rate(record: Callable[[Journal, StepOutputs], list[Entry]]) -> float:
            with mock.patch.object(Journal, "record", record):
                began = time.perf_counter()
                engine.generate(["A story"] * STREAMS, params, use_tqdm=False)
                return STREAMS * TOKENS / (time.perf_counter() - began)

        recorded = Journal.record
        rate(recorded)
        for _ in range(ROUNDS):
            # Drift of the machine falls on both alike.
            first, second, third, fourth = (rate(each) for each in (recorded, _record_ends, _record_ends, recorded))
            found.append((first + fourth) / (second + third))
    return found


def _record_ends(journal: Journal, step: StepOutputs) -> list[Entry]:
    """What is left of `Journal.record` without tokens: requests still end."""
    for output in step.outputs:
        if output.finished:
            del journal._entries[output.request_id]
    return []


def journal_cost() -> tuple[float, float]:
    """Microseconds and bytes a token that `Journal.record` costs, a token a request a step."""

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


def run(kills: int = KILLS) -> Table:
    """Medians."""
    server = Served()
    try:
        alone = [asyncio.run(recovery(server, 1))[0] for _ in range(kills)]
        many = [asyncio.run(recovery(server, STREAMS)) for _ in range(kills)]
    finally:
        server.end()
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
    sys.stdout.write(run().markdown())
