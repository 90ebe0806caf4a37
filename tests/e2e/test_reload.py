"""Changes without a restart: limits and the log level by SIGHUP or a call, keys and certificates as files."""

import fcntl
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from server.limits.key_file import KeyFile
from tests.e2e.kaon_server import START_SECONDS, eventually, free_port, is_core
from tests.e2e.processes import STUB_CORES, LoggedProcess
from tests.unit.server.test_tls import make_certificate

pytestmark = pytest.mark.usefixtures("warm_children")

KAON = f"from server.process import run; {STUB_CORES}import sys; from server.cli import main; sys.exit(main())"


class Server(LoggedProcess):
    """`kaon serve --config FILE` with TLS and keys, over stub cores that do not start while a file is locked."""

    def __init__(self, directory: Path) -> None:
        self.directory, port = directory, free_port()
        self.certificate, self.key = make_certificate(directory)
        keys = KeyFile(1, [])
        self.user = keys.create("user")
        self.admin = keys.create("root", scopes=["inference", "admin", "metrics"])
        self.keys = directory / "keys.json"
        keys.save(self.keys)
        self.settings: dict[str, Any] = {
            "port": port,
            "dtype": "float32",
            "cpu_kvcache_gib": 0.25,
            "api_key_file": str(self.keys),
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "log_level": "info",
        }
        self.url = f"https://127.0.0.1:{port}"
        self.write()
        command = [sys.executable, "-P", "-c", KAON, "serve", "--config", str(directory / "kaon.yaml")]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path, "STUB_CORE_GATE": str(directory / "gate"), "KAON_REQUESTS_PER_MINUTE": "50"}
        super().__init__(command, directory / "log", **environment)

    def cores(self) -> list[psutil.Process]:
        return [each for each in self.process.children() if is_core(each)]

    def write(self, **settings: Any) -> None:
        self.settings |= settings
        (self.directory / "kaon.yaml").write_text(yaml.safe_dump(self.settings))

    def ask(self, method: str, path: str, key: str) -> httpx.Response:
        context = ssl.create_default_context(cafile=self.certificate)
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, verify=context, timeout=START_SECONDS)

    def most_requests(self) -> Any:
        return self.ask("GET", "/kaon/limits", self.user).json()["most"]["requests"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("reload")
    (directory / "gate").touch()
    with (directory / "gate").open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        running = Server(directory)
        # The model loads only after SIGHUP, which asks for these settings when the server is ready.
        eventually(lambda: len(running.cores()) == 1)
        (core,) = running.cores()
        core.suspend()
        running.write(max_queued_requests=77)
        for each in (running.process, core):
            each.send_signal(signal.SIGHUP)
        core.send_signal(signal.SIGTERM)
        core.resume()
    assert running.process.stdout.readline()
    assert running.cores() == [core]
    yield running
    assert running.end_by(signal.SIGINT) == 0
    assert "Traceback" not in running.stderr


def test_a_sighup_during_the_start_is_a_reload_when_the_server_is_ready(served: Server) -> None:
    eventually(lambda: "the settings were read again; changed: max_queued_requests" in served.stderr)


def test_a_sighup_to_all_processes_ends_no_core(served: Server) -> None:
    (core,) = served.cores()
    core.kill()
    eventually(lambda: [each.pid for each in served.cores()] not in ([], [core.pid]))
    eventually(lambda: served.ask("GET", "/readyz", served.user).status_code == 200)
    (core,) = served.cores()
    written = served.stderr.count("the settings were read again")
    core.send_signal(signal.SIGHUP)
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: served.stderr.count("the settings were read again") > written)
    assert served.ask("GET", "/readyz", served.user).status_code == 200
    assert core.is_running()


def test_limits_and_the_log_level_change_by_a_call(served: Server) -> None:
    assert served.most_requests() is None
    served.write(max_requests_per_key=7, log_level="warning", max_num_seqs=9)
    assert served.ask("POST", "/kaon/reload", served.user).status_code == 403
    answer = served.ask("POST", "/kaon/reload", served.admin)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "kaon.reload",
        "changed": ["max_requests_per_key", "log_level"],
        "need_restart": ["max_num_seqs"],
    }
    assert served.most_requests() == 7
    # Settings of the environment keep their precedence.
    assert served.ask("GET", "/kaon/limits", served.user).json()["quotas"]["requests"]["limit"] == 50


def test_limits_change_by_sighup_and_wrong_ones_change_nothing(served: Server) -> None:
    served.write(max_requests_per_key=0)
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: "the settings stay as they are" in served.stderr)
    assert "max_requests_per_key" in served.stderr
    answer = served.ask("POST", "/kaon/reload", served.admin)
    assert answer.status_code == 400
    assert "the settings stay as they are" in answer.json()["error"]["message"]
    served.write(max_requests_per_key=11)
    served.process.send_signal(signal.SIGHUP)
    eventually(lambda: served.most_requests() == 11)
    assert "the settings were read again; changed: " in served.stderr


def test_keys_are_read_again(served: Server) -> None:
    keys = KeyFile.load(served.keys)
    key = keys.create("later")
    keys.save(served.keys)
    served.ask("POST", "/kaon/reload", served.admin)
    assert served.ask("GET", "/v1/models", key).status_code == 200


@pytest.mark.parametrize(
    "broken", ["", '{"version": 1, "keys": [', '{"version": 1, "keys": [{}]}', '{"a":' * 100_000, "\udcff\udcfe", None]
)
def test_a_broken_file_of_keys_is_reported_to_the_caller_and_changes_nothing(
    broken: str | None, served: Server
) -> None:
    whole = served.keys.read_bytes()
    before = served.most_requests()
    served.keys.unlink()
    if broken is not None:
        served.keys.write_bytes(broken.encode(errors="surrogateescape"))
    served.write(max_requests_per_key=before + 1)
    try:
        answer = served.ask("POST", "/kaon/reload", served.admin)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f"the settings stay as they are: api_key_file is {served.keys}")
        written = len(served.stderr)
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the settings stay as they are: api_key_file" in served.stderr[written:])
        assert served.most_requests() == before
    finally:
        served.keys.write_bytes(whole)
        served.write(max_requests_per_key=before)
    assert served.ask("POST", "/kaon/reload", served.admin).json()["changed"] == []


@pytest.mark.parametrize(
    "broken",
    [
        "port: [",
        # Each of its two readings takes seconds. The sentence: tests/unit/config/test_settings.py.
        pytest.param("[" * 100_000, marks=pytest.mark.slow),
        "- a",
        "port: &a [*a]",
        "\udcff",
        "no_setting: 1",
        "a: 1\na: 2",
        "models: kaon.yaml",
        None,
    ],
)
def test_a_broken_file_of_settings_is_reported_and_changes_nothing(broken: str | None, served: Server) -> None:
    file = served.directory / "kaon.yaml"
    whole, before = file.read_bytes(), served.most_requests()
    file.unlink()
    if broken is not None:
        file.write_bytes(broken.encode(errors="surrogateescape"))
    try:
        answer = served.ask("POST", "/kaon/reload", served.admin)
        assert answer.status_code == 400, answer.text
        assert "kaon.yaml" in answer.json()["error"]["message"]
        written = len(served.stderr)
        served.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the settings stay as they are" in served.stderr[written:])
        assert served.most_requests() == before
    finally:
        file.write_bytes(whole)


def test_new_connections_get_a_certificate_that_replaces_the_last(served: Server) -> None:
    context = ssl.create_default_context(cafile=served.certificate)
    headers = {"Authorization": f"Bearer {served.user}"}
    with httpx.Client(base_url=served.url, headers=headers, verify=context, timeout=START_SECONDS) as old:
        assert old.get("/v1/models").status_code == 200
        certificate, key = make_certificate(served.directory, "renewed")
        # A certificate without its key is not used.
        Path(served.certificate).write_text(Path(certificate).read_text())
        eventually(lambda: "the certificate that was read before stays in use" in served.stderr)
        Path(served.key).write_text(Path(key).read_text())

        def is_renewed() -> bool:
            try:
                return served.ask("GET", "/v1/models", served.user).status_code == 200
            except httpx.ConnectError:
                return False

        eventually(is_renewed)
        # The established connection continues.
        assert old.get("/v1/models").status_code == 200
