"""`Server`: the one server against which all suites run, observed from outside."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

MODEL = "kaon-demo"
API_KEY = "conformance"
CHECKPOINT = Path(__file__).parents[2] / "models" / "demo" / "checkpoint"

_FLAGS = ("--port", "0", "--api-key", API_KEY, "--access-log", "json")
# float32, so that greedy text and log probabilities do not depend on the rest of the batch.
_FLAGS += ("--dtype", "float32", "--cpu-kvcache-gib", "0.25", "--max-num-seqs", "64")
_START_SECONDS = 120
_CORE, _SCRIPTED_CORE = "engine.core.main", "scripted_core"
_SCRIPTED_FLAGS = ("--reasoning-parser", "think")


class StartError(RuntimeError):
    """The server does not start; the message ends with its log."""


class Server:
    """`kaon serve` from the project's environment, from `__enter__` to `__exit__`."""

    def __init__(self, log: Path, script: Path | None = None, flags: Sequence[str] = ()) -> None:
        """`script`: rules for the model's answers, as `tests.e2e.scripted_core` reads them; `flags`: the server's own
        flags."""
        self._flags = flags
        self._log = log
        self._script = script
        self._read = 0

    def __enter__(self) -> "Server":
        command = [str(Path(sys.executable).with_name("kaon")), "serve", *_FLAGS, *self._flags]
        if self._script is not None:
            module = "tests.e2e.scripted_server"
            command = [sys.executable, "-m", module, str(self._script), *_FLAGS, *_SCRIPTED_FLAGS, *self._flags]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " on http" not in line:
            self.process.wait(_START_SECONDS)
            raise StartError(f"the server did not start: {self._log.read_text()[-2000:]}")
        self.url = line.split(" on ", 1)[1].split()[0]
        self.core = self._core()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def complaints(self) -> list[str]:
        """Internal errors of the server since the last call; there should be none."""
        found = []
        if self.process.poll() is not None:
            found.append(f"the server ended with {self.process.returncode}")
        elif self._core() != self.core:
            found.append(f"the engine core was process {self.core} and is {self._core() or 'gone'}")
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = text[self._read :].splitlines()
        self._read = len(text)
        found += [f"answered {line}" for line in lines if is_server_error(line)]
        found += [f"logged {line}" for line in lines if line.startswith("Traceback")]
        return found

    def _core(self) -> int | None:
        """The engine core's process id; None if there is no core, or several."""
        command = ["ps", "-A", "-ww", "-o", "ppid=,pid=,args="]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [row.split(None, 2) for row in listed.splitlines()]
        core = _CORE if self._script is None else _SCRIPTED_CORE
        cores = [int(pid) for parent, pid, *args in rows if int(parent) == self.process.pid and core in args[0]]
        return cores[0] if len(cores) == 1 else None


def is_server_error(line: str) -> bool:
    """Whether a line of the log reports a request that was answered with a 5xx."""
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and isinstance(entry.get("status"), int) and entry["status"] >= 500
