"""What a line of the log looks like, in every process."""

import subprocess
import sys


def test_a_line_has_the_time_the_process_the_level_and_the_module() -> None:
    program = (
        "import logging; from engine.distributed.processes import configure_logging; "
        "configure_logging('kaon-x', 'info', ' [%(name)s]'); "
        "logging.getLogger('a.b').info('told %d', 3); logging.getLogger('a').debug('not told')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    day, time, rest = done.stderr.split(" ", 2)
    assert [len(part) for part in day.split("-")] == [4, 2, 2]
    assert [len(part) for part in time.split(":")] == [2, 2, 6]
    assert rest == "kaon-x INFO a.b: told 3 [a.b]\n"
