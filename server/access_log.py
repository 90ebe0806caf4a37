"""The access log: ids of requests, their paths as the routes see them, and one line for each request that has ended.

`server.middleware` names each request and writes its line. `server.process` puts `REQUEST_ID` on every other log line.
Imports no web framework: the process that starts the core loads this module before it loads FastAPI.
"""

import logging
import uuid
from collections.abc import Collection
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from starlette.types import Scope

from engine.distributed.logs import BARE
from server.tracing import RequestTrace

_log = logging.getLogger(__name__)

HEADER = "X-Request-Id"

ANTHROPIC_HEADER = "request-id"
"""Header that also carries the request id in answers of Anthropic's API, in addition to `HEADER`."""

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the current request; None outside of a request."""

CLIENT_GONE = 499
"""Status, in logs only, of a request whose client left before the answer."""

_MAX_ID_LENGTH = 128
_VISIBLE_ASCII = frozenset(range(0x21, 0x7F))
_MAX_LOGGED_CHARACTERS = 256
_EXPECTED_OF_PROBES = (200, 503)
"""503 is how a readiness probe reports that the model is still loading."""


def new_request_id() -> str:
    """Return a new id, for a request whose client sent none."""
    return f"req_{uuid.uuid4().hex}"


def usable_request_id(given: bytes) -> str | None:
    """Return the client's id if headers and logs may contain it (1 to 128 visible ASCII characters), else None."""
    return given.decode("ascii") if 0 < len(given) <= _MAX_ID_LENGTH and _VISIBLE_ASCII.issuperset(given) else None


def route_path(scope: Scope) -> str:
    """Return the path as the routes see it: without a proxy's prefix (`root_path`), if the proxy has not removed
    it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(prefix + "/") else path


class RequestFacts:
    """Facts about a request that routes record for its log line. Stored in `scope["state"]["facts"]`."""

    __slots__ = ("cached_tokens", "error", "finish_reason", "model", "output_tokens", "prompt_tokens", "trace", "ttft")

    def __init__(self) -> None:
        self.model: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache."""
        self.output_tokens: int | None = None
        self.ttft: float | None = None
        """Seconds from the arrival of the request to the first token of any choice."""
        self.finish_reason: str | None = None
        """Finish reason of the first choice."""
        self.error: str | None = None
        """Message of the error in the answer."""
        self.trace: RequestTrace | None = None
        """The trace of the request; None if traces are not exported."""


def facts_of(scope: Scope) -> RequestFacts:
    """Return the facts of a request; without the server's middleware, facts that are never logged."""
    facts: RequestFacts = scope.setdefault("state", {}).setdefault("facts", RequestFacts())
    return facts


class RequestOutcome(NamedTuple):
    """How a request ended."""

    request_id: str
    status: int | None
    """Status of the answer; None if no answer was begun."""
    complete: bool
    bytes: int
    """Length of the answer's body."""
    seconds: float
    """Seconds from the end of the request's head to the end of the answer."""


class Entry(msgspec.Struct, omit_defaults=True):
    """A line of the JSON log. Fields that do not apply to a request are left out."""

    time: str
    client: str | None
    method: str
    path: str
    """The path as the client sent it, without the query."""
    status: int
    """`CLIENT_GONE` if the client left before the answer's end."""
    bytes: int
    seconds: float
    request_id: str
    owner: str | None = None
    """Name of the API key, if the request had a key."""
    user_agent: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft: float | None = None
    """Seconds from the arrival to the first token."""
    finish_reason: str | None = None
    error: str | None = None
    """Message of the error in the answer."""
    trace_id: str | None = None
    """OpenTelemetry's trace id in W3C's form; `span_id` likewise."""
    span_id: str | None = None


class AccessLog:
    """Logs requests, as text like the other messages or as one JSON object a line."""

    def __init__(self, *, json: bool, probe_paths: Collection[str] = ()) -> None:
        """`probe_paths` are requested every few seconds by probes and scrapers, and logged at debug level."""
        self._json = json
        self._probe_paths = frozenset(probe_paths)

    def write(self, scope: Scope, outcome: RequestOutcome) -> None:
        """Log a request."""
        is_routine = outcome.status in _EXPECTED_OF_PROBES and route_path(scope) in self._probe_paths
        level = logging.DEBUG if is_routine else logging.INFO
        if not _log.isEnabledFor(level):
            return
        entry = _entry(scope, outcome)
        if self._json:
            _log.log(level, "%s", msgspec.json.encode(entry).decode(), extra=BARE)
        else:
            _log.log(
                level,
                "%s %s %s %d %d B %.3f s %s%s",
                entry.client or "-",
                entry.method,
                entry.path,
                entry.status,
                entry.bytes,
                entry.seconds,
                entry.request_id,
                _details(entry),
            )


def _details(entry: Entry) -> str:
    """Return the end of a text line: `name=value` for each field that applies to the request."""
    named = {
        "model": entry.model,
        "prompt": entry.prompt_tokens,
        "cached": entry.cached_tokens,
        "output": entry.output_tokens,
        "ttft": None if entry.ttft is None else f"{entry.ttft:.3f}s",
        "finish": entry.finish_reason,
        "key": entry.owner,
        "agent": entry.user_agent and f'"{entry.user_agent}"',
        "error": entry.error and f'"{entry.error}"',
    }
    return "".join(f" {name}={value}" for name, value in named.items() if value is not None)


def _entry(scope: Scope, outcome: RequestOutcome) -> Entry:
    client, facts = scope.get("client"), facts_of(scope)
    owner = scope["state"].get("owner")
    agent = next((value for name, value in scope["headers"] if name == b"user-agent"), b"")
    return Entry(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        client=None if client is None else _on_one_line(f"{client[0]}:{client[1]}"),
        method=_on_one_line(scope["method"]),
        path=_on_one_line(scope.get("raw_path", scope["path"].encode()).decode("latin-1")),
        status=outcome.status if outcome.status is not None and outcome.complete else CLIENT_GONE,
        bytes=0 if scope["method"] == "HEAD" else outcome.bytes,
        seconds=round(outcome.seconds, 6),
        request_id=outcome.request_id,
        owner=None if owner is None or owner.key is None else owner.name,
        user_agent=_escaped(agent.decode("latin-1")) or None,
        model=facts.model and _on_one_line(facts.model),
        prompt_tokens=facts.prompt_tokens,
        cached_tokens=facts.cached_tokens,
        output_tokens=facts.output_tokens,
        ttft=None if facts.ttft is None else round(facts.ttft, 6),
        finish_reason=facts.finish_reason,
        error=_escaped(facts.error or "") or None,
        trace_id=None if facts.trace is None else facts.trace.trace_id,
        span_id=None if facts.trace is None else facts.trace.span_id,
    )


def _on_one_line(text: str) -> str:
    """Return `text` as one word, so that a request cannot add lines or fields to the log."""
    return _escaped(text).replace(" ", "\\x20")


def _escaped(text: str) -> str:
    """Return `text` shortened, for a line or a quoted field: without control characters and double quotes."""
    return text[:_MAX_LOGGED_CHARACTERS].encode("unicode_escape").decode("ascii").replace('"', "'")
