"""`PromptLookup`: drafts what came next when a sequence's last tokens came before, in its prompt or in its answer.

Needs no second model. Answers that repeat their prompt (edits of code, summaries, quotations, structured data) are
drafted well, others hardly ever: where nothing matches nothing is drafted, and where drafts are rejected they pause.
Source: "Prompt Lookup Decoding", A. Saxena, 2023. Places are found as LZ77's compressors do, by chains of hashes.
"""

from array import array

import numpy as np

_CANDIDATES = 8
"""Places that are compared, the latest first."""
_LONGEST_CHAIN = 32
"""Places that are looked at for them: others may have the same hash."""
_LONGEST_PAUSE = 32
"""Tokens for which a sequence drafts nothing, after drafts that were all rejected several times in a row."""
_FEW = 64
"""Tokens that are taken in one by one; more of them all at once, with those before."""
_MULTIPLIER, _WORD = 0x9E3779B1, 0xFFFFFFFF


class PromptLookup:
    """One sequence's tokens, indexed as they grow: 8 to 16 bytes each."""

    __slots__ = ("_before", "_end", "_longest", "_mask", "_misses", "_newest", "_resume", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """At least `shortest` tokens must match. Of several places the best wins, compared up to `longest` tokens."""
        self._shortest, self._longest = shortest, longest
        self._newest = array("i")
        """By hash of a run of `shortest` tokens: where the latest such run ends; 0: there is none."""
        self._before = array("i")
        """By end of a run: where the one before it with its hash ends; 0: there is none."""
        self._mask = 0
        self._end = shortest
        """The first end that is not in there."""
        self._misses = 0
        self._resume = 0
        """Length of the sequence from which on it drafts."""

    def propose(self, token_ids: list[int], count: int, ahead: int = 0) -> list[int]:
        """At most `count` tokens that may come after `ahead` more, which are sampled and not known yet."""
        length = len(token_ids)
        if length < max(self._resume, self._shortest + 1):
            return []
        self._take_in(token_ids)
        place = self._match(token_ids)
        if place is None:
            return []
        # What follows the match; past the end of what is known it repeats, as what matches does.
        period = length - place
        wanted = ahead + count
        found = token_ids[place : place + wanted]
        while len(found) < wanted:
            found.append(found[len(found) - period])
        return found[ahead:]

    def note(self, length: int, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were verified, behind which the sequence is of this length."""
        if num_accepted:
            self._misses = 0
        elif num_drafts:
            self._misses += 1
            self._resume = length + min(2**self._misses - 1, _LONGEST_PAUSE)

    def _take_in(self, token_ids: list[int]) -> None:
        """The last run is left out: nothing follows it yet."""
        length = len(token_ids)
        if length > len(self._before) or length - self._end > _FEW:
            self._index(token_ids)
        newest, before = self._newest, self._before
        for end in range(self._end, length):
            place = self._hash(token_ids, end) & self._mask
            before[end], newest[place] = newest[place], end
        self._end = max(self._end, length)

    def _index(self, token_ids: list[int]) -> None:
        """Take all in at once, with room for as many again at most."""
        length, shortest = len(token_ids), self._shortest
        size = 1 << length.bit_length()
        self._mask = size - 1
        tokens = np.array(token_ids, dtype=np.uint64)
        ends = np.arange(shortest, length)
        hashes = np.zeros(len(ends), dtype=np.uint64)
        for place in range(shortest):
            # Below 2^64: what is multiplied is below 2^32, and so is what it is multiplied by.
            hashes = (hashes * np.uint64(_MULTIPLIER) + tokens[place : place + len(ends)]) & np.uint64(_WORD)
        places = (hashes & np.uint64(self._mask)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        is_alike = places[order[1:]] == places[order[:-1]]
        newest, before = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
        before[ends[order[1:]][is_alike]] = ends[order[:-1]][is_alike]
        newest[places] = ends  # Of several at one place the last one stays.
        self._newest, self._before = array("i", newest.tobytes()), array("i", before.tobytes())
        self._end = max(length, shortest)

    def _hash(self, token_ids: list[int], end: int) -> int:
        value = 0
        for token_id in token_ids[end - self._shortest : end]:
            value = (value * _MULTIPLIER + token_id) & _WORD
        return value

    def _match(self, token_ids: list[int]) -> int | None:
        """Where the longest match of the last tokens ends, the latest of several."""
        length = len(token_ids)
        best, most, candidates = None, self._shortest - 1, 0
        end = self._newest[self._hash(token_ids, length) & self._mask]
        for _ in range(_LONGEST_CHAIN):
            if not end:
                break
            matched, limit = 0, min(self._longest, end)
            while matched < limit and token_ids[end - matched - 1] == token_ids[length - matched - 1]:
                matched += 1
            if matched > most:
                best, most = end, matched
            candidates += matched >= self._shortest
            if most == self._longest or candidates == _CANDIDATES:
                break
            end = self._before[end]
        return best
