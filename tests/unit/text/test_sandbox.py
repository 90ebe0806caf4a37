"""A child that processes untrusted input can compute and answer; the kernel refuses all other system calls."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.text import sandbox, template_sandbox
from engine.text.sandbox import gaps, sandbox_environment
from engine.text.structured import compiler
from engine.text.structured.compiler import CheckProcess
from engine.text.structured.parser_setup import CHECK_CPU_SECONDS, CHECK_MEMORY_BYTES
from engine.text.structured.spec import CheckUnavailable, InvalidGrammar
from engine.text.template_sandbox import CPU_SECONDS, MEMORY_BYTES, render_untrusted

NUMBERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
needs_kernel = pytest.mark.skipif(bool(gaps()), reason="; ".join(gaps()))

ATTEMPTS = """
import ctypes, errno, json, os, resource, socket, sys, threading
from engine.text import sandbox
MEMORY = 256 * 2**20
secret, parent = sys.argv[1], os.getppid()
held = os.open(secret, os.O_RDONLY)
found = {}

def attempt(name, call):
    try:
        call()
        found[name] = None
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
    except (MemoryError, RuntimeError) as error:
        found[name] = type(error).__name__

def fork():
    # Waiting for it is another system call, which is refused too.
    if os.fork() == 0:
        os._exit(0)

def thread():
    threads = [threading.Thread(target=len, args=("",))]
    threads[0].start()
    threads[0].join()

def attempts():
    attempt("read a file", lambda: open(secret).close())
    attempt("list a directory", lambda: os.listdir("/"))
    attempt("write a file", lambda: os.open(secret + ".new", os.O_CREAT | os.O_WRONLY))
    attempt("read the environment of its parent", lambda: open(f"/proc/{parent}/environ").close())
    attempt("open a socket", lambda: socket.socket())
    attempt("open a local socket", lambda: socket.socket(socket.AF_UNIX))
    attempt("open a pipe", os.pipe)
    attempt("fork", fork)
    attempt("run a program", lambda: os.execv("/bin/true", ["true"]))
    attempt("signal its parent", lambda: os.kill(parent, 0))
    attempt("take more memory", lambda: bytearray(2 * MEMORY))
    attempt("compute", lambda: sum(range(1000)))
    attempt("start a thread", thread)

PREPARE
sandbox.confine(MEMORY)
attempts()
found["environment"] = sorted(os.environ)
found["dumpable"] = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
print(json.dumps(found))
"""


def attempted(tmp_path: Path, prepare: str = "") -> dict[str, Any]:
    secret = tmp_path / "secret"
    secret.write_text("sk-one")
    done = subprocess.run(
        [sys.executable, "-P", "-c", ATTEMPTS.replace("PREPARE", prepare), str(secret)],
        env=sandbox_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_kernel
def test_a_confined_process_computes_and_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    found = attempted(tmp_path)
    assert (found.pop("compute"), found.pop("start a thread")) == (None, None)
    assert found.pop("take more memory") == "MemoryError"
    assert found.pop("dumpable") == -1  # The system call itself is refused.
    allowed = {*sandbox._INHERITED, "PYTHONPATH", "LC_CTYPE"}  # Python sets LC_CTYPE itself if there is no locale.
    assert set(found.pop("environment")) <= allowed
    assert found
    assert set(found.values()) <= {"EPERM", "EACCES", "EMFILE", "ENOSYS"}, found


@needs_kernel
def test_landlock_alone_keeps_it_from_files(tmp_path: Path) -> None:
    prepare = "sandbox._has_seccomp = lambda: False; resource.setrlimit = lambda *limit: None"
    found = attempted(tmp_path, prepare)
    for name in ("read a file", "list a directory", "write a file", "run a program"):
        assert found[name] == "EACCES", name
    assert found["signal its parent"] in {"EPERM", None}  # From the sixth version on.
    assert found["dumpable"] == 0


@needs_kernel
def test_the_filter_alone_keeps_it_from_all_but_computing(tmp_path: Path) -> None:
    prepare = "sandbox._landlock_version = lambda: 0; resource.setrlimit = lambda *limit: None"
    found = attempted(tmp_path, prepare)
    for name in ("read a file", "write a file", "open a socket", "open a pipe", "fork", "run a program"):
        assert found[name] == "EPERM", name
    assert found["start a thread"] is None


def test_cpu_time_ends_even_if_the_process_withdraws_its_timer() -> None:
    code = "import signal; from engine.text.sandbox import confine; confine(2**30, 0.1); signal.setitimer(2, 0)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}while True: pass"], env=sandbox_environment(), check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL


def test_the_system_calls_are_those_of_the_kernel_s_headers() -> None:
    checked = 0
    for machine, header in NUMBERS.items():
        if not Path(header).exists():
            continue
        defined = re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)", Path(header).read_text(), flags=re.MULTILINE)
        numbers = dict(defined)
        _, allowed = sandbox._ARCHITECTURES[machine]
        assert {name: numbers.get(name) for name in allowed} == {name: str(each) for name, each in allowed.items()}
        checked += 1
    if not checked:
        pytest.skip("this machine has no kernel headers (linux-libc-dev)")


def test_what_a_kernel_lacks_is_reported_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_landlock_version", lambda: -1)
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    landlock, seccomp = gaps()
    assert "Linux 5.13 or newer" in landlock
    assert "x86-64 or ARM64" in seccomp


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def assert_is_confined(process: "subprocess.Popen[bytes]", memory: int) -> None:
    assert process.stdin is not None
    found = status(process.pid)
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    of = {kind: resource.prlimit(process.pid, kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
    assert of == {resource.RLIMIT_AS: (memory, memory), resource.RLIMIT_NOFILE: (0, 0)}
    names = {pair.partition("=")[0] for pair in Path(f"/proc/{process.pid}/environ").read_text().split("\0") if pair}
    assert names <= {*sandbox._INHERITED, "PYTHONPATH"}
    assert {int(each) for each in os.listdir(f"/proc/{process.pid}/fd")} == {0, 1, 2}


def seconds_of_a_busy_core(process: "subprocess.Popen[bytes]", cpu_seconds: float) -> float:
    """Return how long work of a child takes next to two threads of this process's priority on the same processor."""
    # A step of niceness changes a thread's weight by a quarter (sched_prio_to_weight in the kernel's sched/core.c).
    niceness = os.getpriority(os.PRIO_PROCESS, process.pid) - os.getpriority(os.PRIO_PROCESS, 0)
    return cpu_seconds * (1 + 2 * 1.25**niceness)


@needs_kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="a process that is not dumpable shows itself to root alone")
def test_the_process_that_checks_grammars_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAON_CLUSTER_KEY", "secret")
    checks = CheckProcess(300, {})
    try:
        assert "start" in checks.check('start: "a"', ebnf=False)
        assert checks._process is not None
        assert_is_confined(checks._process, CHECK_MEMORY_BYTES)
        assert resource.prlimit(checks._process.pid, resource.RLIMIT_NPROC) == (0, 0)
        assert seconds_of_a_busy_core(checks._process, CHECK_CPU_SECONDS) < compiler._WALL_SECONDS
    finally:
        checks.close()


def test_a_check_that_got_no_processor_time_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = CheckProcess(300, {})
    try:
        checks.check('start: "a"', ebnf=False)
        assert checks._process is not None
        checks._process.send_signal(signal.SIGSTOP)
        while not status(checks._process.pid)["State"].startswith("T"):  # Else it may still answer.
            assert checks._process.poll() is None
        monkeypatch.setattr(compiler, "_WALL_SECONDS", 0.1)
        with pytest.raises(CheckUnavailable, match="too busy") as refused:
            checks.check('start: "b"', ebnf=False)
        assert refused.value.retry_seconds == 30
        assert checks._process is None
    finally:
        checks.close()


def test_a_grammar_that_used_up_its_processor_time_is_refused_however_long_that_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = CheckProcess(300, {})
    try:
        checks.check('start: "a"', ebnf=False)
        assert checks._process is not None
        checks._process.send_signal(signal.SIGPROF)
        checks._process.wait()
        monkeypatch.setattr(checks, "_running", lambda process=checks._process: process)
        monkeypatch.setattr(compiler, "_exchange", lambda process, frame: None)
        monkeypatch.setattr(compiler, "_WALL_SECONDS", 0.0)
        with pytest.raises(InvalidGrammar, match="too costly"):
            checks.check('start: "b"', ebnf=False)
    finally:
        checks.close()


@needs_kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="a process that is not dumpable shows itself to root alone")
def test_the_process_that_renders_a_request_s_template_is_confined_before_it_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicate, inspected = subprocess.Popen.communicate, list[int]()

    def inspect(process: "subprocess.Popen[bytes]", job: bytes) -> tuple[bytes, bytes]:
        inspected.append(process.pid)
        while status(process.pid)["Seccomp"] != "2":
            assert process.poll() is None
        assert_is_confined(process, MEMORY_BYTES)
        assert seconds_of_a_busy_core(process, CPU_SECONDS) < template_sandbox._WALL_SECONDS
        return communicate(process, job)

    monkeypatch.setattr(subprocess.Popen, "communicate", inspect)
    assert render_untrusted("a", {}, [], None, True, {}) == "a"
    assert len(inspected) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{{ '\N{EM DASH}\u00e9\n' }}", "—é\n"),
        ("{{ lipsum(1, min=2, max=3) | length > 3 }}", "True"),
        ("{{ {'b': 1} | pprint }}", "{'b': 1}"),
        ("{{ 'a b' | wordwrap(1) }}", "a\nb"),
        ("{{ '%s' | format(2) }}{{ 'ä' | urlencode }}{{ [3, 1] | sort }}", "2%C3%A4[1, 3]"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_what_templates_use_works_without_files(template: str, text: str) -> None:
    assert render_untrusted(template, {}, [], None, True, {}) == text
