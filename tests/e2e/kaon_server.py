"""`KaonServer`: a real server process, as the end-to-end tests drive it. Started by the fixtures of `conftest`."""

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from openai import AsyncOpenAI, OpenAI

from engine.config import Config
from tests.e2e.processes import LoggedProcess, run_config

START_SECONDS = 120
MODEL = "kaon-demo"
SETTINGS: dict[str, Any] = {"dtype": "float32", "cpu_kvcache_gib": 0.25, "max_num_seqs": 128}
"""float32, so that greedy text does not depend on what else is in the batch."""


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class KaonServer(LoggedProcess):
    """A server process. `ready` waits for its start line; `stop` ends it."""

    def __init__(self, log: Path, port: int, **settings: Any) -> None:
        settings = {**SETTINGS, **settings}
        settings["server_config"] = {"port": port, **settings.get("server_config", {})}
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(run_config(Config.model_validate(settings)), log)

    def ready(self) -> Self:
        """Wait until it serves; the start line is then in `start_line`."""
        self.start_line: str = self.process.stdout.readline()
        if not self.start_line:
            raise RuntimeError(f"the server ended with {self.process.wait()}: {self.stderr}")
        return self

    @property
    def core(self) -> psutil.Process:
        """The engine core's process."""
        (core,) = (child for child in self.process.children() if "engine.structured.checker" not in child.cmdline())
        return core

    def stop(self) -> int:
        """End it as Ctrl-C does; its exit code."""
        return self.end_by(signal.SIGINT)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=START_SECONDS)

    def metric(self, sample: str) -> float:
        """The value of one sample, named as in the text format."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, f"{sample} is not in /metrics"
        return float(found[1])

    def connect(self, path: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
        """A raw connection on which a POST has been sent; `receive_buffer`: the most that waits there, in bytes."""
        content = json.dumps(body).encode()
        connection = socket.socket()
        connection.settimeout(START_SECONDS)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content))
        )
        connection.sendall(content)
        return connection


def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()`; fail when it does not within a generous time."""
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)
