"""Starts servers and engine cores from a process that has imported their modules.

Importing them takes two thirds of the processor time of a start: three seconds on a slow processor.

    test process ──starts──> template ──clones──> server, or engine core of the test process
                                                  │   a child of the test process, as if that had started it
                                                  └──forks──> the server's first engine core, which waits for its start

A process starts as it does for users if `_is_warm` does not know its command, if `COLD_START` is in its environment,
or where clones are not supported. So do the further engine cores of a server, and the ranks of an engine core, unless
`WARM_CHILDREN` is in the environment: then the server or engine core has a template of its own as a further child.

`make test-long` puts `COLD_START` into the environment of the tests, so that all processes start as for users.
"""

import array
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLD_START = {"TEST_COLD_START": "1"}
"""Environment of a process that imports everything itself."""
WARM_CHILDREN = {"TEST_WARM_CHILDREN": "1"}
"""Environment of a server all of whose engine cores and ranks start warm; it has one child more."""

_SERVER = ("server.process", "server.http", "huggingface_hub", "uvicorn.protocols.http.httptools_impl", "uvloop")
"""Modules of servers, which import most others that they need; engine cores need some of them."""
_ENGINE_CORE = ("engine.core.engine_core", "engine.core.startup", "engine.runner.model_runner", "engine.core.sockets")
"""Modules of engine cores and ranks, which import torch."""
_RANK = "engine.runner.rank_process"
_COMPUTING = ("engine.core.main", _RANK, "faulty_ranks", "faulty_replicas", "stub_core", "scripted_core")
"""Modules that run engine cores or ranks."""
_SERVING = "from server.process import run; "
"""Part of the code that servers run."""
_READ_ONCE = (
    *("GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_"),
    *("PYTHON", "TORCH", "TRANSFORMERS_", "TRITON_"),
)
"""Beginnings of the names of variables that libraries read when they are loaded."""

_ROOT = str(Path(__file__).parents[2])
_FIRST_HIGH = 600
"""Descriptors from this number on do not collide with those that a process is given."""
_SYS_CLONE, _CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 56, 0x8000, 0x200000, 0x1000000
_OFFSET_OF_TID = 0x2D0
"""Offset of the thread's id in glibc's record of a thread, on x86-64."""
_LONGEST_COMMAND = 16384
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Signals that Kaon's processes handle or ignore."""


def _is_warm(command: Any, arguments: Mapping[str, Any]) -> bool:
    if not isinstance(command, list) or len(command) < 4 or command[:2] != [sys.executable, "-P"]:
        return False
    is_known = _serves(command) or (command[2] == "-m" and command[3] in _COMPUTING)
    is_plain = not any(arguments[name] for name in ("shell", "preexec_fn", "start_new_session", "executable"))
    return is_known and is_plain


_OF_TEMPLATE = {"OMP_NUM_THREADS": "1"}


def _serves(command: list[str]) -> bool:
    return command[2] == "-c" and _SERVING in command[3]


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_ONCE) and name != "PYTHONPATH"}


def _hook(start: Callable[[dict[str, Any], list[int]], int | None]) -> None:
    """Let `Popen` start warm processes by `start`, which returns their pid, or None if it cannot."""
    read_once = _read_once({**os.environ, **_OF_TEMPLATE})
    original = subprocess.Popen._execute_child
    signature = inspect.signature(original)

    def execute_child(self: "subprocess.Popen[Any]", *positional: Any) -> None:
        arguments = signature.bind(self, *positional).arguments
        command, environment = arguments["args"], arguments["env"]
        environment = dict(os.environ if environment is None else environment)
        is_cold = bool(COLD_START.keys() & environment) or _read_once(environment) != read_once
        if is_cold or not _is_warm(command, arguments):
            original(self, *positional)
            return
        descriptors = {each: each for each in (0, 1, 2, *arguments["pass_fds"])}
        pipes = [arguments[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        given = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
        descriptors |= {target: pipe for target, pipe in given.items() if pipe >= 0}
        request = {
            "command": command,
            "environment": environment,
            "directory": os.fspath(arguments["cwd"] or os.getcwd()),
            "group": arguments["process_group"],
            "targets": list(descriptors),
            "ignored": [each for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN],
            "mask": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "cpus": list(os.sched_getaffinity(0)),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        pid = start(request, list(descriptors.values()))
        if pid is None:
            original(self, *positional)
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute_child


def _ask(template: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> None:
    rights = array.array("i", descriptors)
    template.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@contextmanager
def servers_and_cores_start_warm() -> Iterator[None]:
    """Start the template of this process, and let `Popen` use it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    begin = f"import sys; base = list(sys.path); sys.path.insert(0, {_ROOT!r}); "
    begin += f"from {__name__} import main; exec(main(base, {theirs.fileno()}))"
    with theirs:
        template = subprocess.Popen(
            [sys.executable, "-P", "-c", begin, " " * _LONGEST_COMMAND],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_OF_TEMPLATE},
        )
    original = subprocess.Popen._execute_child
    with ours:
        try:
            _start_all_by(ours)
            yield
        finally:
            subprocess.Popen._execute_child = original
    template.wait()


def main(base: list[str], descriptor: int) -> str:
    """Serve as a template. Returns only in the processes that it starts, with the code that the process runs."""
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [each for each in base if each not in python_path]
    for name in _SERVER:
        importlib.import_module(name)
    with importlib.import_module("models.torch_import").importing_torch():
        for name in _ENGINE_CORE:
            importlib.import_module(name)
    gc.freeze()
    request, received = _serve(socket.socket(fileno=descriptor))
    while True:
        _arrange(request, received, base)
        command = request["command"]
        starts_many = WARM_CHILDREN.items() <= request["environment"].items() and command[3] != _RANK
        if not (starts_many or _serves(command)):
            break
        # Forked before there are threads.
        ours, theirs = (_high(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if (pid := os.fork()) != 0:
            theirs.close()
            if starts_many:
                _start_all_by(ours)
            else:
                _start_once_by(ours, pid)
            break
        ours.close()
        _stand_by()
        request, received = _serve(theirs) if starts_many else _receive(theirs)
    if _serves(command):
        hidden.update({each: sys.modules.pop(each) for each in [*sys.modules] if each.partition(".")[0] in _COMPUTES})
    for each in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[each]
    return command[3] if command[2] == "-c" else f"import runpy; runpy._run_module_as_main({command[3]!r})"


_COMPUTES = ("torch", "transformers", "triton")
hidden: dict[str, Any] = {}
"""Modules of these packages, which a server has in memory but not among its modules."""


def _serve(template: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Clone this process for each request. Returns in the clones."""
    python = ctypes.pythonapi
    libc = ctypes.PyDLL(None)
    libc.pthread_self.restype = ctypes.c_ulong
    libc.syscall.argtypes = [ctypes.c_long] * 6
    tid = libc.pthread_self() + _OFFSET_OF_TID
    is_known = os.uname().machine == "x86_64" and ctypes.c_int.from_address(tid).value == os.getpid()
    template.send(b"ready" if is_known and len(os.listdir("/proc/self/task")) == 1 else b"no")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    while True:
        request, received = _receive(template)
        python.PyOS_BeforeFork()
        if (pid := libc.syscall(_SYS_CLONE, flags, 0, 0, tid, 0)) == 0:
            python.PyOS_AfterFork_Child()
            template.close()
            return request, received
        python.PyOS_AfterFork_Parent()
        for each in received:
            os.close(each)
        template.send(str(max(pid, 0)).encode())


def _receive(template: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next request, and the descriptors that came with it. Ends this process if there will be none."""
    content, received, _, _ = socket.recv_fds(template, 1 << 20, 250)
    if not content:
        os._exit(0)
    return json.loads(content), received


def _stand_by() -> None:
    """Let this process live as long as its parent, and keep none of its descriptors."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.closerange(3, _FIRST_HIGH)


def _start_all_by(template: socket.socket) -> None:
    """Let `Popen` start all warm processes by a template."""
    lock = threading.Lock()

    def start(request: dict[str, Any], descriptors: list[int]) -> int | None:
        with lock:
            try:
                _ask(template, request, descriptors)
                return int(template.recv(32) or 0) or None
            except OSError:
                return None  # The template has died.

    if template.recv(32) == b"ready":
        _hook(start)


def _start_once_by(template: socket.socket, pid: int) -> None:
    """Let the process `pid` become the first warm process that `Popen` starts here."""
    waiting = [template]

    def start(request: dict[str, Any], descriptors: list[int]) -> int | None:
        if not waiting:
            return None
        with waiting.pop() as it:
            _ask(it, request, descriptors)
        return pid

    _hook(start)


def _high(each: socket.socket) -> socket.socket:
    with each:
        return socket.socket(fileno=fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH))


def _arrange(request: Mapping[str, Any], received: list[int], base: list[str]) -> None:
    """Make this process what `Popen` would have made of it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        default = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, signal.SIG_IGN if each in request["ignored"] else default)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH) for each in received]
    os.closerange(3, _FIRST_HIGH)
    for each, target in zip(high, request["targets"], strict=True):
        os.dup2(each, target)
        os.close(each)
    if request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    os.sched_setaffinity(0, request["cpus"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    command = request["command"]
    sys.orig_argv[:] = command
    sys.argv[:] = [command[2], *command[4:]]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base]
    # /proc shows the command from the memory of the template's, so that it must have the same length.
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"".join(os.fsencode(each) + b"\0" for each in command)
    ctypes.memmove(first, shown.rjust(end - first, b"/")[: end - first], end - first)
