"""`kaon chat`: a streaming chat in the terminal, with a running server or with one that it starts."""

import argparse
import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import httpx

from engine.distributed.processes import end_with_parent_even_if_stuck, wait_or_kill

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
"""Default address of `kaon serve`."""

COMMANDS = """\
/reset  forget the conversation
/exit   leave, as Ctrl-D does; Ctrl-C stops an answer
/help   show this
"""

_SERVER_ONLY = frozenset(
    f"KAON_{name}" for name in ("API_KEY", "API_KEY_FILE", "SSL_CERTFILE", "SSL_KEYFILE", "SSL_CA_CERTS", "ROOT_PATH")
)
"""Environment variables for public servers; they are not passed to the server started here, for this chat alone."""

_STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL for the server started here."""

_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"

_CONTROL = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])
"""Control characters, which a server could control the terminal with."""


class ChatError(Exception):
    """The chat cannot continue; the message is one sentence."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message.translate(_CONTROL))  # It may be the server's.
        self.exit_code = exit_code


class Refused(ChatError):
    """The server refused this turn: 4xx."""


def run(argv: Sequence[str]) -> int:
    """Chat until the input ends. Returns the exit code. Raises `ChatError`."""
    options = _parse(argv)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with _server(options) as url, _client(url, options) as client:
        conversation = Conversation(client, options.model or _first_model(client), options.system)
        conversation.parameters = {
            name: value for name in ("temperature", "max_tokens") if (value := getattr(options, name)) is not None
        }
        if sys.stdin.isatty():
            _note(f"Chatting with {conversation.model} at {url}. /help lists the commands.")
            _converse(conversation)
        else:
            _answer_lines(conversation, sys.stdin)
    return 0


class Conversation:
    """The turns so far, and the HTTP client of the server."""

    def __init__(self, client: httpx.Client, model: str, system: str | None = None) -> None:
        self.model = model
        self.parameters: dict[str, Any] = {}
        """Sampling parameters of every request."""
        self._client = client
        self._opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Remove every turn."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Generator[tuple[str, bool], None, None]:
        """Stream the answer to `text` as pairs of a text piece and whether it is reasoning.

        Closing the generator early ends the request; the partial answer stays in the conversation. Raises `Refused` if
        the server refuses the turn and `ChatError` if it fails; then the conversation is unchanged.
        """
        turn = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*self.messages, turn], "stream": True, **self.parameters}
        written: list[str] = []
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                _check(response)
                for piece, is_reasoning in _pieces(response.iter_lines()):
                    if not is_reasoning:
                        written.append(piece)
                    yield piece, is_reasoning
        except httpx.HTTPError as error:
            raise _lost(self._client, error) from error
        except (GeneratorExit, KeyboardInterrupt):
            self._add_turn(turn, written)
            raise
        self._add_turn(turn, written)

    def _add_turn(self, turn: dict[str, str], written: list[str]) -> None:
        self.messages += [turn, {"role": "assistant", "content": "".join(written)}]


# -- terminal ---------------------------------------------------------------------------------------------------


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing and history
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        match line:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
            case "/help":
                sys.stdout.write(COMMANDS)
            case command if command.startswith("/"):
                _note(f"{command} is not a command; /help lists them.")
            case text:
                try:
                    _write_answer(conversation.ask(text))
                except Refused as error:
                    _note(str(error))


def _answer_lines(conversation: Conversation, lines: Iterable[str]) -> None:
    for line in lines:
        if text := line.strip():
            _write_answer(conversation.ask(text))


def _write_answer(deltas: Generator[tuple[str, bool], None, None]) -> None:
    """Write the answer as it is received. On a terminal, reasoning is shown too, and Ctrl-C ends the answer."""
    on_terminal = sys.stdin.isatty()
    try:
        for piece, is_reasoning in deltas:
            if is_reasoning and not sys.stdout.isatty():
                continue
            text = piece.translate(_CONTROL)
            sys.stdout.write(f"{_DIM}{text}{_BRIGHT}" if is_reasoning else text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not on_terminal:
            raise
        deltas.close()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


# -- server -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the server. A server that was started here is ended on leaving the context."""
    if options.url is not None:
        yield options.url.rstrip("/").removesuffix("/v1")
    elif options.checkpoint is None and _something_listens():
        yield f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    else:
        with _own_server(options.checkpoint) as url:
            yield url


def _something_listens() -> bool:
    try:
        socket.create_connection((DEFAULT_HOST, DEFAULT_PORT), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _own_server(checkpoint: str | None) -> Iterator[str]:
    model = [] if checkpoint is None else [checkpoint]
    flags = ["--host", DEFAULT_HOST, "--port", "0", "--log-level", "warning"]
    if sys.stdin.isatty():
        _note("Starting a server ...")
    # A process group of its own keeps Ctrl-C, which stops an answer, from stopping the server.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "server", "serve", *model, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in _SERVER_ONLY},
        text=True,
        process_group=0,
        preexec_fn=end_with_parent_even_if_stuck,
    )
    assert process.stdout is not None
    try:
        announced = re.search(r" on (http://\S+)", process.stdout.readline())
        if announced is None:
            raise ChatError("the server did not start; its error is above")
        yield announced[1]
    finally:
        process.terminate()
        wait_or_kill(process, _STOP_SECONDS)
        process.stdout.close()


def _client(url: str, options: argparse.Namespace) -> httpx.Client:
    key = options.api_key or os.environ.get("KAON_API_KEY", "").partition(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout, use_proxy = httpx.Timeout(None, connect=5.0), options.url is not None
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=use_proxy)
    except httpx.InvalidURL as error:
        raise ChatError(f"--url is {url}, which is not a URL: {error}", exit_code=2) from error


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models", timeout=5.0)
        _check(response)
        return str(response.json()["data"][0]["id"]).translate(_CONTROL)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _lost(client, error) from error
    except (LookupError, TypeError, ValueError) as error:
        raise ChatError(f"the server at {client.base_url} is not OpenAI-compatible") from error


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (LookupError, TypeError, ValueError):
        message = f"{response.url} answered {response.status_code} {response.reason_phrase}"
    raise (Refused if response.is_client_error else ChatError)(str(message))


def _pieces(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the text pieces in a chat completion's chunks, each with whether it is reasoning."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(str(chunk["error"]["message"]))
        for choice in chunk["choices"]:
            for field in ("reasoning_content", "content"):
                if text := choice["delta"].get(field):
                    yield text, field != "content"
    raise ChatError("the server ended the stream before the end of the answer")


def _lost(client: httpx.Client, error: Exception) -> ChatError:
    reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)).rstrip(".") or type(error).__name__
    return ChatError(f"the server at {client.base_url} cannot be reached: {reason}; check the URL, or run kaon serve")


# -- command line -----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ChatError(f"{message}; kaon chat --help lists the flags", exit_code=2)


def chat_parser() -> argparse.ArgumentParser:
    """Return the parser of `kaon chat`'s flags."""
    parser = _Parser(
        prog="kaon chat",
        description="Chat in the terminal. Piped input works too: each line is a turn, and only answers are printed.",
        epilog=f"Without MODEL and --url: the server on port {DEFAULT_PORT}, or else the embedded model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="MODEL | URL",
        nargs="?",
        help="start a server for this directory or hub id, or chat with the server at this http address",
    )
    parser.add_argument("--url", help="chat with the server at this address")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: KAON_API_KEY)")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0 takes the most probable words; higher is more random"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest answer, in tokens")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    options = chat_parser().parse_args(argv)
    if options.url is None and (options.checkpoint or "").startswith(("http://", "https://")):
        options.url, options.checkpoint = options.checkpoint, None
    if options.url is not None and options.checkpoint is not None:
        raise ChatError("MODEL starts a server and --url names a running one; give one of them", exit_code=2)
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise ChatError(f"--url is {options.url}; it must begin with http:// or https://", exit_code=2)
    return options
