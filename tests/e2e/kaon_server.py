"""`KaonServer`: a real server process of the end-to-end tests. The fixtures of `conftest` start it."""

import json
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from engine.config.config import Config
from tests import ports
from tests.e2e.processes import LoggedProcess, command_line, run_config

START_SECONDS = 120
MODEL = "kaon-demo"
LASTING: dict[str, Any] = {"dtype": "float32"}
"""Settings of servers whose long requests must not end before the test has acted."""

SETTINGS: dict[str, Any] = {"cpu_kvcache_gib": 0.25, "max_num_seqs": 128}
"""The embedded model's dtype is bfloat16. By the compiled operators a token takes a fifth of the time that it takes in
float32, and text does not depend on the rest of the batch either. Where they were not built, it would in bfloat16."""
if find_spec("models.ops.cpu._library") is None:
    SETTINGS["dtype"] = "float32"

_DESCRIBES_LATER = (
    "import sys; from server.openapi import Description; begin = Description.begin; "
    "Description.begin = lambda self: None if sys._getframe(1).f_code.co_name == 'lifespan' else begin(self); "
)
"""Makes the description of the API when it is asked for: at a start it takes an eighth of the processor time."""

PLAIN_HTTP = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Value for `verify` of a client that needs no certificates: loading the system's takes 60 ms per client."""


def free_port() -> int:
    """A free port, which no other test process is given."""
    return ports.free_ports()


class KaonServer(LoggedProcess):
    """A server process. `ready` waits for its start line; `stop` ends it."""

    def __init__(
        self, log: Path, port: int, *, before: str = "", environment: dict[str, str] | None = None, **settings: Any
    ) -> None:
        """`before` is Python code that runs first; `environment` holds further variables."""
        settings = {**SETTINGS, **settings}
        settings["server_config"] = {"port": port, **settings.get("server_config", {})}
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        command = run_config(Config.model_validate(settings), _DESCRIBES_LATER + before)
        super().__init__(command, log, **(environment or {}))

    def ready(self) -> Self:
        """Wait until it is ready; the start line is then in `start_line`."""
        self.start_line: str = self.process.stdout.readline()
        if not self.start_line:
            raise RuntimeError(f"the server ended with {self.process.wait()}: {self.stderr}")
        return self

    @property
    def core(self) -> psutil.Process:
        """The process of the engine core, which runs."""
        (core,) = self.cores()
        return core

    def cores(self) -> list[psutil.Process]:
        """The running engine cores: none before the first begins, and for a short time while it is replaced."""
        return [child for child in self.process.children() if is_core(child)]

    def stop(self) -> int:
        """End it as Ctrl-C does. Returns its exit code."""
        return self.end_by(signal.SIGINT)

    def end(self) -> None:
        """End it in any state."""
        self.stop()

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Yield the ready server, which must then end with code 0 and without a traceback. After an error, end it."""
        try:
            yield self.ready()
            assert self.stop() == 0
            assert "Traceback" not in self.stderr
        finally:
            self.end()

    def client(self) -> OpenAI:
        http = DefaultHttpxClient(verify=PLAIN_HTTP)
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS, http_client=http
        )

    def async_client(self) -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(verify=PLAIN_HTTP)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS, http_client=http
        )

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=START_SECONDS, verify=PLAIN_HTTP)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=START_SECONDS, verify=PLAIN_HTTP)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=START_SECONDS, verify=PLAIN_HTTP)

    def metric(self, sample: str) -> float:
        """The value of one sample, named as in the text format."""
        text = self.get("/metrics").text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found, f"{sample} is not in /metrics"
        return float(found[1])

    def connect(self, path: str, body: dict[str, Any], *, holds_little: bool = False) -> socket.socket:
        """A raw connection on which a POST has been sent; `holds_little`: with small buffers, for an answer that is
        not read."""
        content = json.dumps(body).encode()
        connection = socket.socket()
        connection.settimeout(START_SECONDS)
        if holds_little:
            hold_little(connection)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content))
        )
        connection.sendall(content)
        return connection


def hold_little(connection: socket.socket) -> None:
    """Limit the buffers before connecting: then 80 KB of an answer that is not read fill the connection, instead of 3
    MB."""
    # The window that the other side is offered is determined when connecting.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # The other side's buffer grows with the size of a segment, which on one machine is 64 KB.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1200)


def is_core(process: psutil.Process) -> bool:
    return any(each.startswith("kaon-engine-") for each in command_line(process))


def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail after a generous timeout."""
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)
