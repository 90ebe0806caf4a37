"""The library's probe: in a process of its own, each operator computes small problems that torch checks.

Whatever the library does when it is imported or called, serving goes on. An operator that takes the process down, or
hangs, is the one that is left out: the others are looked at in another process.
"""

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

import torch

from models.kernels.aiter import child, folder, library, turns
from models.kernels.aiter.sizes import Sizes

if TYPE_CHECKING:
    import subprocess

    from models.kernels.aiter.checks import Finding

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
    folder.prepare()
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith("AITER_")}
    question = library.version(), torch.__version__, found.origin, told, _kind(device), wanted, sizes, seconds
    try:
        return turns.answered(json.dumps(question), lambda: _found_wrong(device, wanted, sizes, seconds))
    except turns.NoTurn as error:
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
        call = f"from models.kernels.aiter import probe; probe.report({device!r}, {left!r}, {tuple(sizes)!r})"
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
        locks = folder.left_locks()
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
    from models.kernels.aiter.checks import CHECKS

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
