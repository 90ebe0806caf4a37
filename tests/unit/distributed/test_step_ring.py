"""`SharedMemorySteps`: steps and reports in memory between processes, without names."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.distributed.step_transport import REPORTS, SLOT_BYTES, SLOTS, SharedMemorySteps

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 60


def steps_of(num_readers: int) -> tuple[SharedMemorySteps, list[SharedMemorySteps]]:
    """Rank 0's side, and that of each other rank over the same memory."""
    size = 1 + num_readers
    writer = SharedMemorySteps.create(size)
    readers = [SharedMemorySteps(*writer.descriptors, size, rank) for rank in range(1, size)]
    writer.close()
    return writer, readers


def read_in_thread(reader: SharedMemorySteps, count: int) -> tuple[threading.Thread, list[bytes]]:
    found: list[bytes] = []

    def read() -> None:
        for _ in range(count):
            found.append(reader.read())

    thread = threading.Thread(target=read)
    thread.start()
    return thread, found


def test_every_reader_gets_every_message_in_order() -> None:
    steps, readers = steps_of(3)
    messages = [bytes([number]) * (number % 7) for number in range(5 * SLOTS)]
    threads = [read_in_thread(each, len(messages)) for each in readers]
    for message in messages:
        steps.write(message)
    for thread, found in threads:
        thread.join(WAIT_SECONDS)
        assert found == messages


@pytest.mark.parametrize("size", [SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, (2 * SLOTS + 1) * SLOT_BYTES + 5])
def test_a_message_longer_than_a_slot_and_than_the_ring_arrives_whole(size: int) -> None:
    steps, [reader] = steps_of(1)
    message = os.urandom(size)
    thread, found = read_in_thread(reader, 3)
    for each in (b"before", message, b"after"):
        steps.write(each)
    thread.join(WAIT_SECONDS)
    assert found == [b"before", message, b"after"]


def test_the_writer_waits_for_the_slowest_reader_and_overwrites_nothing() -> None:
    steps, [quick, slow] = steps_of(2)
    messages = [str(number).encode() for number in range(3 * SLOTS)]
    writer = threading.Thread(target=lambda: [steps.write(message) for message in messages])
    writer.start()
    thread, found = read_in_thread(quick, len(messages))
    writer.join(0.2)
    assert writer.is_alive()
    assert [slow.read() for _ in messages] == messages
    for each in (writer, thread):
        each.join(WAIT_SECONDS)
    assert found == messages


def test_a_rank_in_another_process_sleeps_until_a_step_comes() -> None:
    """Its processor time after a wait of a second equals that at the start of the wait."""
    steps = SharedMemorySteps.create(2)
    [descriptor] = steps.descriptors
    code = f"""
import resource
from engine.distributed.step_transport import SharedMemorySteps
steps = SharedMemorySteps({descriptor}, 2, 1)
steps.report(steps.read().decode())
before = resource.getrusage(resource.RUSAGE_SELF)
steps.read()
after = resource.getrusage(resource.RUSAGE_SELF)
steps.report(str(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
"""
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=(descriptor,), cwd=ROOT) as process:
        steps.write(b"hello")
        assert steps.take_within(1, WAIT_SECONDS) == "hello"
        assert steps.take_within(1, 1.0) is None
        steps.write(b"")
        spent = steps.take_within(1, WAIT_SECONDS)
        assert process.wait(WAIT_SECONDS) == 0
    assert spent is not None
    # It spins for half a millisecond. If it never slept, it would use a large part of the second.
    assert float(spent) < 0.1
    steps.close()


def test_ranks_report_once_a_step_with_their_failures() -> None:
    steps, [first, second] = steps_of(2)
    second.report("Größe\nTraceback")
    first.report()
    assert (steps.take(1), steps.take(2)) == ("", "Größe\nTraceback")
    assert steps.take_within(2, 0.01) is None
    second.report()
    assert steps.take(2) == ""


def test_reports_of_successive_steps_wait_in_their_order() -> None:
    steps, [rank] = steps_of(1)
    for first in range(3):
        failures = [f"step {first + number}" for number in range(REPORTS)]
        for failure in failures:
            rank.report(failure)
        assert [steps.take(1) for _ in failures] == failures


def test_a_failure_that_is_too_long_keeps_its_sentence_and_its_last_line() -> None:
    steps, [rank] = steps_of(1)
    rank.report("sentence\n" + "frame\n" * 10_000 + "ValueError: last")
    failure = steps.take(1)
    assert failure.startswith("sentence\n")
    assert failure.endswith("ValueError: last")
    assert len(failure) < 1 << 14
