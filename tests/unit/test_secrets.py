"""Where API keys must not be seen: the process list, the environment and configuration of the engine's process."""

import subprocess
import sys

import pytest
from pydantic import SecretStr

from engine.config.config import Config, ParallelConfig, ServerConfig
from server import process as serve

SHOW = "from pathlib import Path; from server.process import mask_command_line as hide; hide(['sk-one', 'clé']); "
SHOW += "print(Path('/proc/self/cmdline').read_text())"


def test_a_hidden_argument_is_asterisks_in_the_process_list_and_the_others_stay() -> None:
    command = [sys.executable, "-c", SHOW, "--api-key", "sk-one", "--api-key=clé,sk-one", "--port", "8000"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.rstrip("\n").split("\0")[3:-1] == ["--api-key", "******", "--api-key=****,******", "--port", "8000"]


def test_what_everything_but_the_key_ring_sees_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_API_KEY", "sk-one")
    monkeypatch.setattr(serve, "mask_command_line", lambda secrets: None)
    config = serve._without_keys(Config(server_config=ServerConfig(api_key=(SecretStr("sk-one"),), port=0)))
    assert config == Config(server_config=ServerConfig(port=0))
    assert "KAON_API_KEY" not in serve.os.environ


def test_a_kernel_that_does_not_let_us_hide_a_key_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(secrets: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(serve, "mask_command_line", refuse)
    serve._without_keys(Config(server_config=ServerConfig(api_key=(SecretStr("sk-one"),))))
    assert "stays visible" in caplog.text
    assert "sk-one" not in caplog.text


def test_a_host_that_serves_no_http_hides_the_keys_of_the_command_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[str] = []
    seen: list[Config] = []
    monkeypatch.setenv("KAON_API_KEY", "sk-one")
    monkeypatch.setattr(serve, "mask_command_line", hidden.extend)
    monkeypatch.setattr(serve, "_run_node", lambda config: seen.append(config) or 0)
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1)
    server = ServerConfig(api_key=(SecretStr("sk-one"),))
    assert serve._run(Config(parallel_config=parallel, server_config=server), 0.0) == 0
    assert hidden == ["sk-one"]
    assert seen == [Config(parallel_config=parallel)]
    assert "KAON_API_KEY" not in serve.os.environ
