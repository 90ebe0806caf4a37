"""Signals that end the server while it imports its modules."""

import os
import signal
import weakref
from collections.abc import Iterator

import pytest

from server.signals import Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


class Lock:
    """As importlib has one for each module that is being imported."""


def test_a_signal_that_arrives_in_importlibs_callback_is_recorded_and_raises_nothing_there(signals: Signals) -> None:
    def cb(reference: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def block() -> None:
        lock = Lock()
        with signals.interrupting():
            reference = weakref.ref(lock, cb)
            del lock
            assert reference() is None
            assert signals.endings == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert signals.endings == [signal.SIGTERM, signal.SIGINT]
