"""The load generator: sends completion requests all at once over HTTP and records what comes back.

It shares the machine's cores with the server, so while a server works it only waits, reads and notes the time; what
was read is looked into when all answers have ended. The same for every server.
"""

import itertools
import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.peers.sse import Event, Piece, ResponseError, events

_DONE = b"data: [DONE]"
_READ_BYTES = 1 << 16


class LoadError(Exception):
    """A server refused a request, ended an answer early, or counted other tokens than were asked for."""


class Request(NamedTuple):
    """A prompt, its number of tokens, and how many to generate."""

    prompt: str
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. `path` is /v1/completions or /v1/chat/completions; `extra` goes into every body."""

    port: int
    model: str
    path: str = "/v1/completions"
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times, in seconds of the monotonic clock. `arrivals` has one entry an event with text in it."""

    started: float
    arrivals: tuple[float, ...]
    tokens: int

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def ended(self) -> float:
        return self.arrivals[-1]


def run(target: Target, requests: Sequence[Request], timeout: float = 600) -> list[Answer]:
    """Send `requests` at once, one connection each, and wait for all answers, in their order. Raises `LoadError`."""
    bodies = [_http(target, request) for request in requests]
    connections = [_Connection(target.port, body, timeout) for body in bodies]
    try:
        _record(connections, timeout)
    finally:
        for connection in connections:
            connection.socket.close()
    return [_answer(each.started, each.pieces, asked) for each, asked in zip(connections, requests, strict=True)]


def steady_gaps(answers: Sequence[Answer]) -> list[float]:
    """Seconds between a stream's neighbouring events while every stream decodes: after the last first token and
    before the first end."""
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.ended for answer in answers)
    gaps = []
    for answer in answers:
        times = [when for when in answer.arrivals if begin <= when <= end]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return gaps


class _Connection:
    """A request that was sent, and what has come back."""

    def __init__(self, port: int, body: bytes, timeout: float) -> None:
        try:
            self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        except OSError as error:
            raise LoadError(f"no connection to port {port}: {error}") from error
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pieces: list[Piece] = []
        self.started = time.monotonic()
        self.socket.sendall(body)

    def read(self) -> bool:
        """Take what there is; whether the answer has ended."""
        data = self.socket.recv(_READ_BYTES)
        now = time.monotonic()
        if not data:
            return True
        self.pieces.append(Piece(now, data))
        if _DONE in data:
            return True
        # The mark may come in two pieces.
        return len(self.pieces) > 1 and _DONE in self.pieces[-2].data[-len(_DONE) :] + data[: len(_DONE)]


def _record(connections: Sequence[_Connection], timeout: float) -> None:
    """Read from all connections until each has its end."""
    open_ones = {connection.socket.fileno(): connection for connection in connections}
    deadline = time.monotonic() + timeout
    with select.epoll() as poll:
        for descriptor in open_ones:
            poll.register(descriptor, select.EPOLLIN)
        while open_ones:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LoadError(f"{len(open_ones)} of {len(connections)} answers did not end within {timeout:g} s")
            for descriptor, _ in poll.poll(left):
                try:
                    ended = open_ones[descriptor].read()
                except OSError as error:
                    raise LoadError(f"a connection broke: {error}") from error
                if ended:
                    poll.unregister(descriptor)
                    del open_ones[descriptor]


def _http(target: Target, request: Request) -> bytes:
    asked: dict[str, Any] = {"prompt": request.prompt}
    if target.path.endswith("/chat/completions"):
        asked = {"messages": [{"role": "user", "content": request.prompt}]}
    body = json.dumps(
        {
            "model": target.model,
            **asked,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.extra,
        }
    ).encode()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _answer(started: float, pieces: Sequence[Piece], asked: Request) -> Answer:
    try:
        found = events(pieces)
    except ResponseError as error:
        raise LoadError(str(error)) from error
    arrivals = tuple(event.time for event in found if _text(event))
    usage = next((event.payload["usage"] for event in reversed(found) if event.payload.get("usage")), None)
    if usage is None or not arrivals:
        last = found[-1].payload if found else None
        raise LoadError(f"an answer has {len(arrivals)} events with text and ends without usage: {last}")
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (asked.prompt_tokens, asked.max_tokens):
        raise LoadError(
            f"asked for {asked.max_tokens} tokens after {asked.prompt_tokens}; "
            f"the server counts {counted[1]} after {counted[0]}"
        )
    return Answer(started, arrivals, asked.max_tokens)


def _text(event: Event) -> str:
    """The text of the event's only choice, if any."""
    choices = event.payload.get("choices") or [{}]
    return choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
