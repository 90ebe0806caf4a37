"""`CoreHost`: a host that runs replicas' cores for a server elsewhere, as a real process whose models are stubs."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from engine.config import CLUSTER_KEY_ENV, Config
from tests.e2e.kaon_host import END_SECONDS, KEY

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_RUN = (
    "import sys; from engine import core_process; from engine.config import Config; from server.serve import run; "
    "core_process.CORE_MODULE = 'stub_core'; "
    "sys.exit(run(Config.model_validate_json(sys.argv[1])))"
)


def replica_fields(port: int, **fields: Any) -> dict[str, Any]:
    """Of two hosts with a replica each, which meet at a second loopback address."""
    common = {"data_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.2", "rank_start_timeout": 60.0}
    return {**common, "master_port": port, **fields}


class CoreHost:
    """A process of `kaon serve` with a `node_rank`."""

    def __init__(self, log: Path, port: int, *, parallel: dict[str, Any] | None = None, **fields: Any) -> None:
        settings = {**fields, "parallel_config": replica_fields(port, **{"node_rank": 1, **(parallel or {})})}
        self._log = log
        with log.open("w") as output:
            self.process = psutil.Popen(
                [sys.executable, "-P", "-c", _RUN, Config.model_validate(settings).model_dump_json()],
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**os.environ, CLUSTER_KEY_ENV: KEY, "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _HERE)))},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def cores(self) -> list[psutil.Process]:
        """Processes of its cores."""
        found: list[psutil.Process] = self.process.children()
        return [child for child in found if "kaon-engine" in " ".join(child.cmdline())]

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
