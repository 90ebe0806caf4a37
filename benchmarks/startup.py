"""Start of the embedded model: seconds from the command to readiness, and the memory of both processes.

Run as `python -m benchmarks.startup`. A start is warm: one run before the measured ones fills the page cache.
"""

import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import httpx
import psutil

from benchmarks.report import Table

REPEATS = 7


class Start(NamedTuple):
    """One start: seconds, and resident bytes after a request."""

    ready_seconds: float
    api_bytes: int
    core_bytes: int
    api_maps_torch: bool


def start_once() -> Start:
    """Start `kaon serve`, wait for its start line, ask one question, and end it."""
    began = time.monotonic()
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-level", "warning"]
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line: str = process.stdout.readline()
        ready = time.monotonic() - began
        url = next(word for word in line.split() if word.startswith("http://"))
        body = {"model": "kaon-demo", "prompt": "The capital of France is", "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=30).raise_for_status()
        (core,) = process.children()
        maps_torch = any("torch" in mapped.path for mapped in process.memory_maps())
        return Start(ready, process.memory_info().rss, core.memory_info().rss, maps_torch)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def run(repeats: int = REPEATS) -> Table:
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
        f"Warm starts of `kaon serve`, {repeats} of them; memory after one request.",
        "ready within 3 s on two cores; API process at most 150 MB and free of torch.",
        ("figure", "measured"),
        rows,
    )


if __name__ == "__main__":
    sys.stdout.write(run().markdown())
