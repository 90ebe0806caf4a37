"""systemd: the server's reports to it, and agreement of the unit's settings with the server's."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.server import ServerConfig
from engine.config.settings import SETTINGS
from server.service_manager import ServiceManager

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "kaon.service"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def received(listener: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def test_states_and_beats_are_sd_notify_s_messages(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    manager = ServiceManager.take_environment()
    manager.ready("serving m")
    for _ in range(3):
        manager.beat()
    manager.stopping()
    ready, beat, stopping = received(listener)
    assert ready == "READY=1\nSTATUS=serving m"
    assert beat == "WATCHDOG=1"  # The next one is due after half of the minute.
    assert stopping.startswith("STOPPING=1\n")


def test_child_processes_do_not_inherit_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.setenv(name, "1")
    ServiceManager.take_environment()
    with pytest.raises(KeyError):
        monkeypatch.delenv("NOTIFY_SOCKET")


def test_an_address_in_the_abstract_namespace(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind("")
        ServiceManager("@" + abstract.getsockname()[1:].decode()).ready("x")
        assert abstract.recv(100).startswith(b"READY=1")


def test_a_watchdog_of_another_process_gets_no_beats(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    ServiceManager.take_environment().beat()
    assert received(listener) == []


def test_no_service_manager_or_one_that_has_gone_is_no_failure(tmp_path: Path) -> None:
    for address in (None, str(tmp_path / "nobody listens")):
        manager = ServiceManager(address, 1.0)
        manager.ready("x")
        manager.beat()
        manager.stopping()


def service() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#") and section == "[Service]":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_s_settings_are_kaon_s() -> None:
    given = {item.partition("=")[0] for value in service()["Environment"] for item in value.split()}
    ours = {name for name in given if name.startswith("KAON_")}
    assert ours == {"KAON_API_KEY_FILE", "KAON_DATA_DIR"}
    assert ours <= {setting.env for setting in SETTINGS}
    assert float(service()["TimeoutStopSec"][0]) > ServerConfig().drain_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    program = tmp_path / "kaon"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "kaon.service"
    unit.write_text(UNIT.read_text().replace("/opt/kaon/.venv/bin/kaon", str(program)))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, [line for line in verified.stderr.splitlines() if unit.name in line]) == (0, [])
    # 0 is closed, 10 is open; `security` exits with an error above the threshold, in tenths.
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", unit]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
