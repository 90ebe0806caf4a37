"""`KaonHost`: a host that computes ranks for a server on another host, as a real process; and ports for the
rendezvous."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from engine.config.config import CLUSTER_KEY_ENV, Config
from tests import ports
from tests.e2e.processes import LoggedProcess, command_line, run_config

KEY = "correct-horse-battery-staple"
FIELDS: dict[str, Any] = {
    "num_kvcache_blocks": 128,
    "max_num_seqs": 32,
    "cpu_threads": 1,
    "device": "cpu",
    "dtype": "float32",
}
"""Settings that all hosts of a server share."""


def free_ports(host: str = "127.0.0.2") -> int:
    """The first of four consecutive free ports, which no other test process is given."""
    return ports.free_ports(host, 4)


def parallel_fields(port: int, **fields: Any) -> dict[str, Any]:
    """Settings of two hosts with a rank each, whose rendezvous is at a second loopback address."""
    common = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.2", "rank_start_timeout": 120.0}
    return {**common, "master_port": port, **fields}


class KaonHost(LoggedProcess):
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
        """`version`: the version that it reports. `within`: a command to run it by."""
        settings = {
            **FIELDS,
            **fields,
            "parallel_config": parallel_fields(port, **{"node_rank": 1, **(parallel or {})}),
        }
        pretend = "" if version is None else f"import importlib.metadata as m; m.version = lambda _: {version!r}; "
        command = run_config(Config.model_validate(settings), pretend)
        super().__init__([*within, *command], log, **{CLUSTER_KEY_ENV: key})

    def ranks(self) -> list[psutil.Process]:
        """Processes of its ranks."""
        found: list[psutil.Process] = self.process.children()
        return [child for child in found if "rank_process" in " ".join(command_line(child))]

    def stop(self) -> int:
        """End it as a service manager does. Returns its exit code."""
        return self.end_by(signal.SIGTERM)
