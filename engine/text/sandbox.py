"""Confines child processes that process untrusted input: they may compute, read standard input and write an answer.

The parent starts such a child with `sandbox_environment`. The child imports its modules and then calls `confine`.
After that the kernel refuses it access to files, sockets, new processes and other processes:

- resource limits bound memory, files, core dumps and, with `forbid_processes`, processes;
- `PR_SET_DUMPABLE` hides its memory from other processes of the user, and `no_new_privs` prevents new privileges;
- Landlock (Linux 5.13 or newer) refuses every path, TCP port, foreign signal and abstract socket;
- a seccomp filter allows the system calls of computing, and answers EPERM to all others.

Kernels or containers may lack the last two; `gaps` says so in sentences, which the server logs and `kaon doctor`
prints. The calls are made by ctypes, since no library for them comes with plain pip (docs/decisions/processes.md).
"""

import ctypes
import errno
import math
import os
import platform
import resource
import struct
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])

_INHERITED = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "TZ")
"""Variables that the child's interpreter may need to start and that hold no secrets."""

NICENESS = 10
"""Lower priority than steps and streams, which other clients wait for, on machines with few processors. Next to two
busy threads of normal priority on the same processor, work of 0.4 s still takes no more than 8 s."""


def sandbox_environment() -> dict[str, str]:
    """Return the environment of a child that processes untrusted input: the variables that its interpreter needs, and
    an import path with this checkout alone.
    """
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | {"PYTHONPATH": _ROOT}


def confine(memory_bytes: int, cpu_seconds: float | None = None, niceness: int = NICENESS) -> None:
    """Confine this process, and the threads that it starts later, permanently.

    `cpu_seconds` is the CPU time, rounded up to whole seconds, after which the kernel kills the process; None for a
    process that answers many requests and limits each. `niceness` lowers its priority. Modules that read files must
    be imported before. Raises `OSError` if the kernel refuses a feature that it offers.
    """
    libc = _libc()
    os.nice(niceness)
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if _landlock_version() > 0:
        _forbid_paths()
    for kind, limit in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
    }.items():
        resource.setrlimit(kind, (limit, limit))
    if cpu_seconds is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(used.ru_utime + used.ru_stime + cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    if _has_seccomp():
        _forbid_system_calls()


def forbid_processes() -> None:
    """Forbid new processes and threads. Called when this process has started the threads that it needs.

    The seccomp filter already refuses processes; without a filter, this limit does, for users other than root.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def gaps() -> tuple[str, ...]:
    """Return a sentence about each feature that this kernel or container lacks for `confine`."""
    found = []
    if _landlock_version() <= 0:
        found.append(
            "Landlock is not available to confine the processes that check grammars and render templates of requests; "
            "it needs Linux 5.13 or newer with landlock among its security modules, and a container that allows it"
        )
    if not _has_seccomp():
        found.append(
            "no seccomp filter confines the processes that check grammars and render templates of requests; it needs "
            "Linux with CONFIG_SECCOMP_FILTER on x86-64 or ARM64"
        )
    return tuple(found)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38

# Landlock: a ruleset that handles every right and grants none. Source: linux/landlock.h.

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on every architecture."""
_RULESET_VERSION = 1 << 0
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of file rights, by the version of the interface that introduced them."""
_NETWORK_RIGHTS, _NETWORK_VERSION = 0b11, 4
"""TCP: bind and connect."""
_SCOPES, _SCOPES_VERSION = 0b11, 6
"""Abstract sockets and signals of processes outside."""


def _landlock_version() -> int:
    """Return the version of the interface; 0 or less if there is none."""
    version: int = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _RULESET_VERSION)
    return version


def _forbid_paths() -> None:
    version = _landlock_version()
    files = (1 << max(count for since, count in _FILE_RIGHTS.items() if since <= version)) - 1
    handled = struct.pack("=Q", files)
    if version >= _NETWORK_VERSION:
        handled += struct.pack("=Q", _NETWORK_RIGHTS)
    if version >= _SCOPES_VERSION:
        handled += struct.pack("=Q", _SCOPES)
    libc = _libc()
    ruleset = _checked(libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0), "Landlock")
    _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


# seccomp: a program of classic BPF over each system call's number and first argument. Source: linux/seccomp.h.

_X86_64 = {
    "brk": 12, "clock_getres": 229, "clock_gettime": 228, "clock_nanosleep": 230, "close": 3, "exit": 60,
    "exit_group": 231, "fstat": 5, "futex": 202, "getcpu": 309, "getitimer": 36, "getpid": 39, "getrandom": 318,
    "getrusage": 98, "gettid": 186, "gettimeofday": 96, "lseek": 8, "madvise": 28, "membarrier": 324, "mmap": 9,
    "mprotect": 10, "mremap": 25, "munmap": 11, "nanosleep": 35, "poll": 7, "ppoll": 271, "read": 0, "readv": 19,
    "restart_syscall": 219, "rseq": 334, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "sched_getaffinity": 204, "sched_yield": 24, "set_robust_list": 273, "setitimer": 38, "sigaltstack": 131,
    "time": 201, "times": 100, "write": 1, "writev": 20,
    "clone": 56, "clone3": 435, "prlimit64": 302, "tgkill": 234,
}  # fmt: skip
_AARCH64 = {
    "brk": 214, "clock_getres": 114, "clock_gettime": 113, "clock_nanosleep": 115, "close": 57, "exit": 93,
    "exit_group": 94, "fstat": 80, "futex": 98, "getcpu": 168, "getitimer": 102, "getpid": 172, "getrandom": 278,
    "getrusage": 165, "gettid": 178, "gettimeofday": 169, "lseek": 62, "madvise": 233, "membarrier": 283,
    "mmap": 222, "mprotect": 226, "mremap": 216, "munmap": 215, "nanosleep": 101, "ppoll": 73, "read": 63,
    "readv": 65, "restart_syscall": 128, "rseq": 293, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "sched_getaffinity": 123, "sched_yield": 124, "set_robust_list": 99, "setitimer": 103,
    "sigaltstack": 132, "times": 153, "write": 64, "writev": 66,
    "clone": 220, "clone3": 435, "prlimit64": 261, "tgkill": 131,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""By machine name: its number in linux/audit.h, and the numbers of the allowed system calls."""
_WITH_CONDITIONS = ("clone", "clone3", "prlimit64", "tgkill")

_CLONE_THREAD = 0x10000
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_MODE_FILTER = 2


def _has_seccomp() -> bool:
    """Return whether the kernel supports filters: then the call fails because the program is missing."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    result = _libc().prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return bool(result < 0 and ctypes.get_errno() == errno.EFAULT)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _filter() -> bytes:
    """Create the program: allowed calls, then four calls that depend on their first argument, then EPERM for
    others."""
    architecture, numbers = _ARCHITECTURES[platform.machine()]
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_IF_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]
    for name, number in numbers.items():
        if name not in _WITH_CONDITIONS:
            program += [_instruction(_JUMP_IF_EQUAL, number, 0, 1), allow]
    conditions = {
        # Allow threads, but no processes.
        "clone": _instruction(_JUMP_IF_ANY_BIT, _CLONE_THREAD, 0, 1),
        # Allow the call for this process only.
        "prlimit64": _instruction(_JUMP_IF_EQUAL, 0, 0, 1),
        "tgkill": _instruction(_JUMP_IF_EQUAL, os.getpid(), 0, 1),
    }
    for name, condition in conditions.items():
        first_argument = _instruction(_LOAD, _FIRST_ARGUMENT)
        program += [_instruction(_JUMP_IF_EQUAL, numbers[name], 0, 4), first_argument, condition, allow, refuse]
    # Its flags are in memory, which a filter cannot read. With ENOSYS, the C library uses `clone` instead.
    program += [_instruction(_JUMP_IF_EQUAL, numbers["clone3"], 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    return b"".join([*program, refuse])


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _forbid_system_calls() -> None:
    instructions = _filter()
    program = _Program(len(instructions) // 8, instructions)
    _checked(_libc().prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")
