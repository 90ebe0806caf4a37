"""Ports for what tests listen at: numbers that no other test process is given.

A port that the system picked is anybody's again until the server listens on it, and a test run next to this one may be
given it. So each process claims a range for its life, below those that the system picks from.
"""

import errno
import functools
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack

_FIRST, _LAST = 10_000, 32_000
_SIZE = 500
"""Ports of a range: the first is its claim, the others are given out in turn."""


def free_ports(host: str = "127.0.0.1", count: int = 1) -> int:
    """The first of so many ports in a row on which nothing listens at an address."""
    _, turn = _claim()
    while True:
        first = next(turn)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server((host, port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        for _ in range(count - 1):
            next(turn)
        return first


@functools.cache
def _claim() -> tuple[socket.socket, Iterator[int]]:
    """A socket that listens for as long as this process lives, so that no other claims its range; and the range."""
    for first in range(_FIRST, _LAST, _SIZE):
        try:
            claim = socket.create_server(("127.0.0.1", first))
        except OSError:
            continue
        # The last ones are only given out behind others: a row of ports ends within the range.
        return claim, itertools.cycle(range(first + 1, first + _SIZE - 8))
    raise RuntimeError(f"every range of ports between {_FIRST} and {_LAST} is claimed by another test process")
