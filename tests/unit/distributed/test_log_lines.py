"""Log lines: their format in every process; logging never waits for the reader of the log."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from engine.distributed.logs import LogWriter

PREAMBLE = (
    "import logging, os; from engine.distributed.logs import BARE, before_stack, configure_logging; "
    "configure_logging('kaon-x [100%s]', 'info', ' [%(name)s]'); log = logging.getLogger('a.b'); "
)


def stderr_of(program: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    return done.stderr


def test_a_line_has_the_time_the_process_the_level_and_the_module() -> None:
    stderr = stderr_of("log.info('logged %d', 3); logging.getLogger('a').debug('not logged')")
    day, time, rest = stderr.split(" ", 2)
    assert [len(part) for part in day.split("-")] == [4, 2, 2]
    assert [len(part) for part in time.split(":")] == [2, 2, 6]
    assert rest == "kaon-x [100%s] INFO a.b: logged 3 [a.b]\n"


def test_a_bare_line_is_its_message() -> None:
    assert stderr_of("log.info('{%s}', 1, extra=BARE)") == "{1}\n"


def test_what_was_logged_before_a_hard_exit_is_written() -> None:
    stderr = stderr_of("[log.info('%d', n) for n in range(5000)]; logging.shutdown(); os._exit(3)", code=3)
    assert [line.split()[-2] for line in stderr.splitlines()] == [str(number) for number in range(5000)]


def test_an_exception_that_ends_a_process_is_logged_with_its_traceback() -> None:
    stderr = stderr_of("log.info('before'); raise ValueError('no such thing')", code=1)
    before, critical, *trace = stderr.splitlines()
    assert "before" in before
    assert "kaon-x [100%s] CRITICAL" in critical
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1].startswith("ValueError: no such thing")


def test_what_is_logged_cannot_steer_the_terminal_of_its_reader() -> None:
    program = r"""
log.info('%s', 'a\x1b[2J\tb\x9b2J\x7f\r')
log.info('{"a": "\x1b"}', extra=BARE)
try:
    raise ValueError('no\x07')
except ValueError:
    log.exception('failed')"""
    stderr = stderr_of(program)
    assert r"a\x1b[2J" + "\t" + r"b\x9b2J\x7f\x0d" in stderr
    assert r"no\x07" in stderr
    assert all(character in "\t\n" or character.isprintable() for character in stderr)


def test_a_message_is_one_line_and_reads_from_left_to_right() -> None:
    program = r"""
log.warning('%s', 'no\n2026-01-01 00:00:00.000 kaon-x INFO forged\u202edegrof\u2028')
try:
    raise ValueError('no')
except ValueError:
    log.exception('two\nlines')
log.error('another process:', extra=before_stack('its\nstack'))"""
    warning, failed, *stack, other, first, second = stderr_of(program).splitlines()
    assert warning.endswith(r"no\n2026-01-01 00:00:00.000 kaon-x INFO forged\u202edegrof\u2028 [a.b]")
    assert failed.endswith(r"two\nlines [a.b]")
    assert stack[0] == "Traceback (most recent call last):"
    assert stack[-1] == "ValueError: no"
    assert other.endswith("another process: [a.b]")
    assert [first, second] == ["its", "stack"]


def test_a_process_ends_although_its_log_is_not_read() -> None:
    """More lines than the pipe can buffer, including its own traceback."""
    program = PREAMBLE + "[log.info('x' * 1000) for _ in range(1000)]; raise ValueError"
    reader, writer = os.pipe()
    try:
        assert subprocess.run([sys.executable, "-c", program], stderr=writer, check=False, timeout=60).returncode == 1
    finally:
        os.close(reader)
        os.close(writer)


class Log(NamedTuple):
    """A logger whose lines go to a pipe."""

    logger: logging.Logger
    writer: LogWriter
    reader: int


@pytest.fixture
def log() -> Iterator[Log]:
    reader, descriptor = os.pipe()
    writer = LogWriter(descriptor, max_bytes=2**20)
    logger = logging.Logger("piped")
    logger.addHandler(writer)
    yield Log(logger, writer, reader)
    os.close(reader)  # Ends a blocked write.
    writer.flush()
    os.close(descriptor)


def read_lines(log: Log, until: str) -> list[str]:
    received = b""
    while until.encode() not in received:
        received += os.read(log.reader, 65536)
    return received.decode().splitlines()


def test_lines_beyond_what_may_wait_are_dropped_and_counted_and_the_count_is_logged(log: Log) -> None:
    for number in range(2000):
        log.logger.warning("%d %s", number, "x" * 1000)
    dropped = log.writer.dropped
    assert 500 < dropped < 1000
    lines = read_lines(log, "were dropped")
    assert [int(line.split()[0]) for line in lines[: 2000 - dropped]] == list(range(2000 - dropped))
    assert [line for line in lines if "were dropped" in line] == [
        f"{dropped} lines of this log were dropped because standard error was not read"
    ]
    log.logger.warning("again")
    assert read_lines(log, "again") == ["again"]
    assert log.writer.dropped == dropped


def test_lines_that_the_descriptor_refuses_are_counted() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = LogWriter(descriptor)
    logger = logging.Logger("broken")
    logger.addHandler(writer)
    logger.warning("to nobody")
    writer.flush()
    assert writer.dropped == 1
    os.close(descriptor)


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, False)
    log = Log(logging.Logger("impatient"), LogWriter(descriptor), reader)
    log.logger.addHandler(log.writer)
    for _ in range(300):
        log.logger.warning("x" * 1000)
    log.logger.warning("end")
    assert len(read_lines(log, "end")) == 301
    assert log.writer.dropped == 0
    os.close(reader)
    os.close(descriptor)
