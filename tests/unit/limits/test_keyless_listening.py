"""A server without keys listens only on addresses that this machine alone can reach, unless a flag is set."""

import json
import re
import socket
from pathlib import Path

import pytest
from pydantic import SecretStr

from engine.config.config import Config, ParallelConfig
from engine.config.server import ServerConfig
from engine.config.settings import load_config
from server import process as serve
from server.limits.keys import ApiKeys

DOCKERFILE = Path(__file__).parents[3] / "Dockerfile"
WILDCARDS = ["0.0.0.0", "::", "0", "::ffff:0.0.0.0"]


def listens(**settings: object) -> bool:
    """Whether the start would open a socket; otherwise the refusal's sentence is raised."""
    config = ServerConfig.model_validate({"port": 0, **settings})
    keys = ApiKeys.of(config)
    with serve._listen(config, serve._is_keyless(config, keys)) as listener:
        return listener.fileno() >= 0


@pytest.fixture(autouse=True)
def _every_numeric_host_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is bound, since machines have different addresses."""
    monkeypatch.setattr(serve.socket, "create_server", lambda *arguments, **named: socket.socket())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert listens(host=host)


@pytest.mark.parametrize("host", [*WILDCARDS, "10.1.2.3", "169.254.1.1", "2001:db8::1", "::ffff:10.1.2.3"])
def test_what_others_reach_is_refused_without_a_key_with_the_remedies(host: str) -> None:
    with pytest.raises(ValueError, match=f"host is {host}, which other machines can reach") as refused:
        listens(host=host)
    for remedy in ("KAON_API_KEY", "api_key_file", "--host 127.0.0.1", "--insecure-no-auth"):
        assert remedy in str(refused.value)


def test_a_name_counts_as_the_address_that_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `localhost` that resolves to another address is no loopback."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(serve.socket, "getaddrinfo", lambda *arguments, **named: found)
    with pytest.raises(ValueError, match="host is localhost, which other machines can reach"):
        listens(host="localhost")


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_key_a_client_certificate_or_the_flag_opens_the_port(host: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    assert listens(host=host, api_key=("sk-one",))
    assert listens(host=host, api_key_file=str(file))
    assert listens(host=host, ssl_certfile="a.pem", ssl_ca_certs="b.pem")
    assert listens(host=host, insecure_no_auth=True)
    with pytest.raises(ValueError, match="there is no API key"):
        listens(host=host, ssl_certfile="a.pem")  # TLS encrypts, but does not authenticate clients.


def test_a_refused_start_ends_before_the_engine_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "CoreManager", lambda config: pytest.fail("the engine was started"))
    monkeypatch.setattr(serve, "name_process", lambda name: None)
    assert serve.run(Config(server_config=ServerConfig(host="0.0.0.0", port=0))) == 1
    assert capsys.readouterr().err.startswith("kaon: host is 0.0.0.0, which other machines can reach")


@pytest.mark.parametrize("command", re.findall(r"^CMD (\[.*\])$", DOCKERFILE.read_text(), flags=re.MULTILINE))
def test_what_an_image_runs_by_default_opens_no_keyless_port(command: str) -> None:
    serve_command, *arguments = json.loads(command)
    assert serve_command == "serve"
    config = load_config(arguments).server_config
    with pytest.raises(ValueError, match="there is no API key"):
        listens(host=config.host, insecure_no_auth=config.insecure_no_auth)


def test_a_host_that_serves_no_http_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_run_node", lambda config, manager: 0)
    monkeypatch.setattr(serve, "_listen", lambda *arguments: pytest.fail("it listens"))
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=1)
    assert serve.run(Config(server_config=ServerConfig(host="0.0.0.0"), parallel_config=parallel)) == 0


def test_a_keyed_server_still_uses_its_keys_when_the_flag_is_set() -> None:
    config = ServerConfig(api_key=(SecretStr("sk-one"),), insecure_no_auth=True)
    assert ApiKeys.of(config).owner(b"sk-two") is None
