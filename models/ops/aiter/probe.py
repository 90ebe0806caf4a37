"""Probes the aiter library in a child process: each operator computes small problems that are compared with torch.

Serving continues whatever the library does when it is imported or called. An operator that crashes or hangs the child
is left out, and the others are probed in another child. One rank of a host probes while the others wait for its
result, and the library compiles into a folder that this user may write to.
"""

import fcntl
import importlib
import importlib.util
import json
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from models.ops.aiter import child, library
from models.ops.aiter.cases import Sizes
from models.ops.self_test import failure_among

if TYPE_CHECKING:
    import subprocess


# One probe runs at a time on a host, and all ranks with the same question share its answer.
#
# The ranks and replicas of a server start together, and each needs the answer. Two processes that compile
# the library's kernels at the same time would race for its folder; probing one after the other would take longer.

_log = logging.getLogger(__name__)

_LONGEST = 1800.0
"""Seconds to wait for the lock: several operators may compile for minutes each."""
_LOCK_POLL_SECONDS = 0.1

Answer = dict[str, str | None]


class ProbeLockTimeout(Exception):
    """Another process has been probing for too long; the message says which."""


def answered(question: str, ask: Callable[[], Answer], longest: float = _LONGEST) -> Answer:
    """The answer of `ask`, which is called under a lock, or another process's answer to the same question meanwhile.

    The lock is released when its process ends. Raises `ProbeLockTimeout`, and `OSError` where no lock can be had.
    """
    since = time.monotonic()
    descriptor = os.open(_folder() / "aiter-probe", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    # The children do not inherit it: a compiler that outlives its parent must not keep the lock.
    with open(descriptor, "r+", encoding="utf-8") as file:
        _take(file.fileno(), since + longest, longest)
        record = _lock_record(file.read())
        # The clock is the system's, the same in all processes.
        if record.get("question") == question and since <= record["at"] <= time.monotonic():
            answer: Answer = record["answer"]
            return answer
        _write_lock_record(file.fileno(), {"pid": os.getpid()})
        answer = ask()
        _write_lock_record(file.fileno(), {"question": question, "at": time.monotonic(), "answer": answer})
        return answer


def _folder() -> Path:
    """The folder of the lock, to which only this user can write."""
    folder = Path(tempfile.gettempdir(), f"kaon-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory to which only this user has access; remove it")
    return folder


def _take(descriptor: int, late: float, longest: float) -> None:
    has_logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _lock_record(os.pread(descriptor, 4096, 0).decode(errors="replace")).get("pid", "another")
            if time.monotonic() > late:
                raise ProbeLockTimeout(f"process {pid} has been probing aiter for more than {longest:g} s") from None
            if not has_logged:
                _log.info("Waiting for process %s, which probes aiter", pid)
                has_logged = True
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _lock_record(text: str) -> dict[str, Any]:
    """The record in the lock file; empty where its writer was killed."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_lock_record(descriptor: int, what: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(what).encode(), 0)


# The folder into which the library compiles must be writable for this user, and belong to one release only.
#
# The library uses `AITER_JIT_DIR`, or else the folder `jit` of its package. Where that is not writable, as in an image
# whose server does not run as root, it copies everything to ~/.aiter and then does not import its modules from there.

_VARIABLE = "AITER_JIT_DIR"


def prepare() -> None:
    """Set `AITER_JIT_DIR`, unless it is set, to a writable folder with links to the package's compiled modules.

    The library does not check that a module was compiled for the installed releases of itself, torch and Python;
    therefore the name of the folder contains these.
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
    # `RuntimeError` for a user without an entry in the system, such as a numeric user in a container.
    except (OSError, RuntimeError) as error:
        _log.warning("aiter may have no folder to compile into: %s", error)
        return
    os.environ[_VARIABLE] = str(folder)


def left_locks() -> str | None:
    """A sentence that names a lock file which a build has left behind and others wait for; None: there is none."""
    named = os.environ.get(_VARIABLE)
    folder = Path(named) if named else _own()
    if folder is None:
        return None
    found = [*folder.glob("build/lock_*"), *folder.glob("build/*/build/lock")]
    # Newer releases check whether the owner of a lock lives, by a file on which no build waits.
    locks = [lock for lock in found if lock.suffix != ".steal"]
    return f"{locks[0]} blocks builds: remove it if no build is running" if locks else None


def _own() -> Path | None:
    """The folder `jit` of the package."""
    found = importlib.util.find_spec("aiter")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0], "jit")
    return folder if folder.is_dir() else None


def _link(place: Path, target: Path) -> None:
    """Make a link atomically, also where a broken link exists: other ranks do the same at the same time."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(place)


_SECONDS = 300.0
"""Most seconds for one operator: some of the library's kernels are compiled when they are first called."""
_ARCHITECTURES = ("gfx942", "gfx950")
"""Architectures that the library supports."""
_MARK = "kaon-aiter:"
"""Precedes each message of the child, which the library's own output may surround."""
_IMPORT = "import"
_MISSING = "aiter is not installed"
_POLL_SECONDS = 0.05


def unfit(arch: str) -> str | None:
    """Why the library cannot compute on a GPU of this architecture; None: it can."""
    if arch in _ARCHITECTURES:
        return None
    return f"aiter supports {' and '.join(_ARCHITECTURES)}, and the GPU is {arch}"


def probe(
    device: str,
    operators: Iterable[str] = library.OPERATORS,
    sizes: Sizes = Sizes(),  # noqa: B008, immutable
    seconds: float = _SECONDS,
) -> dict[str, str | None]:
    """By operator, None where the library's numbers were right, else a reason, in words.

    Processes of a host probe one at a time, and those with the same question share the first one's answer.
    """
    wanted = list(operators)
    found = importlib.util.find_spec("aiter")
    if found is None:  # Starting a process would take seconds.
        return dict.fromkeys(wanted, _MISSING)
    prepare()
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("AITER_")}
    question = library.version(), torch.__version__, found.origin, settings, _kind(device), wanted, sizes, seconds
    try:
        return answered(json.dumps(question), lambda: _probe_in_children(device, wanted, sizes, seconds))
    except ProbeLockTimeout as error:
        return dict.fromkeys(wanted, str(error))
    except OSError as error:
        return dict.fromkeys(wanted, f"its probe could not run: {error}")


def _kind(device: str) -> str:
    """A description that is equal for GPUs whose probes give the same answers."""
    if torch.device(device).type == "cpu":
        return device
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.gcnArchName}"


def _probe_in_children(device: str, operators: Sequence[str], sizes: Sizes, seconds: float) -> dict[str, str | None]:
    """See `probe`."""
    left = list(operators)
    reasons: dict[str, str | None] = {}
    while left:
        call = f"from models.ops.aiter import probe; probe.report({device!r}, {left!r}, {tuple(sizes)!r})"
        found, ended = _watched(call, seconds)
        reasons |= found.reasons
        left = [operator for operator in left if operator not in found.reasons]
        if not left:
            break
        if ended is None:  # A child that ends well has reported all operators.
            ended = "its probe ended before it reported a result"
        if found.is_imported and found.at is not None:
            reasons[found.at] = ended
            left.remove(found.at)
        else:
            reasons |= dict.fromkeys(left, ended)
            break
    return reasons


class _Found(NamedTuple):
    """What a child reported before it ended."""

    reasons: dict[str, str | None]
    is_imported: bool
    at: str | None
    """The operator that it was computing."""


def _watched(call: str, seconds: float) -> tuple[_Found, str | None]:
    """Run a probe's call in a child; what it reported, and how it ended where it did not end well."""
    # Files, because reading a pipe would wait for compilers that inherited it.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = child.start(call, out, errors)
        try:
            is_late = _is_late(process, lambda: os.fstat(out.fileno()).st_size, seconds)
        finally:
            child.end(process)
        found, stderr = _reported(_text(out)), _text(errors)
    if is_late:
        locks = left_locks()
        return found, f"its probe took longer than {seconds:g} s" + (f"; {locks}" if locks else "")
    if process.returncode < 0:
        return found, f"its probe was ended by signal {-process.returncode}"
    if process.returncode or not found.reasons:
        last = stderr.strip().splitlines()[-1:] or ["it wrote nothing to stderr"]
        return found, f"its probe ended with exit code {process.returncode}: {last[0]}"
    return found, None


def _is_late(process: "subprocess.Popen[bytes]", output_size: Callable[[], int], seconds: float) -> bool:
    """Wait until the child ends; True if it reported nothing for `seconds`, or at first for the time to load torch."""
    before, since = 0, time.monotonic()
    while process.poll() is None:
        if output_size() != before:
            before, since = output_size(), time.monotonic()
        if time.monotonic() - since > (seconds if before else max(seconds, _SECONDS)):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _reported(printed: str) -> _Found:
    reasons: dict[str, str | None] = {}
    begun: list[str] = []
    decoder = json.JSONDecoder()
    for words in printed.split(_MARK)[1:]:
        operator, *reason = decoder.raw_decode(words)[0]
        if reason:
            reasons[operator] = reason[0]
        else:
            begun.append(operator)
    at = begun[-1] if begun and begun[-1] not in (*reasons, _IMPORT) else None
    return _Found(reasons, len(begun) > 1, at)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _report(*words: str | None) -> None:
    sys.stdout.write(f"\n{_MARK}{json.dumps(words)}\n")
    sys.stdout.flush()


def report(device: str, operators: Sequence[str], sizes: Sequence[int | bool]) -> None:
    """The child's work: report each operator when it begins, and the reason, or None, when it is done."""
    _report(_IMPORT)
    try:
        importlib.import_module("aiter")
    except ModuleNotFoundError as error:
        missing = _MISSING if error.name == "aiter" else f"it could not be imported: {error}"
        _report_all(operators, missing)
        return
    # A library that is broken may raise anything.
    except Exception as error:  # noqa: BLE001
        _report_all(operators, f"it could not be imported: {type(error).__name__}: {error}")
        return
    on = torch.device(device)
    if on.index is not None:
        torch.cuda.set_device(on)
    for operator in operators:
        _report(operator)
        _report(operator, wrong(operator, Sizes._make(sizes), on))


def _report_all(operators: Sequence[str], reason: str) -> None:
    for operator in operators:
        _report(operator, reason)


def wrong(operator: str, sizes: Sizes, device: torch.device) -> str | None:
    """What is wrong with one operator, compared in this process; None: nothing."""
    from models.ops.aiter.cases import COMPARISONS

    try:
        library.bind(operator)
        with torch.inference_mode():
            return failure_among(COMPARISONS[operator](sizes, device))
    except library.DoesNotFit as error:
        return str(error)
    except Exception as failure:  # noqa: BLE001, as above
        return f"it failed: {type(failure).__name__}: {failure}".splitlines()[0]
