"""`run_folder`: where the processes of a run keep what they make for each other. `own_folder`: one of a process."""

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "TEST_RUN_FOLDER"
"""Not of Kaon's prefix: `kaon serve`, which tests start, refuses variables that are no settings."""


def run_folder() -> Path:
    """The folder of this run, removed by the process that calls this first; those that it starts inherit it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(own_folder("kaon-test-run-"))
    return Path(os.environ[_VARIABLE])


def own_folder(prefix: str) -> Path:
    """Make a temporary folder, which this process removes when it exits.

    The process holds a lock on it for as long as it lives. A folder with this prefix that is not locked is that of
    a process that was killed, and is removed here.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if (lock := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        # Another process may have found it before it was locked, and removed it.
        if _locked(folder) is not None and folder.is_dir():
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder


def _locked(folder: Path) -> int | None:
    """Lock `folder` and return its descriptor; None if it is gone, another user's, or locked by another process."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
