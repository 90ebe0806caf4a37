"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """File descriptors of sockets that are closed when the test ends."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)
