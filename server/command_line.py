"""`hide`: takes secrets out of what `ps` shows of this process. Called by `server.serve`."""

from collections.abc import Iterable
from pathlib import Path

_ARG_START, _ARG_END = 47, 48
"""Places in /proc/self/stat, counted from 0, of the addresses between which the kernel keeps the command line."""


def hide(secrets: Iterable[str]) -> None:
    """Write asterisks over `secrets` in the command line. Raises `OSError` where the kernel does not let us."""
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        # The second field is the process' name in parentheses, which may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[place - 2]) for place in (_ARG_START, _ARG_END))
        memory.seek(start)
        arguments = hidden = memory.read(end - start)
        for secret in secrets:
            hidden = hidden.replace(secret.encode(), b"*" * len(secret.encode()))
        if hidden != arguments:
            memory.seek(start)
            memory.write(hidden)
