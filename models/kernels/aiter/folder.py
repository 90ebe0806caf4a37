"""Where the library keeps what it compiles: a folder that this user may write to, and that is one release's.

It takes what `AITER_JIT_DIR` names, else the folder `jit` of its own package. Where that may not be written, as in an
image whose server is not root, it copies all of it to ~/.aiter, from which its modules are not imported again.
"""

import importlib.util
import logging
import os
import sys
from pathlib import Path

import torch

from models.kernels.aiter import library

_log = logging.getLogger(__name__)

_VARIABLE = "AITER_JIT_DIR"


def prepare() -> None:
    """Name a folder that may be written, with what came compiled in it; what the environment says stays.

    The library does not look whether what it finds was compiled for this release of it, of torch and of Python: they
    are in the folder's name.
    """
    own, release = _own(), library.release()
    if _VARIABLE in os.environ or own is None or release is None or os.access(own, os.W_OK):
        return
    name = f"{release}-torch{torch.__version__}-{sys.implementation.cache_tag}"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kaon" / "aiter" / name
        folder.mkdir(parents=True, exist_ok=True)
        for compiled in own.glob("*.so"):
            if not (folder / compiled.name).exists():
                _link(folder / compiled.name, compiled)
    # The second of a user whom the system does not know, as one by number in a container.
    except (OSError, RuntimeError) as error:
        _log.warning("aiter may have nowhere to compile to: %s", error)
        return
    os.environ[_VARIABLE] = str(folder)


def left_locks() -> str | None:
    """In words, where a build has left a lock file that others wait for; None: nowhere."""
    named = os.environ.get(_VARIABLE)
    folder = Path(named) if named else _own()
    if folder is None:
        return None
    found = [*folder.glob("build/lock_*"), *folder.glob("build/*/build/lock")]
    # Newer releases look whether a lock's owner lives, and leave a file for that, which nobody waits for.
    locks = [lock for lock in found if lock.suffix != ".steal"]
    return f"{locks[0]} is left, which builds wait for: remove it if nothing else builds" if locks else None


def _own() -> Path | None:
    """The package's own folder."""
    found = importlib.util.find_spec("aiter")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0], "jit")
    return folder if folder.is_dir() else None


def _link(place: Path, target: Path) -> None:
    """In one step, also where a link to what is gone is in the way: other ranks do the same."""
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(place)
