"""`KaonServer`: a real server process, as the end-to-end tests drive it. Started by the fixtures of `conftest`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from openai import AsyncOpenAI, OpenAI

from engine.config import Config

START_SECONDS = 120
MODEL = "kaon-demo"
SETTINGS: dict[str, Any] = {"dtype": "float32", "cpu_kvcache_gib": 0.25, "max_num_seqs": 128}
"""float32, so that greedy text does not depend on what else is in the batch."""

_RUN = "import sys; from engine.config import Config; from server.serve import run; "
_RUN += "sys.exit(run(Config.model_validate_json(sys.argv[1])))"


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class KaonServer:
    """A server process. `ready` waits for its start line; `stop` ends it."""

    def __init__(self, log: Path, port: int, **settings: Any) -> None:
        settings = {**SETTINGS, **settings}
        settings["server_config"] = {"port": port, **settings.get("server_config", {})}
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("w") as output:
            self.process = psutil.Popen(
                [sys.executable, "-P", "-c", _RUN, Config.model_validate(settings).model_dump_json()],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ready(self) -> Self:
        """Wait until it serves; the start line is then in `start_line`."""
        self.start_line: str = self.process.stdout.readline()
        if not self.start_line:
            raise RuntimeError(f"the server ended with {self.process.wait()}: {self.stderr}")
        return self

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    @property
    def core(self) -> psutil.Process:
        """The engine core's process."""
        (core,) = (child for child in self.process.children() if "engine.structured.checker" not in child.cmdline())
        return core

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        code: int = self.process.wait(START_SECONDS)
        return code

    def stop(self) -> int:
        """End it as Ctrl-C does; its exit code."""
        if self.process.is_running():
            self.process.send_signal(signal.SIGINT)
        try:
            return self.wait()
        except psutil.TimeoutExpired:
            self.process.kill()
            raise

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
