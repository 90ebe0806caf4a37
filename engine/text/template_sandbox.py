"""`render_untrusted`: renders a request's chat template in a separate, confined process.

Jinja's sandbox protects the interpreter, but does not prevent endless computation, in a loop or in a single operation,
and a thread could not be stopped then. A template that escapes from Jinja's sandbox is still confined by the kernel
(`engine.text.sandbox`). Called by `InputOutputProcessor`.
"""

import codecs
import importlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.text.chat_template import ChatTemplate
from engine.text.process_watch import ProcessWatch
from engine.text.sandbox import confine, forbid_processes, sandbox_environment
from models.errors import CheckpointError

# The child process renders one untrusted template and ends. It reads an object of `_encoded` from stdin, and writes
# `+` and the text, or `-` and a sentence, to stdout.

CPU_SECONDS = 1.0
MEMORY_BYTES = 512 * 2**20
MAX_CHARACTERS = 16 * 2**20
"""Limits of the child process: length of the text, CPU time for compiling and rendering, and memory."""

_NICENESS = 5
"""Lower priority than steps and streams. Next to two busy threads of normal priority on the same processor, work of
`CPU_SECONDS` takes 7 s, less than `_WALL_SECONDS`."""

TITLE = "the request's chat template"


def main() -> None:
    """Render under limits that the kernel enforces; SIGPROF ends a process that exceeds its CPU time."""
    _load_what_templates_may_need()
    confine(MEMORY_BYTES, 2 * CPU_SECONDS, _NICENESS)
    forbid_processes()
    job = _decoded(sys.stdin.buffer.read())
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        template = ChatTemplate({"default": job["template"]}, job["special_tokens"], TITLE, MAX_CHARACTERS)
        answer = "+" + template.render(job["messages"], job["tools"], job["add_generation_prompt"], **job["variables"])
    except (CheckpointError, ValueError) as error:
        answer = f"-{error}"
    except MemoryError:
        answer = f"-{TITLE} needs more than {MEMORY_BYTES >> 20} MiB of memory"
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass"))


def _encoded(job: Mapping[str, Any]) -> bytes:
    """Encode as msgpack, which keeps the numbers that are not finite and the keys that are no texts."""
    try:
        return msgspec.msgpack.encode(job)
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair, or an integer beyond 64 bits, from a caller of the Python API. Python's encoder holds
        # the interpreter's lock fifteen times as long: 31 ms for 1.7 MB.
        return json.dumps(job).encode()


def _decoded(job: bytes) -> Any:
    return json.loads(job) if job.startswith(b"{") else msgspec.msgpack.decode(job)


def _load_what_templates_may_need() -> None:
    """Import modules and read files that Jinja and Python load on first use: that is forbidden later."""
    for name in ("jinja2.constants", "jinja2.debug", "pprint", "textwrap", "unicodedata"):
        importlib.import_module(name)
    for codec in ("ascii", "latin-1", "unicode-escape", "utf-8", "utf-16", "utf-32"):
        codecs.lookup(codec)
    time.tzset()
    time.localtime()


if __name__ == "__main__":
    main()


_WALL_SECONDS = 10.0
"""Wall-clock limit of the process in seconds, for machines that are too busy to give it its CPU time."""

_AT_A_TIME = threading.BoundedSemaphore(2)
"""At most two templates render at a time, so that other requests are not delayed."""

_LEAST_SECONDS = 0.1
"""Least time from the start of an abandoned process to its thread's next start. A start stops the caller's process for
milliseconds, and clients that disconnect at once would otherwise cause hundreds per second."""


def render_untrusted(
    template: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    watch: ProcessWatch | None = None,
) -> str:
    """Render the text of the prompt. Blocks for about 0.1 s, at most for `_WALL_SECONDS`. Raises `ValueError` with a
    sentence.

    `watch` ends the process if the caller abandons it: at once, since no other request needs this process. The next
    one starts `_LEAST_SECONDS` after it at the earliest.
    """
    job = {
        "template": template,
        "special_tokens": dict(special_tokens),
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "variables": variables,
    }
    watch = watch or ProcessWatch()
    with _AT_A_TIME:
        if watch.is_abandoned:
            raise ValueError(_ABANDONED)
        began = time.monotonic()
        with (
            subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.text.template_sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=sandbox_environment(),
                cwd="/",
            ) as process,
            watch.limiting(process.kill, _WALL_SECONDS),
        ):
            if watch.is_abandoned:  # Since before `limiting`, so that `end` had no effect.
                process.kill()
            output = process.communicate(_encoded(job))[0]
        if watch.is_abandoned:
            time.sleep(max(0.0, began + _LEAST_SECONDS - time.monotonic()))
    if watch.is_abandoned:
        raise ValueError(_ABANDONED)
    # What a process wrote until it was killed may be a part of its answer.
    answer = "" if process.returncode else output.decode("utf-8", "surrogatepass")
    if answer.startswith("+"):
        return answer[1:]
    if not answer and time.monotonic() - began >= _WALL_SECONDS:
        raise ValueError(f"{TITLE} was not rendered within {_WALL_SECONDS:g} s")
    raise ValueError(answer[1:] or f"{TITLE} took more than {CPU_SECONDS:g} s, or more memory than it may use")


_ABANDONED = f"the request was cancelled before {TITLE} was rendered"
