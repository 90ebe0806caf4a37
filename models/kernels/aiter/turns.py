"""One probe at a time on a host, and one for all ranks that ask the same.

The ranks and replicas of a server start together, and each asks. Two that compile the library's kernels at once would
race for its folder, and one after the other they would take as many times as long.
"""

import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_LONGEST = 1800.0
"""Seconds to wait for a turn: several operators may compile for minutes each."""
_LOOK_AGAIN = 0.1

Answer = dict[str, str | None]


class NoTurn(Exception):
    """It is another's turn for too long; in words."""


def answered(question: str, ask: Callable[[], Answer], longest: float = _LONGEST) -> Answer:
    """What `ask` says once it is this process' turn, or what one of this user's said of the same question meanwhile.

    A turn ends with its process, however that ends. Raises `NoTurn`, and `OSError` where no lock can be had.
    """
    since = time.monotonic()
    descriptor = os.open(_folder() / "aiter-probe", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    # The children do not inherit it: a compiler that outlives its parent must not keep the turn.
    with open(descriptor, "r+", encoding="utf-8") as file:
        _take(file.fileno(), since + longest, longest)
        told = _told(file.read())
        # The clock is the system's, the same in all processes.
        if told.get("question") == question and since <= told["at"] <= time.monotonic():
            answer: Answer = told["answer"]
            return answer
        _tell(file.fileno(), {"pid": os.getpid()})
        answer = ask()
        _tell(file.fileno(), {"question": question, "at": time.monotonic(), "answer": answer})
        return answer


def _folder() -> Path:
    """Where only this user can make files."""
    folder = Path(tempfile.gettempdir(), f"kaon-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user's alone; remove it")
    return folder


def _take(descriptor: int, late: float, longest: float) -> None:
    has_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _told(os.pread(descriptor, 4096, 0).decode(errors="replace")).get("pid", "another")
            if time.monotonic() > late:
                raise NoTurn(f"process {pid} has been probing it for more than {longest:g} s") from None
            if not has_told:
                _log.info("Waiting for process %s, which probes aiter", pid)
                has_told = True
            time.sleep(_LOOK_AGAIN)
        else:
            return


def _told(text: str) -> dict[str, Any]:
    """What is in the file; nothing where its writer was ended."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tell(descriptor: int, what: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(what).encode(), 0)
