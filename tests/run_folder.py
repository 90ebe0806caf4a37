"""`run_folder`: where the processes of one run keep what they make for each other."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "KAON_TEST_FOLDER"


def run_folder() -> Path:
    """The folder of this run, removed by the process that calls this first; those that it starts inherit it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="kaon-run-")
        atexit.register(shutil.rmtree, os.environ[_VARIABLE], ignore_errors=True)
    return Path(os.environ[_VARIABLE])
