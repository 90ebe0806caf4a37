"""The record of the running step, read by the process that outlives the core."""

import os

from engine.distributed.flight_record import FlightRecord


def test_what_one_process_writes_the_other_reads() -> None:
    descriptor = FlightRecord.create(max_sequences=4)
    here, there = FlightRecord(descriptor), FlightRecord(descriptor)
    os.close(descriptor)
    assert there.read() == []
    here.begin([7, 2**40, 0, 3])
    assert there.read() == [7, 2**40, 0, 3]
    here.begin([5])
    assert there.read() == [5]
    here.end()
    assert there.read() == []


def test_a_step_that_killed_its_process_stays_on_record() -> None:
    descriptor = FlightRecord.create(max_sequences=2)
    record = FlightRecord(descriptor)
    pid = os.fork()
    if pid == 0:
        FlightRecord(descriptor).begin([11, 12])
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    os.close(descriptor)
    assert record.read() == [11, 12]
