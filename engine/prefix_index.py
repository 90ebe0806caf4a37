"""What a replica's prefix cache is believed to hold: digests of the beginnings of what was sent there.

No torch, no sockets. `engine.placement` asks; a wrong belief costs a worse placement, never a wrong answer.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from kvcache.hashing import compute_hash, first_parent

_FINE_TOKENS = 1024
"""Up to here beginnings are told apart by the block; beyond, to a sixteenth of their length."""

_COARSENESS = 16

_MOST_HASHED = 32
"""Tokens of a stretch that are hashed: of a longer one every so many-th, so that no prompt costs much to place."""

_LEAST_BLOCK = 16


def landmarks(block_size: int, longest: int) -> list[int]:
    """The lengths at which beginnings are compared, in tokens, up to `longest`.

    They lie denser than what is gained by knowing more exactly, and of 100,000 tokens there are about 140.
    """
    unit = max(block_size, _LEAST_BLOCK)
    ends = [unit]
    while ends[-1] < longest:
        stretch = 0 if ends[-1] < _FINE_TOKENS else ends[-1] // _COARSENESS
        ends.append(ends[-1] + max(unit, stretch // unit * unit))
    return ends


class PrefixChain:
    """Digests of a text's beginnings, one a landmark, each chained to the one before (`kvcache.hashing`)."""

    __slots__ = ("_ends", "_parent", "digests")

    def __init__(self, ends: Sequence[int], salt: int | None) -> None:
        """`ends` are the landmarks; `salt` is that of `kvcache.hashing.chain_salt`."""
        self._ends = ends
        self._parent = first_parent(salt)
        self.digests: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest beginning that it has a digest of."""
        return self._ends[len(self.digests) - 1] if self.digests else 0

    def copy(self) -> Self:
        """Another, which goes on by itself."""
        copy = type(self).__new__(type(self))
        copy._ends, copy._parent, copy.digests = self._ends, self._parent, self.digests.copy()
        return copy

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash on, with the tokens that follow the first `num_tokens`; what does not reach a landmark is left."""
        ends, parent, offset = self._ends, self._parent, self.num_tokens
        start = 0
        for end in ends[len(self.digests) : bisect_right(ends, offset + len(tokens))]:
            stop = end - offset
            if stop - start <= 2 * _MOST_HASHED:
                stretch = tokens[start:stop]
            else:
                every = (stop - start) // _MOST_HASHED
                stretch = tokens[start + every - 1 : stop : every]
            parent = compute_hash(stretch, parent)
            self.digests.append(parent)
            start = stop
        self._parent = parent


class PrefixIndex:
    """Of one replica: the beginnings that were used last, of as many tokens as its KV cache holds."""

    def __init__(self, ends: Sequence[int], capacity: int) -> None:
        """`ends` are the landmarks, `capacity` the cache's size in tokens."""
        self._ends = ends
        self._capacity = capacity
        self._digests: OrderedDict[int, int] = OrderedDict()
        """Tokens of the stretch that ends there, the one that was used longest ago first.

        A beginning is always younger than what goes on from it, so that it goes last, as in the cache itself.
        """
        self._tokens = 0

    @property
    def fill(self) -> float:
        """Share of the cache that is in use, 0 to 1."""
        return self._tokens / self._capacity

    def cached_tokens(self, chain: PrefixChain) -> int:
        """Tokens of the longest beginning of `chain`'s text that is here. Takes the logarithm of its length."""
        number = bisect_left(chain.digests, True, key=lambda digest: digest not in self._digests)
        return self._ends[number - 1] if number else 0

    def use(self, chain: PrefixChain) -> None:
        """The replica computes `chain`'s text: its beginnings are here now, and others may have gone for them."""
        digests, ends = self._digests, self._ends
        for number in range(len(chain.digests) - 1, -1, -1):
            digest = chain.digests[number]
            if digest in digests:
                digests.move_to_end(digest)
                continue
            digests[digest] = stretch = ends[number] - (ends[number - 1] if number else 0)
            self._tokens += stretch
        while self._tokens > self._capacity:
            self._tokens -= digests.popitem(last=False)[1]

    def clear(self) -> None:
        """The cache is gone."""
        self._digests.clear()
        self._tokens = 0
