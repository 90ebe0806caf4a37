"""The processor time of a test includes that of the processes that it starts, running and ended ones."""

import subprocess
import sys

from tests.processor_time import spent

SECONDS = 0.1
SPENDS = f"""
import subprocess, sys, time
if len(sys.argv) > 1:
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < {SECONDS}: pass"], check=True)
while time.process_time() < {SECONDS}: pass
print(flush=True)
sys.stdin.read()
"""


def test_processes_are_counted_once_while_they_run_and_when_they_have_ended() -> None:
    before = spent()
    command = [sys.executable, "-c", SPENDS, "and another"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = spent() - before
        process.communicate()
    # Processor time of other processes is known in hundredths of a second.
    assert running > 1.8 * SECONDS
    assert running - 0.05 < spent() - before < 1.5 * running
