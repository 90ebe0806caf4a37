"""`Matcher`: the state of one sequence in its grammar. `Matchers` creates them, in the engine core, without torch."""

import ctypes
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.text.structured.spec import InvalidGrammar, reason_in_words, without_forcing

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from engine.text.tokenizer import Tokenizer


_CACHED_MATCHERS = 256
_CACHED_BYTES = 16 * 2**20
"""Limits of the cache of compiled grammars: their number, and the bytes of their texts."""
_CACHED_SECONDS, _REUSED_SECONDS = 8.0, 4.0
"""Further limits of the cache: seconds of mask computation for all grammars, and for one. All matchers of a compiled
grammar share the lexer states that masks have added, up to the parser's limit, which takes 0.9 s and 60 to 80 MB. At
the limit, no matcher of that compilation can continue."""

_MOST_BYTES = 2 * 2**30
"""Bytes that the grammars of running sequences may add before the sequences with the costliest ones are ended."""
_FEW_CPUS = 2
"""Number of CPUs up to which the library's threads would only wait for those that compute the step."""
_CHECKED_STEPS = 16
"""Number of steps with masks between two measurements of the memory, each of which takes 0.15 ms."""
_LEAST_COST, _ENDED_SHARE = 0.25, 0.5
"""A grammar is ended if its masks took at least this number of seconds and this share of the costliest one's time."""
_TOO_COSTLY = (
    "the grammar of this request cannot be followed any further: the grammars that run need too much memory, and this "
    "is one of the costliest; use a simpler one"
)


class Compiled:
    """A compiled grammar. Its matchers are copies that share the lexer and its states."""

    __slots__ = ("native", "seconds")

    def __init__(self, native: "LLMatcher") -> None:
        self.native = native
        self.seconds = 0.0
        """Seconds that masks of its matchers took; infinite after one of them has failed."""


class Matcher:
    """The state of one sequence in its grammar. The scheduler advances it; between steps, masks are computed from
    it."""

    __slots__ = ("_matcher", "eos_token_ids", "error", "grammar", "is_too_costly", "num_words", "uncharged_seconds")

    def __init__(self, matcher: "LLMatcher", eos_token_ids: Sequence[int], num_words: int, grammar: Compiled) -> None:
        self._matcher = matcher
        self.grammar = grammar
        self.is_too_costly = False
        self.eos_token_ids = eos_token_ids
        self.num_words = num_words
        """Length of a mask, in words of 32 tokens."""
        self.error: str | None = None
        """Error because of which the sequence cannot continue; None without an error."""
        self.uncharged_seconds = 0.0
        """Seconds of compiling and of masks for which the scheduler has not charged the sequence's owner yet."""

    @property
    def native(self) -> "LLMatcher":
        """The library's object."""
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False and sets `error` if the grammar does not allow it or fails."""
        try:
            if self._matcher.consume_token(token_id):
                return True
        except BaseException as error:  # noqa: BLE001 - a panic of the native library fails only this request
            self.error = f"the grammar of this request cannot be followed: {error}"
            return False
        self._note_error()
        return False

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of `token_ids` that may follow. The state does not change."""
        try:
            return self._matcher.validate_tokens(list(token_ids))
        except BaseException:  # noqa: BLE001 - a panic of the native library: the mask of the next step reports it
            return 0

    def after(self, token_ids: Sequence[int]) -> "Matcher | None":
        """Return a new matcher in the state after these tokens; None if they may not follow, or end the text."""
        try:
            native = self._matcher.deep_copy()
            if native.try_consume_tokens(list(token_ids)) < len(token_ids) or native.is_stopped():
                return None
        except BaseException:  # noqa: BLE001 - as above
            return None
        return Matcher(native, self.eos_token_ids, self.num_words, self.grammar)

    def settle(self, mask: npt.NDArray[np.int32], ends: Sequence[int], withheld: Sequence[int]) -> bool:
        """Apply end tokens to the mask that `MaskComputer` wrote. Returns False and sets `error` if it has failed.

        If the grammar may end, `ends` are allowed. `withheld` are end tokens that are allowed only if no other token
        may follow.
        """
        if self.is_too_costly:
            self.error = _TOO_COSTLY
            return False
        if self._matcher.is_error():
            self._note_error()
            return False
        if (ends or withheld) and self._matcher.is_accepting():
            for token_id in ends:
                mask[token_id >> 5] |= _BIT[token_id & 31]
            rest = mask.copy()
            for token_id in withheld:
                rest[token_id >> 5] &= ~_BIT[token_id & 31]
            if rest.any():
                mask[:] = rest
        return True

    def note_cost(self, seconds: float) -> None:
        """Count the time of a mask."""
        self.grammar.seconds += seconds
        self.uncharged_seconds += seconds

    def _note_error(self) -> None:
        self.grammar.seconds = math.inf
        self.error = f"the grammar of this request cannot be followed: {reason_in_words(self._matcher.get_error())}"


class MaskComputer:
    """Computes the masks of several matchers, on machines with more than two CPUs in parallel.

    With a large vocabulary, the first mask of a state takes up to a few milliseconds.
    """

    def __init__(self, num_bytes: Callable[[], int] | None = None) -> None:
        """`num_bytes` returns the bytes allocated by native code in this process; by default, as glibc reports
        them."""
        self._executor: LLExecutor | None = None
        self._num_bytes = num_bytes or _native_bytes()
        self._bytes_before: int | None = None
        """Bytes when the first masks were computed, when the model and its cache have been allocated."""
        self._steps = 0

    def __call__(self, matchers: Sequence[tuple[Matcher, int]], masks: npt.NDArray[np.int32]) -> None:
        """Write the tokens that may follow, as bits, into the row of `masks` that is given with each matcher."""
        if self._bytes_before is None:
            self._bytes_before = self._num_bytes()
        if len(matchers) == 1 or len(os.sched_getaffinity(0)) <= _FEW_CPUS:
            # The library would have one thread, for which this one would wait, possibly until a CPU is free.
            for matcher, row in matchers:
                began = time.thread_time()
                matcher.native.unsafe_compute_mask_ptr(masks.ctypes.data + row * masks.strides[0], masks.strides[0])
                matcher.note_cost(time.thread_time() - began)
        else:
            self._compute_in_parallel(matchers, masks)
        self._steps += 1
        if not self._steps % _CHECKED_STEPS and self._num_bytes() - self._bytes_before > _MOST_BYTES:
            most = max(_LEAST_COST, _ENDED_SHARE * max(matcher.grammar.seconds for matcher, _ in matchers))
            for matcher, _ in matchers:
                matcher.is_too_costly = matcher.grammar.seconds >= most

    def _compute_in_parallel(self, matchers: Sequence[tuple[Matcher, int]], masks: npt.NDArray[np.int32]) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        pairs = [(matcher.native, row) for matcher, row in matchers]
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))
        seconds = (time.perf_counter() - began) / len(matchers)
        for matcher, _ in matchers:
            matcher.note_cost(seconds)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 (malloc.h)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _native_bytes() -> Callable[[], int]:
    """A function that returns the bytes allocated by malloc; always 0 where the C library does not report them."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return lambda: 0
    mallinfo.restype = _Mallinfo

    def num_bytes() -> int:
        info = mallinfo()
        return int(info.hblkhd + info.uordblks)

    return num_bytes


_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


class Matchers:
    """Compiles grammars for one model, and caches them. Compiling waits for `load`, which runs in another thread."""

    def __init__(
        self, load_tokenizer: "Callable[[], Tokenizer]", vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`load_tokenizer` is called by `load`, once."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._trie: LLTokenizer | None = None
        self._failure: Exception | None = None
        self._loaded = threading.Event()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the vocabulary. If this fails, `matcher` raises the error."""
        try:
            from engine.text.structured.parser_setup import token_trie

            self._trie = token_trie(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
        except Exception as error:  # noqa: BLE001 - raised again by `matcher`
            self._failure = error
        self._loaded.set()

    def cached(self, grammar: str) -> Matcher | None:
        """Return a new matcher of a cached grammar; None if it is not cached. Takes microseconds."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                return None
            self._compiled.move_to_end(grammar)
            if compiled.seconds > _REUSED_SECONDS:
                self._forget(grammar)
                return None
        return self._copy(compiled)

    def matcher(self, grammar: str) -> Matcher:
        """Return a new matcher in the initial state. Blocks while the grammar is compiled. Raises `InvalidGrammar`."""
        matcher = self.cached(grammar)
        if matcher is not None:
            return matcher
        began = time.thread_time()
        compiled = self._compile(grammar)
        seconds_to_compile = time.thread_time() - began
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._weight += len(grammar)
            seconds = sum(each.seconds for each in self._compiled.values())
            while len(self._compiled) > _CACHED_MATCHERS or self._weight > _CACHED_BYTES or seconds > _CACHED_SECONDS:
                seconds -= self._forget(next(iter(self._compiled))).seconds
        matcher = self._copy(compiled)
        matcher.uncharged_seconds = seconds_to_compile
        return matcher

    def _forget(self, grammar: str) -> Compiled:
        self._weight -= len(grammar)
        return self._compiled.pop(grammar)

    def _copy(self, compiled: Compiled) -> Matcher:
        assert self._trie is not None
        return Matcher(compiled.native.deep_copy(), self._eos_token_ids, -(-self._trie.vocab_size // 32), compiled)

    def _compile(self, grammar: str) -> Compiled:
        from llguidance import LLMatcher

        from engine.text.structured.parser_setup import PARSER_LIMITS

        self._loaded.wait()
        if self._trie is None:
            raise RuntimeError(f"this model's vocabulary cannot be read for grammars: {self._failure}")
        compiled = LLMatcher(self._trie, without_forcing(grammar), log_level=0, limits=PARSER_LIMITS)
        if compiled.is_error():
            raise InvalidGrammar(f"the grammar of this request is refused: {reason_in_words(compiled.get_error())}")
        return Compiled(compiled)


# The rows of a step whose tokens are restricted.


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """The restrictions of one row."""

    row: int
    matcher: Matcher | None = None
    ends: Sequence[int] = ()
    """Tokens, in addition to the model's EOS tokens, that may be sampled where the grammar may end."""
    withheld: Sequence[int] = ()
    """End tokens that must not be sampled, unless the grammar allows no others."""
    allowed: npt.NDArray[np.int32] | None = None
    """The request's `allowed_token_ids`, which apply in addition to the grammar. # [V / 32]"""
    due: npt.NDArray[np.int32] | None = None
    """Tokens one of which must be sampled, if the other restrictions allow any of them. # [V / 32]"""

    @property
    def fields(self) -> list[str]:
        """The request's fields that restrict the row."""
        restricting = {"the request's grammar": self.matcher, "allowed_token_ids": self.allowed}
        return [name for name, restriction in restricting.items() if restriction is not None]


def packed(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a mask that allows `token_ids`. # [ceil(V / 32)]"""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenMasks:
    """Fills one bitmask per restricted row, in reused memory."""

    def __init__(
        self, compute: Callable[[Sequence[tuple[Matcher, int]], npt.NDArray[np.int32]], object] | None = None
    ) -> None:
        self._compute = compute or MaskComputer()
        self._masks = np.zeros((0, 0), dtype=np.int32)

    def fill(self, masked: Sequence[MaskedRow], vocab_size: int) -> tuple[npt.NDArray[np.int32], dict[int, str]]:
        """Return the masks in the order of `masked`, and the errors of rows whose grammar cannot continue, by row.

        # [len(masked), ceil(V / 32)]
        """
        num_words = -(-vocab_size // 32)
        width = max([num_words, *(row.matcher.num_words for row in masked if row.matcher is not None)])
        if len(self._masks) < len(masked) or self._masks.shape[1] != width:
            self._masks = np.zeros((len(masked), width), dtype=np.int32)
        matchers = [(row.matcher, index) for index, row in enumerate(masked) if row.matcher is not None]
        if matchers:
            self._compute(matchers, self._masks)
        failed: dict[int, str] = {}
        for mask, row in zip(self._masks, masked, strict=False):
            if row.matcher is None:
                mask[:] = -1
            elif not row.matcher.settle(mask, row.ends, row.withheld):
                failed[row.row] = row.matcher.error or ""
                mask[:] = -1
            if row.allowed is not None:
                mask[:num_words] &= row.allowed
            if row.due is not None and (mask[:num_words] & row.due).any():
                mask[:num_words] &= row.due
        return self._masks[: len(masked), :num_words], failed
