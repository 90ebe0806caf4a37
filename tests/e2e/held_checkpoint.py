"""`HeldCheckpoint`: a model in a directory of its own, at which starting engine cores can be blocked.

A stopped process would not do: the server detects that it is stopped, and replaces it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from models.demo import CHECKPOINT_DIR

_FILE = "generation_config.json"
"""A file that a core reads once, early in its start, and the server only in its own start."""


class HeldCheckpoint:
    """At `path`, from the start on."""

    def __init__(self, path: Path, of: Path = CHECKPOINT_DIR) -> None:
        """`of`: another checkpoint than the embedded one."""
        self.path = path
        path.mkdir()
        for file in of.iterdir():
            (path / file.name).symlink_to(file)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A core that starts within the block reads the file's contents, and so continues, after it."""
        file, aside = self.path / _FILE, self.path / "aside"
        content = file.read_bytes()
        file.rename(aside)
        os.mkfifo(file)
        try:
            yield
        finally:
            # Opened for reading and writing, it never blocks; a waiting reader is woken, and reads the text written
            # here.
            pipe = os.open(file, os.O_RDWR)
            aside.rename(file)
            os.write(pipe, content)
            os.close(pipe)
