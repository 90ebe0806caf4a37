"""The step ring and the ranks' ends of steps: shared memory between processes, without names."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.distributed.step_transport import SLOT_BYTES, SLOTS, StepEnds, StepRing

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60


def ring_of(num_readers: int) -> tuple[StepRing, list[StepRing]]:
    """A writer's ring, and one a reader over the same memory."""
    descriptor, ring = StepRing.create(num_readers)
    readers = [StepRing(descriptor, num_readers) for _ in range(num_readers)]
    os.close(descriptor)
    return ring, readers


def read_in_thread(ring: StepRing, reader: int, count: int) -> tuple[threading.Thread, list[bytes]]:
    found: list[bytes] = []

    def read() -> None:
        for _ in range(count):
            found.append(ring.read(reader))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, found


def test_every_reader_gets_every_message_in_order() -> None:
    ring, readers = ring_of(3)
    messages = [bytes([number]) * (number % 7) for number in range(5 * SLOTS)]
    threads = [read_in_thread(each, number, len(messages)) for number, each in enumerate(readers)]
    for message in messages:
        ring.write(message)
    for thread, found in threads:
        thread.join(WAIT_SECONDS)
        assert found == messages


@pytest.mark.parametrize("size", [SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, (2 * SLOTS + 1) * SLOT_BYTES + 5])
def test_a_message_longer_than_a_slot_and_than_the_ring_arrives_whole(size: int) -> None:
    ring, [reader] = ring_of(1)
    message = os.urandom(size)
    thread, found = read_in_thread(reader, 0, 3)
    for each in (b"before", message, b"after"):
        ring.write(each)
    thread.join(WAIT_SECONDS)
    assert found == [b"before", message, b"after"]


def test_the_writer_waits_for_the_slowest_reader_and_overwrites_nothing() -> None:
    ring, [quick, slow] = ring_of(2)
    messages = [str(number).encode() for number in range(3 * SLOTS)]
    writer = threading.Thread(target=lambda: [ring.write(message) for message in messages])
    writer.start()
    thread, found = read_in_thread(quick, 0, len(messages))
    writer.join(0.2)
    assert writer.is_alive()
    assert [slow.read(1) for _ in messages] == messages
    for each in (writer, thread):
        each.join(WAIT_SECONDS)
    assert found == messages


def test_a_rank_in_another_process_sleeps_until_it_is_told() -> None:
    """Its processor time while it waits for a second is that of its start."""
    descriptor, ring = StepRing.create(1)
    ends_descriptor, ends = StepEnds.create(1)
    code = f"""
import resource
from engine.distributed.step_transport import StepEnds
from engine.distributed.step_transport import StepRing
ring, ends = StepRing({descriptor}, 1), StepEnds({ends_descriptor}, 1)
ends.tell(0, ring.read(0).decode())
before = resource.getrusage(resource.RUSAGE_SELF)
ring.read(0)
after = resource.getrusage(resource.RUSAGE_SELF)
ends.tell(0, str(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
"""
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=(descriptor, ends_descriptor), cwd=ROOT) as process:
        ring.write(b"hello")
        assert ends.take_within(0, WAIT_SECONDS) == "hello"
        assert ends.take_within(0, 1.0) is None
        ring.write(b"")
        spent = ends.take_within(0, WAIT_SECONDS)
        assert process.wait(WAIT_SECONDS) == 0
    assert spent is not None
    # It spins for half a millisecond. One that never slept would have a good part of the second.
    assert float(spent) < 0.1
    os.close(descriptor)
    os.close(ends_descriptor)


def test_ends_are_told_once_a_step_with_their_failures() -> None:
    descriptor, ends = StepEnds.create(2)
    others = StepEnds(descriptor, 2)
    os.close(descriptor)
    others.tell(1, "Größe\nTraceback")
    others.tell(0)
    assert (ends.take(0), ends.take(1)) == ("", "Größe\nTraceback")
    assert ends.take_within(1, 0.01) is None
    others.tell(1)
    assert ends.take(1) == ""


def test_of_a_failure_too_long_to_tell_the_sentence_and_what_raised_are_kept() -> None:
    descriptor, ends = StepEnds.create(1)
    os.close(descriptor)
    ends.tell(0, "sentence\n" + "frame\n" * 10_000 + "ValueError: last")
    told = ends.take(0)
    assert told.startswith("sentence\n")
    assert told.endswith("ValueError: last")
    assert len(told) < 1 << 14
