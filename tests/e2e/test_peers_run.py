"""A contestant of the peers' benchmarks from its start to its end, with a server that invents its answers."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.checkpoints import Checkpoint
from benchmarks.peers import measure as measure_module
from benchmarks.peers.load import WORKLOADS, Workload
from benchmarks.peers.measure import MACHINE, MATRIX, READ, Measurement, ServerError, measure, measure_machine
from benchmarks.peers.servers import Command, Contestant
from benchmarks.report import processor
from tests.e2e.processes import wait_gone

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
    name = title = "fake"
    precision = "bf16"

    def __init__(self, script: str, pids: Path) -> None:
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
def test_each_figure_is_reported_and_every_process_ends(tmp_path: Path) -> None:
    found: list[Measurement] = []
    pids = tmp_path / "pids"
    measure(Fake(SERVER, pids), workloads("tiny-1", "tiny-32"), 4, tmp_path, found.append)
    assert [each.what for each in found] == ["ready tiny-11m", "tiny-1", "tiny-32", "memory tiny-11m"]
    assert {(each.contestant, each.round) for each in found} == {("fake", 4)}
    assert all(each.value > 0 for each in found)
    assert len(found[1].gaps) == 63
    # The child's 60 MB count.
    assert found[3].value > 0.06
    wait_gone([int(pid) for pid in pids.read_text().split()])


@pytest.mark.usefixtures("no_checkpoints")
def test_a_server_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    script = "import sys; print('no such model', flush=True); sys.exit(3)"
    with pytest.raises(ServerError, match="the server ended with status 3:\nno such model"):
        measure(Fake(script, tmp_path / "pids"), workloads("tiny-1"), 0, tmp_path, lambda _: None)


@pytest.mark.usefixtures("no_checkpoints")
def test_a_server_that_never_answers_is_reported_with_its_last_refusal(tmp_path: Path) -> None:
    contestant = Fake("import time; time.sleep(600)", tmp_path / "pids")
    contestant.ready_seconds = 0.5
    with pytest.raises(ServerError, match=r"not ready within 0\.5 s; last: no connection to port"):
        measure(contestant, workloads("tiny-1"), 0, tmp_path, lambda _: None)


def test_a_run_begins_with_the_limits_of_this_machine() -> None:
    name, found = measure_machine(2)
    assert name == f"{processor()}, {name.rpartition(', ')[2]}"
    assert [(each.contestant, each.round, each.what) for each in found] == [(MACHINE, 2, READ), (MACHINE, 2, MATRIX)]
    assert all(each.value > 1 for each in found)
