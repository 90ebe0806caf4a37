"""API keys must not appear in the process list, or in the environment and configuration of the engine's process."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from engine.config.config import Config, ParallelConfig
from engine.config.server import ServerConfig
from server import process as serve

ROOT = Path(__file__).parents[3]
SHOW = "from pathlib import Path; from server.process import mask_command_line as hide; hide(['sk-one', 'clé']); "
SHOW += "print(Path('/proc/self/cmdline').read_text())"


def test_a_hidden_argument_is_asterisks_in_the_process_list_and_the_others_stay() -> None:
    command = [sys.executable, "-c", SHOW, "--api-key", "sk-one", "--api-key=clé,sk-one", "--port", "8000"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.rstrip("\n").split("\0")[3:-1] == ["--api-key", "******", "--api-key=****,******", "--port", "8000"]


SHOW_ENVIRONMENT = r"""
import ctypes, os
from pathlib import Path
from engine.config.config import Config
from engine.distributed.processes import forbid_inspection
from server import process
process._without_keys(Config())
forbid_inspection()
print(Path("/proc/self/environ").read_text().rstrip("\0").replace("\0", "\n"))
print("dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_a_key_given_as_a_variable_is_gone_from_what_the_system_shows_of_the_environment() -> None:
    given = {"FIRST": "sk-one-more", "KAON_API_KEY": "sk-one,sk-two", "LAST": "KAON_API_KEY", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", SHOW_ENVIRONMENT]
    shown = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.splitlines()
    masked = "*" * len("KAON_API_KEY=sk-one,sk-two")
    assert shown == ["FIRST=sk-one-more", masked, "LAST=KAON_API_KEY", f"PYTHONPATH={ROOT}", "dumpable 0"]


@pytest.mark.parametrize("keys", [(), ("sk-one",)])
def test_a_server_with_keys_and_no_other_is_closed_to_inspection(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(serve, "end_at_once", lambda: None)
    monkeypatch.setattr(serve, "name_process", lambda name: None)
    monkeypatch.setattr(serve, "mask_command_line", lambda secrets: None)
    monkeypatch.setattr(serve, "forbid_inspection", lambda: closed.append(True))
    # The start ends here with an error message.
    server = ServerConfig(api_key=tuple(map(SecretStr, keys)), port=0, ssl_certfile="missing.pem")
    assert serve.run(Config(server_config=server)) == 1
    assert closed == [True] * len(keys)


READ_ANOTHER = """
import ctypes, os, signal
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
for dumpable in (1, 0):
    reader, writer = os.pipe()
    if (holder := os.fork()) == 0:
        ctypes.CDLL(None).prctl(4, dumpable, 0, 0, 0)
        os.write(writer, b"1")
        signal.pause()
    os.read(reader, 1)
    for name in ("environ", "mem"):
        try:
            open(f"/proc/{holder}/{name}", "rb").close()
            print(dumpable, name, "read")
        except PermissionError:
            print(dumpable, name, "refused")
    os.kill(holder, signal.SIGKILL)
"""


def test_a_process_that_holds_keys_is_closed_to_others_of_its_user() -> None:
    """The effect of `forbid_inspection` in the kernel; the first lines show that access was possible before."""
    done = subprocess.run([sys.executable, "-I", "-c", READ_ANOTHER], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 environ read", "1 mem read", "0 environ refused", "0 mem refused"]


def test_what_everything_but_the_key_ring_sees_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_API_KEY", "sk-one")
    monkeypatch.setattr(serve, "mask_command_line", lambda secrets: None)
    config = serve._without_keys(Config(server_config=ServerConfig(api_key=(SecretStr("sk-one"),), port=0)))
    assert config == Config(server_config=ServerConfig(port=0))
    assert "KAON_API_KEY" not in serve.os.environ


def test_a_kernel_that_does_not_let_us_hide_a_key_is_reported_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(secrets: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(serve, "mask_command_line", refuse)
    serve._without_keys(Config(server_config=ServerConfig(api_key=(SecretStr("sk-one"),))))
    assert "stay visible" in caplog.text
    assert "sk-one" not in caplog.text


def test_a_host_that_serves_no_http_hides_the_keys_of_the_command_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[str] = []
    seen: list[Config] = []
    monkeypatch.setenv("KAON_API_KEY", "sk-one")
    monkeypatch.setattr(serve, "end_at_once", lambda: None)
    monkeypatch.setattr(serve, "mask_command_line", hidden.extend)
    monkeypatch.setattr(serve, "_run_node", lambda config, manager: seen.append(config) or 0)
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1)
    server = ServerConfig(api_key=(SecretStr("sk-one"),))
    assert serve.run(Config(parallel_config=parallel, server_config=server)) == 0
    assert hidden == ["sk-one"]
    assert seen == [Config(parallel_config=parallel)]
    assert "KAON_API_KEY" not in serve.os.environ
