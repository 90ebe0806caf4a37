"""A server on a network: keys, TLS, a path prefix, templates of its own, and an access log."""

import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.kaon_server import START_SECONDS, KaonServer, eventually
from tests.e2e.warm_starts import COLD_START

KEY = "sk-team-7f3a"
MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """With TLS, a key, a prefix, a template and names of its own."""
    directory = tmp_path_factory.mktemp("guarded")
    certificate, key = directory / "server.pem", directory / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    command += ["-subj", "/CN=kaon", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    (directory / "keys").write_text(f"# one a line\n{KEY}\n")
    (directory / "chat.jinja").write_text("{% for m in messages %}Q: {{ m.content }}{% endfor %} A:")
    settings = {
        "api_key_file": str(directory / "keys"),
        "ssl_certfile": str(certificate),
        "ssl_keyfile": str(key),
        "root_path": "/llm",
        "served_model_name": ["team/small", "small"],
        "chat_template": str(directory / "chat.jinja"),
        "trust_request_chat_template": True,
        "allowed_origins": ["https://chat.example"],
        "access_log": "json",
    }
    # What /proc shows of it must be its own.
    running = KaonServer(directory / "log", 0, environment=COLD_START, server_config=settings).ready()
    found = re.search(r" on (https://\S+) ", running.start_line)
    assert found, running.start_line
    running.url = found[1]
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.stderr
    assert KEY not in running.stderr + running.start_line


@pytest.fixture
def https(guarded: KaonServer) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=str(guarded._log.parent / "server.pem"))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=guarded.url, verify=trusted, headers=headers, timeout=START_SECONDS) as client:
        yield client


@pytest.fixture
def team(guarded: KaonServer, https: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{guarded.url}/llm/v1", api_key=KEY, http_client=https, max_retries=0)


def logged(server: KaonServer, request_id: str) -> dict[str, object]:
    """The entry of a request in the access log."""
    eventually(lambda: f'"{request_id}"' in server.stderr)
    (line,) = (line for line in server.stderr.splitlines() if f'"{request_id}"' in line)
    return dict(json.loads(line))


def test_a_stream_over_tls_carries_its_request_id_and_is_logged_once_it_ends(
    guarded: KaonServer, https: httpx.Client
) -> None:
    body = {"model": "small", "messages": MESSAGES, "max_completion_tokens": 5, "stream": True}
    answer = https.post("/llm/v1/chat/completions?key=secret", json=body, headers={"X-Request-Id": "stream-1"})
    assert answer.headers["x-request-id"] == "stream-1"
    assert answer.text.endswith("data: [DONE]\n\n")
    entry = logged(guarded, "stream-1")
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/llm/v1/chat/completions", 200)
    assert entry["bytes"] == len(answer.content)
    assert guarded.stderr.count("stream-1") == 1  # one line per request


def test_the_official_client_with_a_wrong_key_gets_an_authentication_error(
    team: openai.OpenAI, https: httpx.Client
) -> None:
    assert [model.id for model in team.models.list().data] == ["team/small", "small"]
    assert team.models.retrieve("team/small").id == "team/small"
    with pytest.raises(openai.AuthenticationError) as refused:
        team.with_options(api_key="sk-wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert refused.value.request_id


def test_plain_http_on_the_tls_port_is_disconnected_alone(guarded: KaonServer, https: httpx.Client) -> None:
    port = httpx.URL(guarded.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=START_SECONDS) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in connection.recv(4096)
    assert https.get("/livez").status_code == 200


def test_the_key_is_in_neither_process_nor_in_the_metrics(guarded: KaonServer, https: httpx.Client) -> None:
    for process in (guarded.process, guarded.core):
        assert KEY not in " ".join(process.cmdline()) + json.dumps(process.environ())
    assert KEY not in https.get("/metrics").text


def test_the_operators_template_writes_the_prompt(https: httpx.Client) -> None:
    chat = https.post("/tokenize", json={"messages": MESSAGES}).json()
    assert https.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "Q: hello A:"}


def test_a_template_of_a_trusted_request_stands_in_for_it(https: httpx.Client) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}{{ mark }}"}
    chat = https.post("/tokenize", json={**body, "chat_template_kwargs": {"mark": "!"}}).json()
    assert https.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "hello!"}
    answer = https.post("/v1/chat/completions", json={"model": "small", **body, "max_completion_tokens": 1})
    assert answer.status_code == 200


def test_an_endless_template_is_a_400_while_a_neighbours_stream_goes_on(
    guarded: KaonServer, https: httpx.Client
) -> None:
    body = {"model": "small", "prompt": "Hi", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    alone = https.post("/v1/completions", json=body).json()["choices"][0]["text"]
    answers: list[httpx.Response] = []

    def send_endless() -> None:
        answers.append(https.post("/tokenize", json={"messages": MESSAGES, "chat_template": ENDLESS}))

    thread = threading.Thread(target=send_endless)
    thread.start()
    together = https.post("/v1/completions", json=body).json()["choices"][0]["text"]
    thread.join()
    (answer,) = answers
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template"
    assert together == alone
    eventually(lambda: len(guarded.process.children()) == 1)  # The renderer ends.


def test_a_server_without_trust_refuses_a_requests_template(server: KaonServer) -> None:
    body = {"model": "kaon-demo", "messages": MESSAGES, "chat_template": "{{ messages }}"}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = server.post(path, body).json()["error"]
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]


def test_files_that_do_not_work_end_the_server_with_a_sentence(
    start_server: Callable[..., KaonServer], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for settings, said in (
        ({"ssl_certfile": str(broken)}, "not a PEM certificate and its key"),
        ({"api_key_file": str(tmp_path / "none")}, "api_key_file is"),
        ({"chat_template": str(tmp_path / "none.jinja")}, "none.jinja, which cannot be read: No such"),
    ):
        # Its engine core, which has begun, reports what it does.
        running = start_server(port=0, server_config={"log_level": "warning", **settings})
        assert running.wait() == 1
        *before, sentence = running.stderr.splitlines()
        assert said in sentence
        assert all(" loading " in line for line in before)
