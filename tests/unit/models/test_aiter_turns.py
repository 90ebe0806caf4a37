"""Processes of a host that probe `aiter`: one at a time, one for all that need the same answer, and none remains."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from models.ops.aiter import library, probe
from models.ops.aiter import probe as folder
from models.ops.aiter import probe as turns
from models.ops.aiter.cases import Sizes
from tests.aiter_library import Library
from tests.aiter_library import library as copied

__all__ = ["copied"]

CHILD = Path(folder.__file__).with_name("child.py")
LATEST = 60.0
"""Seconds after which a test fails; it takes milliseconds."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kaon-{os.getuid()}"


class Waiters:
    """Counts the processes that wait, by their log lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
        self.all_wait = Event()
        self._left = count
        monkeypatch.setattr(turns, "_log", self)

    def info(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            self.all_wait.set()


def until(is_so: Callable[[], bool]) -> bool:
    late = time.monotonic() + LATEST
    while not is_so() and time.monotonic() < late:
        time.sleep(0.01)
    return is_so()


def test_who_waits_takes_the_answer_to_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters, asked = Waiters(monkeypatch, 2), []

    def ask() -> turns.Answer:
        asked.append("asked")
        assert waiters.all_wait.wait(LATEST)
        return {"norm": None, "moe": "it hung"}

    with ThreadPoolExecutor(3) as ranks:
        answers = list(ranks.map(lambda _: turns.answered("the same", ask), range(3)))
    assert answers == 3 * [{"norm": None, "moe": "it hung"}]
    assert asked == ["asked"]


def test_other_questions_are_asked_when_the_first_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters, events, has_begun = Waiters(monkeypatch), [], Event()

    def first() -> turns.Answer:
        has_begun.set()
        assert waiters.all_wait.wait(LATEST)
        events.append("first")
        return {"norm": "first"}

    def second() -> turns.Answer:
        events.append("second")
        return {"norm": "second"}

    with ThreadPoolExecutor(1) as rank:
        other = rank.submit(turns.answered, "one", first)
        assert has_begun.wait(LATEST)
        assert turns.answered("another", second) == {"norm": "second"}
    assert other.result() == {"norm": "first"}
    assert events == ["first", "second"]


def test_an_answer_of_an_earlier_start_is_asked_for_again() -> None:
    assert turns.answered("the same", lambda: {"norm": "the driver was old"}) == {"norm": "the driver was old"}
    assert turns.answered("the same", lambda: {"norm": None}) == {"norm": None}


def test_a_turn_ends_with_its_process(place: Path) -> None:
    call = (
        "import sys, tempfile, time; from models.ops.aiter import probe as turns; tempfile.tempdir = sys.argv[1]; "
        "turns.answered('the same', lambda: print('asks', flush=True) or time.sleep(60))"
    )
    with subprocess.Popen([sys.executable, "-c", call, str(place.parent)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"asks\n"
        words = f"process {other.pid} has been probing aiter for more than 0.5 s"
        with pytest.raises(turns.ProbeLockTimeout, match=words):
            turns.answered("the same", dict, 0.5)
        other.kill()
        assert turns.answered("the same", lambda: {"norm": None}) == {"norm": None}


@pytest.mark.parametrize("left", ["", '{"pid"', "[1]", '{"question": "another", "at": 0, "answer": {}}'])
def test_what_another_has_left_is_no_answer(place: Path, left: str) -> None:
    place.mkdir(0o700)
    (place / "aiter-probe").write_text(left)
    assert turns.answered("the same", lambda: {"norm": None}) == {"norm": None}


def ask(monkeypatch: pytest.MonkeyPatch, *operators: str, sizes: Sizes = Sizes()) -> dict[str, str | None]:  # noqa: B008
    """A probe of which only the message to its child matters."""
    monkeypatch.setattr(probe, "_probe_in_children", lambda *_: dict.fromkeys(operators))
    return probe.probe("cpu", operators, sizes)


@pytest.mark.usefixtures("copied")
def test_a_probe_that_has_no_turn_leaves_operators_to_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(0o755)
    found = ask(monkeypatch, "norm", "moe")
    assert set(found) == {"norm", "moe"}
    assert str(found["moe"]).endswith(f"{place} is not a directory to which only this user has access; remove it")
    place.chmod(0o700)
    assert ask(monkeypatch, "norm") == {"norm": None}

    def never(*_: object) -> turns.Answer:
        raise turns.ProbeLockTimeout("process 7 has been probing aiter for more than 1800 s")

    monkeypatch.setattr(turns, "answered", never)
    assert ask(monkeypatch, "norm") == {"norm": "process 7 has been probing aiter for more than 1800 s"}


@pytest.mark.usefixtures("copied")
def test_a_question_is_the_same_where_its_answer_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []
    monkeypatch.setattr(turns, "answered", lambda question, _: questions.append(question) or {})
    ask(monkeypatch, "norm")
    ask(monkeypatch, "norm")
    ask(monkeypatch, "moe")
    ask(monkeypatch, "norm", sizes=Sizes(hidden=64))
    monkeypatch.setattr(library, "version", lambda: "aiter 0.1")
    ask(monkeypatch, "norm")
    monkeypatch.setattr(torch, "__version__", "3")
    ask(monkeypatch, "norm")
    monkeypatch.setenv("AITER_LOG_MORE", "1")
    ask(monkeypatch, "norm")
    assert questions[0] == questions[1]
    assert len(set(questions)) == 6
    # GPUs of one kind share an answer.
    properties = type("Properties", (), {"name": "MI300X", "gcnArchName": "gfx942"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert probe._kind("cuda:0") == probe._kind("cuda:7") == "MI300X gfx942"


def test_a_probe_that_hangs_may_remove_its_lock_file(copied: Library, tmp_path: Path) -> None:
    lock, other = tmp_path / "lock_module_norm", tmp_path / "jit" / "build"
    other.mkdir(parents=True)
    copied.write(
        "__init__.py",
        f"import pathlib, time\nlock = pathlib.Path({str(lock)!r})\nlock.touch()\n"
        "try:\n    time.sleep(600)\nfinally:\n    lock.unlink()\n",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AITER_JIT_DIR", str(other.parent))
        assert probe.probe("cpu", ["norm"], seconds=1.0) == {"norm": "its probe took longer than 1 s"}
        assert not lock.exists()
        (other / "lock_module_moe.steal").touch()
        assert folder.left_locks() is None
        (other / "lock_module_norm").touch()
        assert folder.left_locks() == (f"{other}/lock_module_norm blocks builds: remove it if no build is running")


IN_CHILD = f"""
import importlib.util, os, pathlib, signal, subprocess, sys, time
specification = importlib.util.spec_from_file_location("child", {str(CHILD)!r})
child = importlib.util.module_from_spec(specification)
specification.loader.exec_module(child)
marker = pathlib.Path(sys.argv[1])
"""
"""Run without the package, which imports torch."""


def run(source: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IN_CHILD + source, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=LATEST,
    )
    return done.stdout


def test_what_ignores_the_first_signal_is_ended_by_the_second_with_what_it_started(tmp_path: Path) -> None:
    stubborn = (
        "import os, pathlib, signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "compiler = subprocess.Popen(['sleep', '600']); "
        "pathlib.Path(sys.argv[1]).write_text(str(compiler.pid)); time.sleep(600)"
    )
    pid = tmp_path / "pid"
    found = run(
        "hung = subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]], start_new_session=True)\n"
        "while not marker.exists() or not marker.read_text():\n    time.sleep(0.01)\n"
        "child.end(hung, grace=0.2)\nchild.end(hung)\nprint(hung.returncode)\n",
        str(pid),
        stubborn,
    )
    assert int(found) == -signal.SIGKILL
    assert until(lambda: not is_running(int(pid.read_text())))


def is_running(pid: int) -> bool:
    """A zombie process does not hold the lock."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_tidies_up_where_its_parent_ignores_the_signal_or_dies(tmp_path: Path) -> None:
    found = run(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nchild.begin()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('tidy')\n",
        "",
    )
    assert found == "tidy\n"
    run(
        "reading, writing = os.pipe()\n"
        "if os.fork():\n    os.read(reading, 1)\n    os._exit(0)\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\nos.dup2(1, 2)\nchild.begin()\n"
        "try:\n    os.write(writing, b'.')\n    time.sleep(600)\nfinally:\n    marker.touch()\n",
        str(tmp_path / "tidy"),
    )
    assert until((tmp_path / "tidy").exists)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed release, which this user may not write, with two compiled modules of the package."""
    made = tmp_path / "site" / "jit"
    made.mkdir(parents=True)
    for name in ("module_norm.so", "module_moe.so"):
        (made / name).write_text(name)
    monkeypatch.setattr(folder, "_own", lambda: made)
    monkeypatch.setattr(folder.os, "access", lambda *_: False)
    monkeypatch.setattr(library, "release", lambda: "0.1.19")
    monkeypatch.setattr(torch, "__version__", "2.10.0+rocm7.2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AITER_JIT_DIR", "")
    monkeypatch.delenv("AITER_JIT_DIR")
    return made


def test_a_folder_that_may_not_be_written_is_left_for_one_of_its_release(own: Path, tmp_path: Path) -> None:
    tag = sys.implementation.cache_tag
    expected = tmp_path / "cache" / "kaon" / "aiter" / f"0.1.19-torch2.10.0+rocm7.2-{tag}"
    expected.mkdir(parents=True)
    (expected / "module_norm.so").symlink_to(tmp_path / "gone")
    (expected / "module_moe.so").write_text("compiled for this GPU")
    folder.prepare()
    assert os.environ["AITER_JIT_DIR"] == str(expected)
    assert (expected / "module_norm.so").read_text() == "module_norm.so"
    assert (expected / "module_moe.so").read_text() == "compiled for this GPU"
    assert len(list(expected.iterdir())) == 2


def test_what_the_environment_says_of_the_folder_stays(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AITER_JIT_DIR", "/elsewhere")
        folder.prepare()
        assert os.environ["AITER_JIT_DIR"] == "/elsewhere"
    # No folder is named either if the library's own is sufficient, or if the release is unknown.
    monkeypatch.setattr(library, "release", lambda: None)
    folder.prepare()
    monkeypatch.setattr(library, "release", lambda: "0.1.19")
    monkeypatch.setattr(folder.os, "access", lambda *_: True)
    folder.prepare()
    assert "AITER_JIT_DIR" not in os.environ
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_reported(own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("no folder")
    folder.prepare()
    assert "aiter may have no folder to compile into: [Errno 20] Not a directory" in caplog.text
    assert "AITER_JIT_DIR" not in os.environ


@pytest.mark.usefixtures("copied")
def test_the_folder_is_named_before_the_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(folder, "prepare", lambda: events.append("folder"))
    monkeypatch.setattr(probe, "_probe_in_children", lambda *_: events.append("probe") or {})
    probe.probe("cpu", ["norm"])
    assert events == ["folder", "probe"]
