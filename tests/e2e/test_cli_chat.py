"""`kaon chat` as a process, against a server whose bytes the test determines."""

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.sweeps import some

CHAT = [sys.executable, "-m", "server", "chat"]
PATIENCE = 120.0
"""Timeout in seconds for expected output."""


class Server(ThreadingHTTPServer):
    """Answers each turn with its own words; some words select a fault."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer(200, {"object": "list", "data": [{"id": "parrot", "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.keys.append(self.headers["Authorization"])
        text = request["messages"][-1]["content"]
        if text == "refuse":
            return self.answer(400, {"error": {"message": "temperature is 9; it must be at most 2"}})
        if text == "steer":
            return self.answer(400, {"error": {"message": "no\x1b[2J\x9b2J"}})
        if text == "crash":
            return self.answer(500, {"error": {"message": "the server failed on this request"}})
        self.send_response(200)
        self.end_headers()
        if text == "think":
            self.chunk({"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}, "finish_reason": None}]})
            text = "so"
        for word in text.split(" "):
            self.chunk({"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]})
        if text == "endless":
            self.wait_for_the_client_to_leave()
        elif text == "broken":
            self.chunk({"error": {"message": "the engine core was killed by SIGKILL"}})
        elif text != "cut off":
            self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def answer(self, status: int, body: object) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def chunk(self, body: object) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def wait_for_the_client_to_leave(self) -> None:
        self.connection.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            if self.connection.recv(1) == b"":
                self.server.client_left.set()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def parrot() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *flags: str) -> None:
        self.unread = ""
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(CHAT[0], [*CHAT, *flags])

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def read_until(self, expected: str) -> None:
        """Read up to and including `expected`."""
        while expected not in self.unread:
            readable, _, _ = select.select([self.descriptor], [], [], PATIENCE)
            assert readable, f"{expected!r} did not come, but {self.unread!r}"
            try:
                self.unread += os.read(self.descriptor, 4096).decode()
            except OSError:
                raise AssertionError(f"the chat ended before {expected!r}, after {self.unread!r}") from None
        self.unread = self.unread.partition(expected)[2]

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self.descriptor, 4096):
                pass
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def piped(url: str, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, "--url", url, *flags], input=text, capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def test_each_piped_line_is_a_turn_and_only_answers_are_printed(parrot: Server) -> None:
    done = piped(parrot.url, "hello there\n\nand again\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello there \nand again \n", "")
    assert [message["content"] for message in parrot.requests[1]["messages"]] == [
        "hello there",
        "hello there ",
        "and again",
    ]


def test_flags_reach_the_request(parrot: Server) -> None:
    flags = ["--model", "cockatoo", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9"]
    assert piped(parrot.url + "/v1/", "hello", *flags).returncode == 0
    request = parrot.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("cockatoo", 0, 9)
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}


def test_the_key_comes_from_the_flag_or_the_environment(parrot: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(parrot.url, "hello")
    piped(parrot.url, "hello", "--api-key", "k1")
    monkeypatch.setenv("KAON_API_KEY", "k2,k3")
    piped(parrot.url, "hello")
    assert parrot.keys == [None, "Bearer k1", "Bearer k2"]


def test_reasoning_is_for_terminals(parrot: Server) -> None:
    assert piped(parrot.url, "think").stdout == "so \n"


def test_the_first_model_that_the_server_lists_is_asked(parrot: Server) -> None:
    piped(parrot.url, "hello")
    assert parrot.requests[0]["model"] == "parrot"


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("refuse", "kaon chat: temperature is 9; it must be at most 2\n"),
        pytest.param("crash", "kaon chat: the server failed on this request\n", marks=pytest.mark.slow),
        ("broken", "kaon chat: the engine core was killed by SIGKILL\n"),
        ("cut off", "kaon chat: the server ended the stream before the end of the answer\n"),
    ],
)
def test_a_failure_is_one_sentence_and_exit_code_1(parrot: Server, turn: str, said: str) -> None:
    done = piped(parrot.url, turn)
    assert (done.returncode, done.stderr) == (1, said)


def test_a_server_that_is_not_there_is_one_sentence_and_exit_code_1() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        done = piped(url, "hello")
    assert done.returncode == 1
    assert done.stderr.startswith(f"kaon chat: the server at {url} cannot be reached: ")
    assert "Errno" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(parrot: Server) -> None:
    terminal = Terminal("--url", parrot.url)
    terminal.read_until("> ")
    terminal.type("endless\n")
    terminal.read_until("endless ")
    terminal.type("\x03")
    assert parrot.client_left.wait(PATIENCE)
    terminal.read_until("> ")
    terminal.type("next\n")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert [message["content"] for message in parrot.requests[1]["messages"]] == ["endless", "endless ", "next"]


# Python sees a Ctrl-C that comes between the prompt and the wait for keys when the next key comes.
# Ctrl-D and /exit end other tests here.
@pytest.mark.parametrize("goodbye", some(["\x03\n", "\x04", "/exit\n"], "\x03\n"), ids=["ctrl-c", "ctrl-d", "exit"])
def test_the_prompt_is_left_by_ctrl_c_ctrl_d_and_exit(parrot: Server, goodbye: str) -> None:
    terminal = Terminal("--url", parrot.url)
    terminal.read_until("> ")
    terminal.type(goodbye)
    assert terminal.exit_code() == 0


def test_a_refused_turn_is_reported_and_forgotten(parrot: Server) -> None:
    terminal = Terminal("--url", parrot.url)
    terminal.read_until("> ")
    terminal.type("refuse\n")
    terminal.read_until("temperature is 9; it must be at most 2")
    terminal.read_until("> ")
    terminal.type("hello\n")
    terminal.read_until("> ")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert [message["content"] for message in parrot.requests[1]["messages"]] == ["hello"]


def test_reset_forgets_the_conversation_and_help_lists_the_commands(parrot: Server) -> None:
    terminal = Terminal("--url", parrot.url, "--system", "Be brief.")
    turns = {"one": "one ", "/reset": "/reset", "/help": "/reset ", "/what": "not a command", "two": "two "}
    for line, answer in turns.items():
        terminal.read_until("> ")
        terminal.type(line + "\n")
        terminal.read_until(answer)
    terminal.read_until("> ")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert [message["content"] for message in parrot.requests[1]["messages"]] == ["Be brief.", "two"]


def test_an_answer_cannot_steer_the_terminal(parrot: Server) -> None:
    done = piped(parrot.url, "a\x1b[2Jb\x07")
    assert done.stdout == "a[2Jb \n"
    assert piped(parrot.url, "steer").stderr == "kaon chat: no[2J2J\n"


def test_interrupting_a_piped_chat_ends_it(parrot: Server) -> None:
    process = subprocess.Popen(
        [*CHAT, "--url", parrot.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("endless\n")
    process.stdin.close()
    assert process.stdout.read(7) == "endless"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert parrot.client_left.wait(PATIENCE)
    process.stdout.close()
