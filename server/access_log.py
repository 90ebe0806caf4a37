"""`AccessLog`: a line for each request that has ended. Written by `server.middleware`."""

import logging
import sys
import uuid
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from starlette.types import Scope

# [request_id] Ids of requests: `X-Request-Id`, the client's own or a new one, and `REQUEST_ID` for what is logged on
# the way.

HEADER = "X-Request-Id"

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request at hand; None outside of one."""

_MAX_LENGTH = 128
_VISIBLE = frozenset(range(0x21, 0x7F))


def new_request_id() -> str:
    """An id for a request that brought none."""
    return f"req_{uuid.uuid4().hex}"


def usable_request_id(given: bytes) -> str | None:
    """The client's own id, if one may go into a header and a log line: up to 128 visible ASCII characters."""
    return given.decode("ascii") if 0 < len(given) <= _MAX_LENGTH and _VISIBLE.issuperset(given) else None


# [paths] `route_path`: a request's path as the routes see it. Used by the layers that act before the routes do.


def route_path(scope: Scope) -> str:
    """The path without the prefix of a proxy (`root_path`), where the proxy left it there."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and path.startswith(prefix + "/") else path


_log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status, in logs only, of a request whose client left before the answer."""

_QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""What is asked every few seconds, by probes and scrapers; logged at debug."""

_SHOWN_CHARACTERS = 256


class Ended(NamedTuple):
    """How a request ended."""

    request_id: str
    status: int | None
    """None where no answer was begun."""
    complete: bool
    bytes: int
    """Of the answer's body."""
    seconds: float
    """From the request's head to the answer's end."""


class Entry(msgspec.Struct):
    """A line of the JSON log."""

    time: str
    client: str | None
    method: str
    path: str
    """As it was sent, without the query."""
    status: int
    """`CLIENT_GONE` where the client left before the answer's end."""
    bytes: int
    seconds: float
    request_id: str


class AccessLog:
    """Writes to stderr, as text with the other messages or as one JSON object a line."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        _log.handlers = [logging.StreamHandler(sys.stderr)] if json else []
        _log.propagate = not json

    def write(self, scope: Scope, ended: Ended) -> None:
        """Log a request. Probes and scrapes that went well are logged at debug."""
        quiet = route_path(scope) in _QUIET_PATHS and ended.status == 200
        level = logging.DEBUG if quiet else logging.INFO
        if not _log.isEnabledFor(level):
            return
        entry = _entry(scope, ended)
        if self._json:
            _log.log(level, "%s", msgspec.json.encode(entry).decode())
        else:
            _log.log(
                level,
                "%s %s %s %d %d B %.3f s %s",
                entry.client or "-",
                entry.method,
                entry.path,
                entry.status,
                entry.bytes,
                entry.seconds,
                entry.request_id,
            )


def _entry(scope: Scope, ended: Ended) -> Entry:
    client = scope.get("client")
    head = scope["method"] == "HEAD"
    return Entry(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        client=None if client is None else _shown(f"{client[0]}:{client[1]}"),
        method=_shown(scope["method"]),
        path=_shown(scope.get("raw_path", scope["path"].encode()).decode("latin-1")),
        status=ended.status if ended.status is not None and ended.complete else CLIENT_GONE,
        bytes=0 if head else ended.bytes,
        seconds=round(ended.seconds, 6),
        request_id=ended.request_id,
    )


def _shown(text: str) -> str:
    """`text` on one line, whatever it holds: a request must not write lines of its own."""
    return text[:_SHOWN_CHARACTERS].encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
