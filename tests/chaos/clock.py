"""`WallClock`: the wall clock of the processes that a test starts, by libfaketime (Debian's package faketime)."""

import glob
import os
from pathlib import Path

_CANDIDATES = (os.environ.get("LIBFAKETIME", ""), *glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1"))
LIBRARY = next((each for each in _CANDIDATES if each and Path(each).exists()), "")
"""Path of the library; empty where it is not installed."""
MISSING = "libfaketime is not installed: apt install faketime, or name the library by LIBFAKETIME"

JUMPS = ("+400d", "-400d", "+1h", "-1s", "+0")
"""Offsets from the true time, in the form of libfaketime; the last sets the clock right again."""


class WallClock:
    """The monotonic clock is not affected by the wall clock, as in the kernel."""

    def __init__(self, file: Path) -> None:
        """`file` contains the offset, which running processes read whenever they read the clock."""
        self._file = file
        self.set("+0")
        self.environment = {
            "LD_PRELOAD": LIBRARY,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        """Environment of the processes, inherited by their children."""

    def set(self, offset: str) -> None:
        """Set the clock of running processes, and of those that start later."""
        whole = self._file.with_suffix(".new")
        whole.write_text(offset + "\n")
        whole.rename(self._file)
