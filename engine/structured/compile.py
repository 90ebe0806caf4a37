"""`GrammarCompiler`: from what a request wants to a grammar that the engine core will take. Used by the front end.

Imports neither torch nor llguidance: the library runs in a process of its own.
"""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from engine.structured.check_process import CheckProcess
from engine.structured.spec import GrammarSpec, InvalidGrammar, lark_of

_CACHED_BYTES = 16 * 2**20
"""Text and reasons kept of grammars seen before."""

_ENTRY_BYTES = 200
"""An entry's own weight in the cache."""


class GrammarCompiler:
    """Checks grammars and remembers the verdicts, the bad ones too. All methods may be called from any thread."""

    def __init__(
        self, *, max_bytes: int = 256 * 2**10, vocab_size: int = 0, special_tokens: Mapping[int, str] | None = None
    ) -> None:
        """Grammars over `max_bytes` are refused. `special_tokens` are those that a grammar may name, by id."""
        self._max_bytes = max_bytes
        self._process = CheckProcess(vocab_size, special_tokens or {})
        self._checks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        """Of its own: whoever waits for a costly check holds up nobody who needs a thread for something else."""
        self._verdicts: OrderedDict[bytes, str | InvalidGrammar] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    async def compile_async(self, spec: GrammarSpec) -> str:
        """`compile`, with the event loop free meanwhile."""
        text = await asyncio.to_thread(lark_of, spec)
        return await self._checked_async(text, ebnf=spec.kind == "grammar")

    async def check_async(self, lark: str) -> str:
        """The same for Lark, or several in a JSON object, that the server wrote around a request's schemas."""
        return await self._checked_async(lark, ebnf=False)

    def compile(self, spec: GrammarSpec) -> str:
        """The Lark text for `SamplingParams.grammar`. Blocks. Raises `InvalidGrammar`, and `CheckUnavailable`."""
        return self._checked(lark_of(spec), ebnf=spec.kind == "grammar")

    def close(self) -> None:
        """End the checking process, if there is one, and what waits for it. Nothing can be compiled after it."""
        self._process.close()
        self._checks.shutdown(wait=False)

    async def _checked_async(self, text: str, *, ebnf: bool) -> str:
        key = self._key(text, ebnf)
        verdict = self._known(key)
        if verdict is None:
            verdict = await asyncio.get_running_loop().run_in_executor(self._checks, self._verdict, key, text, ebnf)
        return _lark_or_raise(verdict)

    def _checked(self, text: str, *, ebnf: bool) -> str:
        return _lark_or_raise(self._verdict(self._key(text, ebnf), text, ebnf))

    def _key(self, text: str, ebnf: bool) -> bytes:
        """Under which the verdict is kept. Raises `InvalidGrammar` for a text that cannot be checked at all."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidGrammar("it holds half a surrogate pair, which is no character") from error
        if len(content) > self._max_bytes:
            raise InvalidGrammar(
                f"it has {len(content)} bytes; it may have at most {self._max_bytes} (max_grammar_bytes)"
            )
        return hashlib.blake2b(b"%d" % ebnf + content, digest_size=16).digest()

    def _known(self, key: bytes) -> str | InvalidGrammar | None:
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
            return verdict

    def _verdict(self, key: bytes, text: str, ebnf: bool) -> str | InvalidGrammar:
        """Known by now, where many wait with the same grammar; else found out, and remembered."""
        verdict = self._known(key)
        if verdict is None:
            try:
                verdict = self._process.check(text, ebnf=ebnf)
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
        # A new one: those that are raised keep what they passed through.
        raise InvalidGrammar(str(verdict))
    return verdict


def _weight(verdict: str | InvalidGrammar) -> int:
    return _ENTRY_BYTES + 2 * len(str(verdict))
