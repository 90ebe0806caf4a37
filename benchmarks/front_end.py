"""CPU time of the API process a streamed chunk: from the engine's message to the socket, everything included.

Run as `python -m benchmarks.front_end`. The server is a real process; `benchmarks.stub_core` feeds it over the real
ZMQ sockets at a fixed pace; the client reads over TCP in this process. User and system time of the server count.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from typing import NamedTuple

import psutil

from benchmarks.report import Table
from benchmarks.served import ROOT, chunks
from benchmarks.stub_core import STEP_SECONDS

REPEATS = 5


class Load(NamedTuple):
    """One row of the table."""

    endpoint: str
    streams: int
    tokens: int
    step_seconds: float


FLOOR = Load("(bare uvloop write)", 1, 4000, 0.001)
"""A server that only writes 250 bytes per step: the cost of a chunk that the machine itself causes."""

LOADS = (
    FLOOR,
    Load("/v1/completions", 1, 4000, 0.001),
    Load("/v1/chat/completions", 1, 4000, 0.001),
    Load("/v1/completions", 64, 600, 0.012),
    Load("/v1/chat/completions", 64, 600, 0.012),
    Load("/v1/completions", 256, 200, 0.04),
    Load("/v1/chat/completions", 256, 200, 0.04),
)


class Result(NamedTuple):
    chunks: int
    cpu_seconds: float
    wall_seconds: float


async def measure(load: Load, port: int, server: psutil.Process) -> Result:
    """Run `load` once. Returns the number of chunks that arrived, and the server's processor time for them."""
    loop = asyncio.get_running_loop()
    before, start = server.cpu_times(), loop.time()
    counts = await asyncio.gather(*(_stream(load, port) for _ in range(load.streams)))
    after, end = server.cpu_times(), loop.time()
    return Result(sum(counts), after.user + after.system - before.user - before.system, end - start)


async def _stream(load: Load, port: int) -> int:
    """Number of chunks of one stream."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in load.endpoint else {"prompt": "Hi"}
    body = {"model": "kaon-demo", "max_tokens": load.tokens, **prompt}
    return sum([1 async for _ in chunks(port, load.endpoint, body)])


def serve_floor(port: int) -> None:
    """Answers any request with a stream of equal chunks."""
    import uvloop

    chunk = b"data: {" + b"x" * 242 + b"\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"}")
        for _ in range(json.loads(request[request.index(b"{") :])["max_tokens"]):
            await asyncio.sleep(FLOOR.step_seconds)
            writer.transport.write(chunk)
        writer.write(b"data: [DONE]\n")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await server.serve_forever()

    uvloop.run(main())


def serve(port: int) -> int:
    """A server whose core is the stub."""
    from engine.config.config import Config
    from engine.config.server import ServerConfig
    from engine.distributed import core_process
    from server.process import run

    core_process.CORE_MODULE = "benchmarks.stub_core"
    return run(Config(server_config=ServerConfig(port=port, log_level="warning")))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def run_load(load: Load, repeats: int) -> list[Result]:
    """Measure a new server under `load`, `repeats` times after a warm-up."""
    port = _free_port()
    what = "--serve-floor" if load is FLOOR else "--serve"
    command = [sys.executable, "-m", "benchmarks.front_end", what, str(port)]
    environment = {**os.environ, STEP_SECONDS: str(load.step_seconds)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            server = psutil.Process(process.pid)
            asyncio.run(measure(load._replace(tokens=50), port, server))
            return [asyncio.run(measure(load, port, server)) for _ in range(repeats)]
        finally:
            process.terminate()


def front_end_table(repeats: int = REPEATS) -> Table:
    """Best and median of the repeats, by endpoint and number of streams."""
    rows = []
    for load in LOADS:
        results = run_load(load, repeats)
        costs = sorted(result.cpu_seconds / result.chunks * 1e6 for result in results)
        chunks = results[0].chunks
        rate = chunks / results[0].wall_seconds
        median = statistics.median(costs)
        rows.append((load.endpoint, str(load.streams), f"{rate:.0f}", f"{costs[0]:.1f}", f"{median:.1f}"))
    return Table(
        "Front end",
        "CPU time of the API process for each streamed chunk, user and system, from the engine's message to the "
        "socket. The engine core is a stub. The first row is a server that does nothing but write. "
        f"{repeats} repeats.",
        "at most 40 µs a chunk of a completion.",
        ("endpoint", "streams", "chunks/s", "µs a chunk, best", "median"),
        rows,
    )


def main() -> None:
    """Print the table, or run as one of the servers that it measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--serve-floor", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_floor is not None:
        serve_floor(arguments.serve_floor)
    if arguments.serve is not None:
        sys.exit(serve(arguments.serve))
    sys.stdout.write(front_end_table().markdown())


if __name__ == "__main__":
    main()
