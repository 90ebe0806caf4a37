"""`GrammarCompiler`: converts a request's schema, regex or grammar to checked Lark, in the front end.

Imports neither torch nor llguidance: the library runs in a child process.
"""

import asyncio
import hashlib
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from queue import LifoQueue
from typing import Any, TypeAlias

import msgspec

from engine.text.process_watch import ProcessWatch
from engine.text.sandbox import sandbox_environment
from engine.text.structured.spec import HALF_SURROGATE, CheckUnavailable, GrammarSpec, InvalidGrammar, lark_of

# The front end's side of the process that checks grammars.

_WALL_SECONDS = 60.0
"""Wall-clock limit of a check in seconds, for machines that are too busy to give the process its CPU time. A limit of
CPU time ends costly checks; at their low priority that takes 8 s next to two busy threads, and 30 s next to eight."""

_RETRY_SECONDS = 30
"""Time after which a check that exceeded the limit may be tried again: it takes a process from other grammars."""

_TOO_DEEP = "it has too many parts, or is nested too deeply; use a simpler one"
_TOO_COSTLY = "it is too costly to follow: checking it takes too long, or too much memory; use a simpler one"
_VERDICTS = {
    -signal.SIGSEGV: _TOO_DEEP,
    -signal.SIGBUS: _TOO_DEEP,
    -signal.SIGPROF: _TOO_COSTLY,
    -signal.SIGABRT: _TOO_COSTLY,
    0: _TOO_COSTLY,
}
"""Errors by exit code, if a grammar ended the process because it exceeded stack, CPU time or memory."""

_ATTEMPTS = 2
"""Number of attempts for a grammar, because the process may end for another reason."""

_ABANDONED_SECONDS = 1.0
"""Time until a check ends once its request was cancelled, about what the next process takes to start: if it were less,
a client that sends cheap grammars and disconnects would cost the others more than its checks do."""


class CheckProcess:
    """The checking process. It starts at the first check, and again after a grammar has ended it.

    Calls may come from any thread; one grammar is checked at a time.
    """

    def __init__(self, vocab_size: int, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens` are those that a grammar may name, by id."""
        self._vocabulary = _frame({"size": vocab_size, "special": dict(special_tokens)})
        self._process: subprocess.Popen[bytes] | None = None
        self._has_started = False
        """Whether the process has announced that it takes checks."""
        self._closed = False
        self._lock = threading.Lock()

    def check(self, text: str, *, ebnf: bool, watch: ProcessWatch | None = None) -> str:
        """Check a grammar and return the Lark text to use. Blocks. Raises `InvalidGrammar` and `CheckUnavailable`."""
        frame = _frame({"text": text, "ebnf": ebnf})
        watch = watch or ProcessWatch()
        with self._lock:
            for _ in range(_ATTEMPTS):
                if watch.is_abandoned:
                    break
                process = self._running()
                began = time.monotonic()
                reason = None
                if self._starts(process):
                    if watch.is_abandoned:
                        break
                    with watch.limiting(process.kill, _WALL_SECONDS):
                        answer = _exchange(process, frame)
                    if answer is not None:
                        return _lark(answer)
                    reason = _VERDICTS.get(process.returncode)
                self._end()
                if reason is not None and not self._closed:
                    raise InvalidGrammar(reason)
                if watch.is_abandoned and not self._closed:
                    self._running()  # It starts before another client's check needs it.
                    break
                if time.monotonic() - began >= _WALL_SECONDS:
                    raise CheckUnavailable(
                        f"this machine is too busy: the grammar was not checked within {_WALL_SECONDS:g} s; send the "
                        "request again later",
                        _RETRY_SECONDS,
                    )
        if watch.is_abandoned:
            raise CheckUnavailable("the request was cancelled before its grammar was checked")
        raise CheckUnavailable(f"the process that checks grammars ended with exit code {process.returncode}")

    def close(self) -> None:
        """End the process, and the checks that wait for it. Further checks raise `CheckUnavailable`."""
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
                [sys.executable, "-P", "-m", "engine.text.structured.checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=sandbox_environment(),
                cwd="/",
                process_group=0,
            )
            self._has_started = False
            _write(self._process, self._vocabulary)
        return self._process

    def _starts(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the process takes checks. Returns False if it ended.

        It is not ended for an abandoned check meanwhile: clients that send cheap grammars and disconnect could keep it
        from ever starting.
        """
        if not self._has_started:
            assert process.stdout is not None
            with ProcessWatch().limiting(process.kill, _WALL_SECONDS):
                self._has_started = len(process.stdout.read(4)) == 4
                if not self._has_started:
                    process.wait()
        return self._has_started

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
                continue  # The process that would read the rest is gone.


def _exchange(process: subprocess.Popen[bytes], frame: bytes) -> bytes | None:
    """Send a message and return the answer; None if the process ended."""
    assert process.stdout is not None
    _write(process, frame)
    head = process.stdout.read(4)
    content = process.stdout.read(struct.unpack("!I", head)[0]) if len(head) == 4 else b""
    if not content:
        process.wait()
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
        return  # The process has ended; the caller detects that when it reads the answer.


def _frame(message: dict[str, object]) -> bytes:
    content = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(content)) + content


_CACHED_BYTES = 16 * 2**20
"""Most bytes of cached verdicts."""

_ENTRY_BYTES = 200
"""Bytes of a cache entry in addition to its text."""


class GrammarCompiler:
    """Checks grammars and caches the results, including errors. Thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int = 256 * 2**10,
        vocab_size: int = 0,
        special_tokens: Mapping[int, str] | None = None,
        num_processes: int = 1,
    ) -> None:
        """Grammars over `max_bytes` are refused. `special_tokens` are those that a grammar may name, by id.

        Each of `num_processes` checks one grammar at a time; the second process starts once two grammars wait.
        """
        self.max_bytes = max_bytes
        self._processes = [CheckProcess(vocab_size, special_tokens or {}) for _ in range(num_processes)]
        self._free: LifoQueue[CheckProcess] = LifoQueue()
        for process in reversed(self._processes):
            self._free.put(process)
        self._verdicts: OrderedDict[bytes, str | InvalidGrammar] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> str:
        """Return the Lark text for `SamplingParams.grammar`. Blocks. Raises `InvalidGrammar` and
        `CheckUnavailable`."""
        return self.check(self.lark_of(spec), ebnf=spec.kind == "grammar")

    def lark_of(self, spec: GrammarSpec) -> str:
        """As `engine.text.structured.spec.lark_of`, and refuse a text that is too long before it is parsed."""
        if isinstance(spec.value, str):
            self._check_size(len(spec.value))
        return lark_of(spec)

    def check(self, text: str, *, ebnf: bool = False, watch: ProcessWatch | None = None) -> str:
        """As `compile`, for Lark that the server wrote around a request's schemas, or several in a JSON object.

        With `ebnf`, `text` is a user's, and may be GBNF. `watch` ends the check if the caller abandons it.
        """
        key = self._key(text, ebnf)
        verdict = self._known(key)
        if verdict is None:
            process = self._free.get()
            try:
                verdict = self._verdict(process, key, text, ebnf, watch)
            finally:
                self._free.put(process)
        return _lark_or_raise(verdict)

    def known(self, text: str, *, ebnf: bool = False) -> str | None:
        """Return or raise the cached result of `check`; None if it is not cached."""
        verdict = self._known(self._key(text, ebnf))
        return None if verdict is None else _lark_or_raise(verdict)

    def close(self) -> None:
        """End the processes and pending checks. Nothing can be compiled afterwards."""
        for process in self._processes:
            process.close()

    def _key(self, text: str, ebnf: bool) -> bytes:
        """Return the key of a result in the cache. Raises `InvalidGrammar` for a text that cannot be checked."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidGrammar(HALF_SURROGATE) from error
        self._check_size(len(content))
        return hashlib.blake2b(b"%d" % ebnf + content, digest_size=16).digest()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise InvalidGrammar(f"it has {num_bytes} bytes; it may have at most {self.max_bytes} (max_grammar_bytes)")

    def _known(self, key: bytes) -> str | InvalidGrammar | None:
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
            return verdict

    def _verdict(
        self, process: CheckProcess, key: bytes, text: str, ebnf: bool, watch: ProcessWatch | None
    ) -> str | InvalidGrammar:
        """Return the result from the cache, where another request may have just added it, or else from a new check."""
        verdict = self._known(key)
        if verdict is None:
            try:
                verdict = process.check(text, ebnf=ebnf, watch=watch)
            except InvalidGrammar as error:
                verdict = error
            self._remember(key, verdict)
        return verdict

    def _remember(self, key: bytes, verdict: str | InvalidGrammar) -> None:
        with self._lock:
            if key in self._verdicts:
                return
            self._verdicts[key] = verdict
            self._weight += _weight(verdict)
            while self._weight > _CACHED_BYTES:
                _, oldest = self._verdicts.popitem(last=False)
                self._weight -= _weight(oldest)


def _lark_or_raise(verdict: str | InvalidGrammar) -> str:
    if isinstance(verdict, InvalidGrammar):
        # A new exception, because a raised one keeps its traceback.
        raise InvalidGrammar(str(verdict))
    return verdict


def _weight(verdict: str | InvalidGrammar) -> int:
    return _ENTRY_BYTES + 2 * len(str(verdict))


Run: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs blocking work in another thread and awaits it, as `asyncio.to_thread` does."""


class GrammarChecks:
    """The compiler as used for one request: checks are awaited without blocking the event loop."""

    def __init__(
        self, compiler: GrammarCompiler, write: Run = asyncio.to_thread, check: Run = asyncio.to_thread
    ) -> None:
        """`write` runs the creation of grammars' texts, `check` runs the longer checks."""
        self._compiler = compiler
        self._check = check
        self.write = write

    @property
    def max_bytes(self) -> int:
        """Longest grammar in bytes."""
        return self._compiler.max_bytes

    async def compile(self, spec: GrammarSpec) -> str:
        """See `GrammarCompiler.compile`."""
        text: str = await self.write(lambda: self._compiler.lark_of(spec))
        return await self.check(text, ebnf=spec.kind == "grammar")

    async def check(self, text: str, *, ebnf: bool = False) -> str:
        """See `GrammarCompiler.check`. If the caller is cancelled, the check soon ends too: other clients may need its
        process."""
        lark: str | None = self._compiler.known(text, ebnf=ebnf)
        if lark is None:
            watch = ProcessWatch()
            try:
                lark = await self._check(lambda: self._compiler.check(text, ebnf=ebnf, watch=watch))
            except asyncio.CancelledError:
                watch.is_abandoned = True
                asyncio.get_running_loop().call_later(_ABANDONED_SECONDS, watch.end)
                raise
        return lark
