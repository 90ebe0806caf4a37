"""`KaonHost`: a host that computes ranks for a server elsewhere, as a real process; and ports for them to meet at."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from engine.config import CLUSTER_KEY_ENV, Config

END_SECONDS = 60
KEY = "correct-horse-battery-staple"
FIELDS: dict[str, Any] = {
    "num_kvcache_blocks": 128,
    "max_num_seqs": 32,
    "cpu_threads": 1,
    "device": "cpu",
    "dtype": "float32",
}
"""Settings that every host of a server has in common."""

_RUN = "import sys; from engine.config import Config; from server.serve import run; "
_RUN += "sys.exit(run(Config.model_validate_json(sys.argv[1])))"


def free_ports(host: str = "127.0.0.2") -> int:
    """The first of three ports in a row that nothing listened on a moment ago."""
    while True:
        first = random.randrange(20000, 30000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.create_server((host, port)))
            except OSError:
                continue
            return first


def parallel_fields(port: int, **fields: Any) -> dict[str, Any]:
    """Of two hosts with a rank each, which meet at a second loopback address."""
    common = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.2", "rank_start_timeout": 60.0}
    return {**common, "master_port": port, **fields}


class KaonHost:
    """A process of `kaon serve` with a `node_rank`. `stop` ends it."""

    def __init__(
        self,
        log: Path,
        port: int,
        *,
        key: str = KEY,
        version: str | None = None,
        within: Sequence[str] = (),
        parallel: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """`version`: that it pretends to be of. `within`: a command to run it by."""
        settings = {
            **FIELDS,
            **fields,
            "parallel_config": parallel_fields(port, **{"node_rank": 1, **(parallel or {})}),
        }
        pretend = "" if version is None else f"import importlib.metadata as m; m.version = lambda _: {version!r}; "
        command = [sys.executable, "-P", "-c", pretend + _RUN, Config.model_validate(settings).model_dump_json()]
        self._log = log
        with log.open("w") as output:
            self.process = psutil.Popen(
                [*within, *command],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, CLUSTER_KEY_ENV: key, "OMP_NUM_THREADS": "1"},
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Processes of its ranks."""
        found: list[psutil.Process] = self.process.children()
        return [child for child in found if "rank_process" in " ".join(child.cmdline())]

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        code: int = self.process.wait(END_SECONDS)
        return code

    def stop(self) -> int:
        """End it as a service manager does; its exit code."""
        if self.process.is_running():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        except psutil.TimeoutExpired:
            self.process.kill()
            raise
