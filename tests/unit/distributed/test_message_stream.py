"""Messages over a stream arrive whole and in order, including the last one, without blocking the writer."""

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from engine.distributed.message_stream import MessageReader, MessageWriter

WAIT_MS = 60_000


class Ends:
    """Both ends of a stream."""

    def __init__(self) -> None:
        self.theirs, ours = socket.socketpair()
        self.writer, self.reader = MessageWriter(self.theirs), MessageReader(ours)

    def next_message(self) -> bytes:
        """The next message, once it has arrived."""
        while (message := self.reader.receive()) is None:
            assert self.reader.poll(WAIT_MS)
        return message


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.theirs.close()
    ends.reader.close()


def test_messages_of_any_length_arrive_whole_and_in_order(ends: Ends) -> None:
    source = random.Random(0)
    lengths = [0, 1, 2**16 - 8, 2**16, 2**16 + 1, 3 * 2**20, *(source.randrange(5000) for _ in range(500))]
    messages = [source.randbytes(length) for length in lengths]
    for message in messages:
        ends.writer.send(message)  # More than the socket buffers: a thread sends the rest.
    assert [ends.next_message() for _ in messages] == messages
    assert ends.reader.receive() is None


def test_message_that_arrived_in_part_is_not_there_yet(ends: Ends) -> None:
    frame = (5).to_bytes(8, "little") + b"hello"
    for byte in frame[:-1]:
        ends.theirs.send(bytes([byte]))
        assert ends.reader.receive() is None
    ends.theirs.send(frame[-1:])
    assert ends.next_message() == b"hello"


def test_flush_waits_for_the_reader_and_not_longer_than_it_may(ends: Ends) -> None:
    message = bytes(2**20)
    ends.writer.send(message)
    ends.writer.flush(0.01)
    received: list[bytes] = []
    reading = threading.Thread(target=lambda: received.append(ends.next_message()))
    reading.start()
    ends.writer.flush(WAIT_MS / 1e3)
    reading.join()
    assert received == [message]


def test_reader_has_what_was_sent_before_the_end_and_then_waits_no_more(ends: Ends) -> None:
    ends.writer.send(b"last")
    ends.theirs.close()
    assert ends.next_message() == b"last"
    while ends.reader.poll(WAIT_MS):
        assert ends.reader.receive() is None


def test_messages_without_a_reader_are_lost_and_nothing_raises(ends: Ends) -> None:
    ends.reader.close()
    for _ in range(3):
        ends.writer.send(bytes(2**20))
    ends.writer.flush(WAIT_MS / 1e3)


def test_reader_that_goes_while_a_thread_sends_ends_the_thread(ends: Ends) -> None:
    for _ in range(3):
        ends.writer.send(bytes(2**20))
    ends.reader.close()
    ends.writer.flush(WAIT_MS / 1e3)
    assert "outputs" not in {thread.name for thread in threading.enumerate()}
