"""`Served`: a running `kaon serve` with the embedded model; and `chunks`, of one of its streams."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from engine.distributed.core_process import CORE_MODULE

ROOT = Path(__file__).parent.parent


class Served:
    """The server, from its construction to the end of a `with`."""

    def __init__(self, *flags: str) -> None:
        """Start it with these flags, and wait until it is ready."""
        command = [sys.executable, "-m", "server", "serve", "--port", "0", "--log-level", "warning", *flags]
        self.process = psutil.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        line: str = self.process.stdout.readline()
        self.url = next(word for word in line.split() if word.startswith("http://"))
        self.port = int(self.url.rpartition(":")[2])

    @property
    def core(self) -> psutil.Process:
        """The process of its engine core."""
        (core,) = (child for child in self.process.children() if CORE_MODULE in child.cmdline())
        return core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(60)


async def chunks(port: int, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The chunks of a streamed answer, as they arrive. Raises `RuntimeError` if it is refused or cut."""
    request = json.dumps({**body, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(request)}\r\n\r\n"
    writer.write(f"{head}{request}".encode())
    try:
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"the request was refused: {status.decode().strip()}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                yield line
            if line == b"data: [DONE]\n":
                return
    finally:
        writer.close()
    raise RuntimeError("the stream was cut")
