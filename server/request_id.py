"""Ids of requests: `X-Request-Id`, the client's own or a new one, and `REQUEST_ID` for what is logged on the way."""

import uuid
from contextvars import ContextVar

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
