"""`run_folder`: where the processes of one run keep what they make for each other."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "TEST_RUN_FOLDER"
"""Not of Kaon's prefix: `kaon serve`, which tests start, refuses variables that are no settings."""


def run_folder() -> Path:
    """The folder of this run, removed by the process that calls this first; those that it starts inherit it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="kaon-run-")
        atexit.register(shutil.rmtree, os.environ[_VARIABLE], ignore_errors=True)
    return Path(os.environ[_VARIABLE])
