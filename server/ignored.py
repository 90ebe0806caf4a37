"""Records the fields of a request that were accepted but ignored, for a header of the answer and for the log.

Any route calls `ignore`; `RequestIdMiddleware` calls `collect` around the request and adds the header to the answer.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_log = logging.getLogger(__name__)

HEADER = "x-kaon-ignored"

_MAX_HEADER = 1024
"""Most characters of the header. Entries that do not fit are only counted."""

_MAX_REMEMBERED = 256

_VISIBLE = frozenset(map(chr, range(0x20, 0x7F))) - {","}

_IGNORED: ContextVar[tuple[list[str], set[str]] | None] = ContextVar("ignored", default=None)
"""The list that `collect` yields, and the same entries as a set: a request may have tens of thousands."""


def ignore(what: str) -> None:
    """Record that `what` of the current request was ignored: a field's path, and optionally a reason in brackets.

    No effect outside of a request.
    """
    ignored, known = _IGNORED.get() or ([], set())
    if what not in known:
        known.add(what)
        ignored.append(what)


@contextmanager
def collect() -> Iterator[list[str]]:
    """Collect what `ignore` records, also in threads that copy the context, until the end of the block."""
    ignored: list[str] = []
    token = _IGNORED.set((ignored, set()))
    try:
        yield ignored
    finally:
        _IGNORED.reset(token)


def header_value(ignored: list[str]) -> bytes:
    """Format the header's value, such as `tools[3] (web_search), input[5] (image)`, in visible ASCII."""
    shown: list[str] = []
    length = 0
    for number, each in enumerate(ignored):
        text = "".join(character if character in _VISIBLE else "?" for character in each[:_MAX_HEADER])
        length += len(text) + 2
        if shown and length > _MAX_HEADER:
            shown.append(f"{len(ignored) - number} more")
            break
        shown.append(text)
    return ", ".join(shown).encode("ascii")


class IgnoredLog:
    """Logs ignored fields. Each combination is a warning only once, because agents repeat theirs with every turn."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def write(self, value: bytes) -> None:
        """Log the header's value, at level debug if it was logged before."""
        level = logging.DEBUG if value in self._seen else logging.WARNING
        self._seen[value] = None
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)
        _log.log(level, "accepted and left out of a request: %s", value.decode("ascii"))
