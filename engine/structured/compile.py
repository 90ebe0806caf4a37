"""`GrammarCompiler`: from what a request wants to a grammar that the engine core will take. Used by the front end.

Imports neither torch nor llguidance: the library runs in a process of its own.
"""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping

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
        self._verdicts: OrderedDict[bytes, str | InvalidGrammar] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    async def compile_async(self, spec: GrammarSpec) -> str:
        """`compile`, with the event loop free meanwhile."""
        return await asyncio.to_thread(self.compile, spec)

    def compile(self, spec: GrammarSpec) -> str:
        """The Lark text for `SamplingParams.grammar`. Blocks. Raises `InvalidGrammar`."""
        return self._checked(lark_of(spec), ebnf=spec.kind == "grammar")

    def check(self, lark: str) -> str:
        """As `compile`, for Lark (or several in a JSON object) that the server wrote around a request's schemas."""
        return self._checked(lark, ebnf=False)

    def close(self) -> None:
        """End the checking process, if there is one."""
        self._process.close()

    def _checked(self, text: str, *, ebnf: bool) -> str:
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidGrammar("it holds half a surrogate pair, which is no character") from error
        if len(content) > self._max_bytes:
            raise InvalidGrammar(
                f"it has {len(content)} bytes; it may have at most {self._max_bytes} (max_grammar_bytes)"
            )
        key = hashlib.blake2b(b"%d" % ebnf + content, digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
        if verdict is None:
            verdict = self._verdict(text, ebnf)
            self._remember(key, verdict)
        if isinstance(verdict, InvalidGrammar):
            raise InvalidGrammar(str(verdict))
        return verdict

    def _verdict(self, text: str, ebnf: bool) -> str | InvalidGrammar:
        try:
            return self._process.check(text, ebnf=ebnf)
        except InvalidGrammar as error:
            return error

    def _remember(self, key: bytes, verdict: str | InvalidGrammar) -> None:
        with self._lock:
            if key in self._verdicts:
                return
            self._verdicts[key] = verdict
            self._weight += _weight(verdict)
            while self._weight > _CACHED_BYTES:
                _, oldest = self._verdicts.popitem(last=False)
                self._weight -= _weight(oldest)


def _weight(verdict: str | InvalidGrammar) -> int:
    return _ENTRY_BYTES + 2 * len(str(verdict))
