"""`PromptLookup`: drafts what came next when a sequence's last tokens came before, in its prompt or in its answer.

Needs no second model. Answers that repeat their prompt (edits of code, summaries, quotations, structured data) are
drafted well, others hardly ever: where nothing matches nothing is drafted, and where drafts are rejected they pause.
Source: "Prompt Lookup Decoding", A. Saxena, 2023.
"""

_CANDIDATES = 8
"""Places that are compared, the latest first."""
_LONGEST_PAUSE = 32
"""Tokens for which a sequence drafts nothing, after drafts that were all rejected several times in a row."""


class PromptLookup:
    """One sequence's tokens, indexed as they grow."""

    __slots__ = ("_end", "_longest", "_misses", "_places", "_resume", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """At least `shortest` tokens must match. Of several places the best wins, compared up to `longest` tokens."""
        self._shortest, self._longest = shortest, longest
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Ends of every run of `shortest` tokens, in order."""
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
        shortest, places = self._shortest, self._places
        for end in range(self._end, len(token_ids)):
            places.setdefault(tuple(token_ids[end - shortest : end]), []).append(end)
        self._end = max(self._end, len(token_ids))

    def _match(self, token_ids: list[int]) -> int | None:
        """Where the longest match of the last tokens ends, the latest of several."""
        length, shortest = len(token_ids), self._shortest
        best, most = None, 0
        for end in reversed(self._places.get(tuple(token_ids[-shortest:]), ())[-_CANDIDATES:]):
            matched, limit = shortest, min(self._longest, end)
            while matched < limit and token_ids[end - matched - 1] == token_ids[length - matched - 1]:
                matched += 1
            if matched > most:
                best, most = end, matched
        return best
