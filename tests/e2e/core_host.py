"""`CoreHost`: a host that runs replicas' cores for a server on another host, as a real process with stub models."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil

from engine.config.config import CLUSTER_KEY_ENV, Config
from tests.e2e.kaon_host import KEY
from tests.e2e.processes import STUB_CORES, LoggedProcess, command_line, run_config

_HERE = Path(__file__).parent
_PATH = os.pathsep.join(map(str, (_HERE.parents[1], _HERE)))


def replica_fields(port: int, **fields: Any) -> dict[str, Any]:
    """Settings of two hosts with a replica each, whose rendezvous is at a second loopback address."""
    common = {"data_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.2", "rank_start_timeout": 120.0}
    return {**common, "master_port": port, **fields}


class CoreHost(LoggedProcess):
    """A process of `kaon serve` with a `node_rank`."""

    def __init__(self, log: Path, port: int, *, parallel: dict[str, Any] | None = None, **fields: Any) -> None:
        settings = {**fields, "parallel_config": replica_fields(port, **{"node_rank": 1, **(parallel or {})})}
        command = run_config(Config.model_validate(settings), STUB_CORES)
        super().__init__(command, log, **{CLUSTER_KEY_ENV: KEY, "PYTHONPATH": _PATH})

    def cores(self) -> list[psutil.Process]:
        """Processes of its cores."""
        found: list[psutil.Process] = self.process.children()
        return [child for child in found if "kaon-engine" in " ".join(command_line(child))]

    def stop(self) -> int:
        """End it as a service manager does. Returns its exit code."""
        return self.end_by(signal.SIGTERM)
