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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from models.ops.aiter import child, library
from models.ops.aiter.cases import Sizes

if TYPE_CHECKING:
    import subprocess

    from models.ops.aiter.cases import Finding


# One probe at a time on a host, and one for all ranks with the same question.
#
# The ranks and replicas of a server start together, and each needs the answer. Two that compile the library's kernels
# at once would race for its folder; probing one after the other would multiply the time.

_log = logging.getLogger(__name__)

_LONGEST = 1800.0
"""Seconds to wait for the lock: several operators may compile for minutes each."""
_LOCK_POLL_SECONDS = 0.1

Answer = dict[str, str | None]


class ProbeLockTimeout(Exception):
    """Another process has been probing for too long; in words."""


def answered(question: str, ask: Callable[[], Answer], longest: float = _LONGEST) -> Answer:
    """The answer of `ask`, called under the lock, or of another process of this user to the same question meanwhile.

    The lock ends with its process. Raises `ProbeLockTimeout`, and `OSError` where no lock can be had.
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
    """A folder that only this user can write to."""
    folder = Path(tempfile.gettempdir(), f"kaon-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory of this user's alone; remove it")
    return folder


def _take(descriptor: int, late: float, longest: float) -> None:
    has_logged = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _lock_record(os.pread(descriptor, 4096, 0).decode(errors="replace")).get("pid", "another")
            if time.monotonic() > late:
                raise ProbeLockTimeout(f"process {pid} has been probing it for more than {longest:g} s") from None
            if not has_logged:
                _log.info("Waiting for process %s, which probes aiter", pid)
                has_logged = True
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _lock_record(text: str) -> dict[str, Any]:
    """What is in the file; nothing where its writer was ended."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_lock_record(descriptor: int, what: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(what).encode(), 0)


# The folder into which the library compiles: writable for this user, and used by one release only.
#
# The library uses `AITER_JIT_DIR`, else the folder `jit` of its own package. Where that is not writable, as in an
# image whose server is not root, it copies everything to ~/.aiter, from which its modules are not imported again.

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


_SECONDS = 300.0
"""Of one operator: some of the library's kernels are compiled when they are first called."""
_ARCHITECTURES = ("gfx942", "gfx950")
"""That the library is made for."""
_MARK = "kaon-aiter:"
"""Before what the probe found; around it is what the library prints."""
_IMPORT = "import"
_MISSING = "aiter is not installed"
_LOOK_AGAIN = 0.05


def unfit(arch: str) -> str | None:
    """Why the library computes nothing on such a GPU; None: it may."""
    if arch in _ARCHITECTURES:
        return None
    return f"aiter is made for {' and '.join(_ARCHITECTURES)}, and the GPU is {arch}"


def probe(
    device: str,
    operators: Iterable[str] = library.OPERATORS,
    sizes: Sizes = Sizes(),  # noqa: B008, immutable
    seconds: float = _SECONDS,
) -> dict[str, str | None]:
    """By operator, None where the library gave the right numbers, else what was wrong, in words.

    Processes of a host ask one at a time, and those that ask the same share what the first of them found.
    """
    wanted = list(operators)
    found = importlib.util.find_spec("aiter")
    if found is None:  # Spares a process its seconds.
        return dict.fromkeys(wanted, _MISSING)
    prepare()
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith("AITER_")}
    question = library.version(), torch.__version__, found.origin, told, _kind(device), wanted, sizes, seconds
    try:
        return answered(json.dumps(question), lambda: _found_wrong(device, wanted, sizes, seconds))
    except ProbeLockTimeout as error:
        return dict.fromkeys(wanted, str(error))
    except OSError as error:
        return dict.fromkeys(wanted, f"its probe could not be run: {error}")


def _kind(device: str) -> str:
    """What GPUs have in common of which one is as good as the other."""
    if torch.device(device).type == "cpu":
        return device
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.gcnArchName}"


def _found_wrong(device: str, operators: Sequence[str], sizes: Sizes, seconds: float) -> dict[str, str | None]:
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
        if ended is None:  # A child that ends well has told of all.
            ended = "its probe ended before it had told"
        if found.is_imported and found.at is not None:
            reasons[found.at] = ended
            left.remove(found.at)
        else:
            reasons |= dict.fromkeys(left, ended)
            break
    return reasons


class _Found(NamedTuple):
    """What a child told until its end."""

    reasons: dict[str, str | None]
    is_imported: bool
    at: str | None
    """The operator that it was at."""


def _watched(call: str, seconds: float) -> tuple[_Found, str | None]:
    """Run a probe's call; what it told, and how it ended where it did not end well."""
    # Files: a pipe that a compiler it started holds open would be waited for.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = child.start(call, out, errors)
        try:
            is_late = _is_late(process, lambda: os.fstat(out.fileno()).st_size, seconds)
        finally:
            child.end(process)
        found, said = _told(_text(out)), _text(errors)
    if is_late:
        locks = left_locks()
        return found, f"its probe took longer than {seconds:g} s" + (f"; {locks}" if locks else "")
    if process.returncode < 0:
        return found, f"its probe was ended by signal {-process.returncode}"
    if process.returncode or not found.reasons:
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        return found, f"its probe ended with exit code {process.returncode}: {last[0]}"
    return found, None


def _is_late(process: "subprocess.Popen[bytes]", told: Callable[[], int], seconds: float) -> bool:
    """Wait for its end, or until it has told nothing for so long. Before it tells anything, it is loading torch."""
    before, since = 0, time.monotonic()
    while process.poll() is None:
        if told() != before:
            before, since = told(), time.monotonic()
        if time.monotonic() - since > (seconds if before else max(seconds, _SECONDS)):
            return True
        time.sleep(_LOOK_AGAIN)
    return False


def _told(printed: str) -> _Found:
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


def _tell(*words: str | None) -> None:
    sys.stdout.write(f"\n{_MARK}{json.dumps(words)}\n")
    sys.stdout.flush()


def report(device: str, operators: Sequence[str], sizes: Sequence[int | bool]) -> None:
    """The child's work: tell of each operator when it begins, and what was wrong when it is done."""
    _tell(_IMPORT)
    try:
        importlib.import_module("aiter")
    except ModuleNotFoundError as error:
        missing = _MISSING if error.name == "aiter" else f"it could not be imported: {error}"
        _tell_all(operators, missing)
        return
    # A library that is broken may raise anything.
    except Exception as error:  # noqa: BLE001
        _tell_all(operators, f"it could not be imported: {type(error).__name__}: {error}")
        return
    on = torch.device(device)
    if on.index is not None:
        torch.cuda.set_device(on)
    for operator in operators:
        _tell(operator)
        _tell(operator, wrong(operator, Sizes._make(sizes), on))


def _tell_all(operators: Sequence[str], reason: str) -> None:
    for operator in operators:
        _tell(operator, reason)


def wrong(operator: str, sizes: Sizes, device: torch.device) -> str | None:
    """What is wrong with one operator, found in this process; None: nothing."""
    from models.ops.aiter.cases import CHECKS

    try:
        library.bind(operator)
        with torch.inference_mode():
            return next(_too_far(CHECKS[operator](sizes, device)), None)
    except library.DoesNotFit as error:
        return str(error)
    except Exception as failure:  # noqa: BLE001, as above
        return f"it failed: {type(failure).__name__}: {failure}".splitlines()[0]


def _too_far(findings: Iterator["Finding"]) -> Iterator[str]:
    for problem, error, limit in findings:
        if not error <= limit:
            yield f"its numbers are off by {error:.3g}, {problem}"
