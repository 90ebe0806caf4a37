"""`HeldCheckpoint`: a model in a directory of its own, where engine cores that start can be held up.

A stopped process would not do: the server sees that it is stopped, and replaces it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from models.demo import CHECKPOINT_DIR

_FILE = "generation_config.json"
"""Read by a core once, early in its start, and by the server only in its own."""


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
        """A core that starts within waits for what the file holds until the end."""
        file, aside = self.path / _FILE, self.path / "aside"
        content = file.read_bytes()
        file.rename(aside)
        os.mkfifo(file)
        try:
            yield
        finally:
            # Open for both, it opens though nobody may wait; who does is woken, and reads what is written here.
            pipe = os.open(file, os.O_RDWR)
            aside.rename(file)
            os.write(pipe, content)
            os.close(pipe)
