"""`CheckProcess`: the process that checks grammars, as the front end sees it. Owned by `GrammarCompiler`."""

import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping

import msgspec

from engine.structured.spec import CheckUnavailable, InvalidGrammar
from models.child_environment import own_code_without_settings

_WALL_SECONDS = 10.0
"""For an answer, where the machine is too busy to give the process its CPU time."""

_TOO_DEEP = "it has too many parts, or is nested too deeply; use a simpler one"
_TOO_COSTLY = "it is too costly to follow: checking it takes too long, or too much memory; use a simpler one"
_VERDICTS = {
    -signal.SIGSEGV: _TOO_DEEP,
    -signal.SIGBUS: _TOO_DEEP,
    -signal.SIGPROF: _TOO_COSTLY,
    -signal.SIGABRT: _TOO_COSTLY,
    0: _TOO_COSTLY,
}
"""What ended a process over a grammar, by exit code: its stack, its CPU time, and twice its memory."""

_ATTEMPTS = 2
"""A process that ended by something else is no fault of the grammar."""


class CheckProcess:
    """Starts with the first check, stays for the next ones, and is started again after a grammar that ended it.

    Calls may come from any thread; one grammar is checked at a time.
    """

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens` are those that a grammar may name, by id."""
        self._vocabulary = _frame({"size": vocab_size, "special": dict(special_tokens)})
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def check(self, text: str, *, ebnf: bool) -> str:
        """The Lark text to use for a grammar. Blocks. Raises `InvalidGrammar`, and `CheckUnavailable`."""
        frame = _frame({"text": text, "ebnf": ebnf})
        with self._lock:
            for _ in range(_ATTEMPTS):
                process = self._running()
                answer = _exchange(process, frame)
                if answer is not None:
                    return _lark(answer)
                self._end()
                reason = _VERDICTS.get(process.returncode)
                if reason is not None and not self._closed:
                    raise InvalidGrammar(reason)
        raise CheckUnavailable(f"the process that checks grammars ended with exit code {process.returncode}")

    def close(self) -> None:
        """End the process, and what waits for it. There are no more checks after it."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise CheckUnavailable("the server is shutting down; send the request again later")
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.structured.checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=own_code_without_settings(),
                cwd="/",
                process_group=0,
            )
            _write(self._process, self._vocabulary)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what it still held was for a process that is gone


def _exchange(process: subprocess.Popen[bytes], frame: bytes) -> bytes | None:
    """The answer to a message; None if the process ended over it, or had to be ended."""
    assert process.stdout is not None
    watch = threading.Timer(_WALL_SECONDS, process.kill)
    watch.start()
    try:
        _write(process, frame)
        head = process.stdout.read(4)
        content = process.stdout.read(struct.unpack("!I", head)[0]) if len(head) == 4 else b""
        if not content:
            process.wait()
    finally:
        watch.cancel()
    return content or None


def _lark(answer: bytes) -> str:
    verdict = msgspec.msgpack.decode(answer)
    if verdict["error"] is not None:
        raise InvalidGrammar(verdict["error"])
    lark: str = verdict["lark"]
    return lark


def _write(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(frame)
        process.stdin.flush()
    except BrokenPipeError:
        return  # it ended: the answer, which is awaited next, says so


def _frame(message: dict[str, object]) -> bytes:
    content = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(content)) + content
