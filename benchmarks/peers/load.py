"""The load generator: workloads, the requests of each, and the events of their answers with their times."""

import bisect
import itertools
import json
import random
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks.checkpoints import QWEN3_06B, TINY, Checkpoint, words


class ResponseError(Exception):
    """A response is not a stream of events, or is not complete."""


class Piece(NamedTuple):
    """Bytes received from a socket, with their time."""

    time: float
    data: bytes


class Event(NamedTuple):
    """The JSON of a `data:` line, and the time of its last byte."""

    time: float
    payload: dict[str, Any]


def events(pieces: Sequence[Piece]) -> list[Event]:
    """The events of a response with or without chunked transfer coding; `[DONE]` and comments are left out.

    Raises `ResponseError` with the status and body of an answer that is not 200, and for JSON that is cut off.
    """
    raw = b"".join(piece.data for piece in pieces)
    ends = list(itertools.accumulate(len(piece.data) for piece in pieces))
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise ResponseError(f"the connection was closed before a response's head: {raw[:200]!r}")
    lines = head.decode("latin-1").lower().split("\r\n")
    spans = [(len(head) + 4, len(raw))]
    if any(line.startswith("transfer-encoding:") and "chunked" in line for line in lines):
        spans = list(_chunks(raw, len(head) + 4))
    body = b"".join(raw[start:end] for start, end in spans)
    if lines[0].split()[1] != "200":
        raise ResponseError(f"{lines[0]}: {body[:2000].decode(errors='replace')}")
    offsets = _Offsets(spans)
    found = []
    for end, data in _data_lines(body):
        if data == b"[DONE]":
            break
        try:
            payload = json.loads(data)
        except ValueError as error:
            raise ResponseError(f"an event is not JSON: {data[:200]!r}") from error
        found.append(Event(pieces[bisect.bisect_left(ends, offsets.raw_end(end))].time, payload))
    return found


def _chunks(raw: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk's data, up to the last chunk or to the end of the recording."""
    while (line_end := raw.find(b"\r\n", position)) >= 0:
        size = int(raw[position:line_end].split(b";")[0], 16)
        if size == 0:
            return
        yield line_end + 2, min(line_end + 2 + size, len(raw))
        position = line_end + 2 + size + 2


def _data_lines(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Every `data:` line: the offset of its end in the body, and its content."""
    position = 0
    for line in body.splitlines(keepends=True):
        position += len(line)
        if line.startswith(b"data:"):
            yield position, line[5:].strip()


class _Offsets:
    """Converts offsets in a decoded body to offsets in the recording."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._ends = list(itertools.accumulate(end - start for start, end in spans))

    def raw_end(self, body_end: int) -> int:
        """The offset in the recording after the byte before `body_end`."""
        index = bisect.bisect_left(self._ends, body_end)
        return self._spans[index][1] - (self._ends[index] - body_end)


# The load generator: sends completion requests at the same time over HTTP, and records the responses. It shares the
# machine's cores with the server, so while a server works it only waits, reads and records times; responses are parsed
# when all have ended. It is the same for every server.

_DONE = b"data: [DONE]"
_READ_BYTES = 1 << 16


class LoadError(Exception):
    """A server refused a request, ended an answer early, or reported another number of tokens than requested."""


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
    """One request's times, in seconds of the monotonic clock. `arrivals` has an entry for each event with text."""

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
    """Send `requests` at the same time, one connection each, and wait for all answers, in their order. Raises
    `LoadError`."""
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
    """A request that was sent, and the received part of its response."""

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
        """Receive available bytes. Returns whether the answer has ended."""
        data = self.socket.recv(_READ_BYTES)
        now = time.monotonic()
        if not data:
            return True
        self.pieces.append(Piece(now, data))
        if _DONE in data:
            return True
        # The end mark may arrive in two parts.
        return len(self.pieces) > 1 and _DONE in self.pieces[-2].data[-len(_DONE) :] + data[: len(_DONE)]


def _record(connections: Sequence[_Connection], timeout: float) -> None:
    """Read from all connections until each has ended."""
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


# The workloads: the requests of each, and the figure that is computed from their answers.

SHARED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """The figure of a workload, and how figures compare."""

    unit: str
    of: Callable[[Sequence[Answer]], float]
    more_is_better: bool

    def ratio(self, ours: float, theirs: float) -> float:
        """The ratio by which our figure is better; above 1 is better, whether the figure should be high or low."""
        return ours / theirs if self.more_is_better else theirs / ours


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


RATE = Figure("tok/s", _tokens_per_second, True)
TTFT = Figure("s", lambda answers: statistics.median(answer.ttft for answer in answers), False)
TOTAL = Figure("s", lambda answers: max(each.ended for each in answers) - min(each.started for each in answers), False)
SECONDS = Figure("s", lambda _: 0.0, False)
BYTES = Figure("GB", lambda _: 0.0, False)


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` simultaneous requests whose prompts have their first `shared_tokens` in common."""

    name: str
    title: str
    checkpoint: Checkpoint
    streams: int
    prompt_tokens: int
    max_tokens: int
    figure: Figure = RATE
    shared_tokens: int = 0

    def requests(self, seed: int) -> list[Request]:
        """Prompts whose first words differ from those of all other workloads and seeds, so that no cache has them."""
        source = random.Random(f"{self.name}/{seed}")
        vocabulary = words()
        shared = source.choices(vocabulary, k=self.shared_tokens)
        own = self.prompt_tokens - self.shared_tokens
        return [
            Request(
                "".join(f" {word}" for word in itertools.chain(shared, source.choices(vocabulary, k=own))),
                self.prompt_tokens,
                self.max_tokens,
            )
            for _ in range(self.streams)
        ]

    def divided(self, by: int) -> "Workload":
        """The same with prompts and answers `by` times as short, if its figure is a rate; others stay as they are."""
        if self.figure is not RATE:
            return self
        return replace(self, prompt_tokens=self.prompt_tokens // by, max_tokens=self.max_tokens // by)

    def gaps(self, answers: Sequence[Answer]) -> list[float]:
        """Seconds between tokens in steady decode; empty if the workload is too short."""
        return steady_gaps(answers) if self.figure is RATE else []


_B = QWEN3_06B
WARM_UP = Workload("warm-up", "warm-up", _B, 3, 64, 8)
WORKLOADS = (
    Workload("one", "1 stream 128/128", _B, 1, 128, 128),
    Workload("eight", "8 streams 256/64", _B, 8, 256, 64),
    Workload("many", "32 streams 256/64", _B, 32, 256, 64),
    Workload("long", "TTFT of 2048 tokens", _B, 1, 2048, 4, TTFT),
    Workload("shared", "16 sharing 1024 tokens", _B, 16, SHARED_TOKENS + 32, 16, TOTAL, SHARED_TOKENS),
    Workload("tiny-1", "tiny, 1 stream 64/64", TINY, 1, 64, 64),
    Workload("tiny-32", "tiny, 32 streams 64/64", TINY, 32, 64, 64),
    Workload("tiny-128", "tiny, 128 streams 64/64", TINY, 128, 64, 64),
)
"""Workloads in the order in which a server receives them."""
