"""A contestant of the peers' benchmarks from its start to its end, with a server that invents its answers."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.checkpoints import Checkpoint
from benchmarks.peers import measure as measure_module
from benchmarks.peers.load import WORKLOADS, Workload
from benchmarks.peers.measure import MACHINE, MATRIX, READ, Measurement, ServerError, measure, measure_machine
from benchmarks.peers.servers import Command, Contestant
from benchmarks.report import processor
from tests.e2e.processes import END_SECONDS, wait_gone

SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

print("starting", flush=True)
holding = "import time; held = b'x' * (60 << 20); print('held', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
refusals = [503] * 2

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(refusals.pop() if refusals else 200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.send({"choices": [{"text": " a"}]})
        counts = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        self.send({"choices": [], "usage": counts})

    def send(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 256

Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Fake(Contestant):
    precision = "bf16"

    def __init__(self, script: str, pids: Path, name: str = "fake") -> None:
        self.name = self.title = name
        self._script = script
        self._pids = pids

    def install(self) -> None:
        """Nothing."""

    def version(self) -> str:
        return "1"

    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        return Command((sys.executable, "-c", self._script, str(port), str(self._pids)))


@pytest.fixture
def no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder_of(checkpoint: Checkpoint, root: Path) -> Path:
        folder = root / checkpoint.name
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setattr(measure_module, "write", folder_of)


def workloads(*names: str) -> Sequence[Workload]:
    return [workload for workload in WORKLOADS if workload.name in names]


@pytest.mark.usefixtures("no_checkpoints")
def test_servers_take_turns_and_every_process_ends(tmp_path: Path) -> None:
    found: list[Measurement] = []
    pids = [tmp_path / "first", tmp_path / "second"]

    def read_rate() -> float:
        for file in pids:
            for pid in file.read_text().split():
                _wait_stopped(int(pid))
        return 25.0

    contestants = [Fake(SERVER, file, file.name) for file in pids]
    measure(contestants, workloads("tiny-1", "tiny-32"), range(4, 6), tmp_path, read_rate, found.append)
    figures = [(each.contestant, each.what, each.round) for each in found if each.contestant != MACHINE]
    first, second = "first", "second"
    assert figures == [
        *((name, "ready tiny-11m", 4) for name in (first, second)),
        *((name, "tiny-1", 4) for name in (first, second)),
        *((name, "tiny-1", 5) for name in (second, first)),
        *((name, "tiny-32", 4) for name in (first, second)),
        *((name, "tiny-32", 5) for name in (second, first)),
        *((name, "memory tiny-11m", 4) for name in (first, second)),
    ]
    rates = [(each.round, each.value) for each in found if each.contestant == MACHINE]
    assert rates == [(4, 25.0), (4, 25.0), (5, 25.0), (5, 25.0)] * 2
    assert all(each.value > 0 for each in found)
    assert len(next(each for each in found if each.what == "tiny-1").gaps) == 63
    # The children's 60 MB count.
    assert min(each.value for each in found if each.what == "memory tiny-11m") > 0.06
    wait_gone([int(pid) for file in pids for pid in file.read_text().split()])


def _wait_stopped(process: int) -> None:
    """A signal takes effect a moment after it was sent."""
    deadline = time.monotonic() + END_SECONDS
    while (state := Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert time.monotonic() < deadline, f"process {process} is in state {state} between turns"
        time.sleep(0.01)


@pytest.mark.usefixtures("no_checkpoints")
def test_a_server_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    contestant = Fake("import sys; print('no such model', flush=True); sys.exit(3)", tmp_path / "pids")
    with pytest.raises(ServerError, match="fake: the server ended with status 3:\nno such model"):
        measure([contestant], workloads("tiny-1"), range(1), tmp_path, lambda: 25.0, lambda _: None)


@pytest.mark.usefixtures("no_checkpoints")
def test_a_server_that_never_answers_is_reported_with_its_last_refusal(tmp_path: Path) -> None:
    contestant = Fake("import time; time.sleep(600)", tmp_path / "pids")
    contestant.ready_seconds = 0.5
    with pytest.raises(ServerError, match=r"fake: not ready within 0\.5 s; last: no connection to port"):
        measure([contestant], workloads("tiny-1"), range(1), tmp_path, lambda: 25.0, lambda _: None)


def test_a_run_begins_with_the_limits_of_this_machine() -> None:
    name, found = measure_machine(2)
    assert name == f"{processor()}, {name.rpartition(', ')[2]}"
    assert [(each.contestant, each.round, each.what) for each in found] == [(MACHINE, 2, READ), (MACHINE, 2, MATRIX)]
    assert all(each.value > 1 for each in found)
