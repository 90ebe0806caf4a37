"""`PromptLookup`: drafts the tokens that followed an earlier occurrence of a sequence's last tokens.

It needs no draft model. Its acceptance rate is high for answers that repeat their prompt (edits of code, summaries,
quotations, structured data). Without a match nothing is drafted, and after rejected drafts drafting pauses.
Source: "Prompt Lookup Decoding", A. Saxena, 2023. Matches are found by hash chains, as in LZ77 compressors.
"""

from array import array

import numpy as np

_MAX_CANDIDATES = 8
"""The most matches that are compared, the latest first."""
_MAX_CHAIN = 32
"""The most links of a hash chain that are followed to find matches, since other runs may have the same hash."""
_MAX_PAUSE = 32
"""The most tokens without drafts after successive steps in which all drafts were rejected."""
_MAX_SINGLE_TOKENS = 64
"""The most new tokens that are indexed one by one; more of them are indexed by NumPy."""
_MULTIPLIER, _WORD = 0x9E3779B1, 0xFFFFFFFF


class PromptLookup:
    """An index of one sequence's tokens, extended as it grows. It takes 8 to 16 bytes per token."""

    __slots__ = ("_before", "_end", "_longest", "_mask", "_misses", "_newest", "_resume", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """At least `shortest` tokens must match; the longest match wins, compared up to `longest` tokens."""
        self._shortest, self._longest = shortest, longest
        self._newest = array("i")
        """By the hash of a run of `shortest` tokens: the end of the latest such run, or 0."""
        self._before = array("i")
        """By the end of a run: the end of the previous run with the same hash, or 0."""
        self._mask = 0
        self._end = shortest
        """The first end that is not indexed."""
        self._misses = 0
        self._resume = 0
        """Length of the sequence at which drafting resumes."""

    def propose(self, token_ids: list[int], count: int, num_unread: int = 0) -> list[int]:
        """Draft at most `count` tokens that follow `num_unread` tokens which are sampled but not read yet."""
        length = len(token_ids)
        if length < max(self._resume, self._shortest + 1):
            return []
        self._extend(token_ids)
        match = self._match(token_ids)
        if match is None:
            return []
        # Draft the tokens after the match; past the end of the known tokens they repeat with the match's period.
        period = length - match
        wanted = num_unread + count
        found = token_ids[match : match + wanted]
        while len(found) < wanted:
            found.append(found[len(found) - period])
        return found[num_unread:]

    def lacks_many(self, length: int) -> bool:
        """Whether a sequence of this length has so many tokens that are not indexed that `index` should be called."""
        return length - self._end > _MAX_SINGLE_TOKENS or length > len(self._before) > 0

    def index(self, token_ids: list[int], most: int) -> int:
        """Index at most `most` further tokens. Returns their number."""
        length = len(token_ids)
        if length > len(self._before):
            self._allocate(length)
        begin, self._end = self._end, max(self._end, min(length, self._end + most))
        if self._end > begin:
            self._index(token_ids, begin, self._end)
        return self._end - begin

    def note(self, length: int, num_drafts: int, num_accepted: int) -> None:
        """Record a step's verified drafts, after which the sequence has this length."""
        if num_accepted:
            self._misses = 0
        elif num_drafts:
            self._misses += 1
            self._resume = length + min(2**self._misses - 1, _MAX_PAUSE)

    def _extend(self, token_ids: list[int]) -> None:
        """Extend the index to all tokens, except the last run, because no token follows it yet."""
        length = len(token_ids)
        if length > len(self._before) or length - self._end > _MAX_SINGLE_TOKENS:
            self.index(token_ids, length)
        newest, before = self._newest, self._before
        for end in range(self._end, length):
            bucket = self._hash(token_ids, end) & self._mask
            before[end], newest[bucket] = newest[bucket], end
        self._end = max(self._end, length)

    def _allocate(self, length: int) -> None:
        """Begin the index again, with capacity for up to as many tokens again."""
        size = 1 << length.bit_length()
        self._mask = size - 1
        self._newest, self._before = array("i", bytes(4 * size)), array("i", bytes(4 * size))
        self._end = self._shortest

    def _index(self, token_ids: list[int], begin: int, stop: int) -> None:
        """Index the runs that end at `[begin, stop)`, at once."""
        shortest = self._shortest
        tokens = np.array(token_ids[begin - shortest : stop - 1], dtype=np.uint64)
        ends = np.arange(begin, stop)
        hashes = np.zeros(len(ends), dtype=np.uint64)
        for offset in range(shortest):
            # The product cannot overflow, since both factors are below 2^32.
            hashes = (hashes * np.uint64(_MULTIPLIER) + tokens[offset : offset + len(ends)]) & np.uint64(_WORD)
        buckets = (hashes & np.uint64(self._mask)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        is_alike = np.zeros(len(ends), dtype=np.bool_)
        is_alike[1:] = buckets[order[1:]] == buckets[order[:-1]]
        newest, before = np.frombuffer(self._newest, dtype=np.int32), np.frombuffer(self._before, dtype=np.int32)
        firsts = order[~is_alike]
        before[ends[firsts]] = newest[buckets[firsts]]
        before[ends[order[is_alike]]] = ends[order[:-1][is_alike[1:]]]
        newest[buckets] = ends  # Of several runs with one hash, the assignment leaves the last one.

    def _hash(self, token_ids: list[int], end: int) -> int:
        value = 0
        for token_id in token_ids[end - self._shortest : end]:
            value = (value * _MULTIPLIER + token_id) & _WORD
        return value

    def _match(self, token_ids: list[int]) -> int | None:
        """The end of the longest match of the last tokens, the latest of several; None without a match."""
        length = len(token_ids)
        best, most, candidates = None, self._shortest - 1, 0
        end = self._newest[self._hash(token_ids, length) & self._mask]
        for _ in range(_MAX_CHAIN):
            if not end:
                break
            matched, limit = 0, min(self._longest, end)
            while matched < limit and token_ids[end - matched - 1] == token_ids[length - matched - 1]:
                matched += 1
            if matched > most:
                best, most = end, matched
            candidates += matched >= self._shortest
            if most == self._longest or candidates == _MAX_CANDIDATES:
                break
            end = self._before[end]
        return best
