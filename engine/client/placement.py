"""`Placement`: which replica computes a request. Asked by `CoreManager` where there are several.

No torch, no sockets: it knows what was sent where and what has come of it.

The rule: a request goes where the least work lies before its first token and is made by it, in tokens to compute:

    queued + 64 x live + uncached x (1 + fill)

of a replica's `queued` prompt tokens, its `live` sequences, the prompt's tokens that are not in its prefix cache, and
the share of that cache that is in use. So a cached prefix attracts by what it saves, and no more: as soon as the
replica that has it is that much busier than another, the other one computes it once and has it too. Tokens that are
new to a full cache push out as many, which somebody may have to compute again: they count twice there, so that the
replicas' caches fill evenly instead of all with the same.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Self

from engine.messages import AddRequest, RequestOutput
from kvcache.hashing import chain_salt, compute_hash, first_parent

# [prefix_index] What a replica's prefix cache is believed to hold: digests of the beginnings of what was sent there.
#
# No torch, no sockets. `engine.client.placement` asks; a wrong belief costs a worse placement, never a wrong answer.

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


LIVE_TOKENS = 64
"""Prompt tokens whose computing weighs as much as a sequence that generates.

A step costs one like it little, but it stays for many."""


class _Placed:
    """A live request, where it was sent."""

    __slots__ = ("chain", "num_prompt_tokens", "paused", "prompt", "queued", "replica", "token_ids")

    def __init__(self, request: AddRequest, replica: int, queued: int, chain: PrefixChain | None) -> None:
        self.replica = replica
        self.prompt = request.prompt_token_ids
        self.queued = queued
        """Tokens that must be computed before its next output; of a paused one: when it was paused."""
        self.chain = chain
        self.token_ids: Sequence[int] = ()
        self.paused = False


class _Load:
    """What a replica has to do, and what its cache is believed to hold."""

    def __init__(self, index: PrefixIndex | None) -> None:
        self.queued = 0
        self.live = 0
        self.index = index

    @property
    def tokens(self) -> int:
        return self.queued + LIVE_TOKENS * self.live


class Placement:
    """Where each live request is computed, from `place` to its last output."""

    def __init__(
        self, capacities: Sequence[int], block_size: int, max_model_len: int, *, by_prefix: bool, in_turn: bool = False
    ) -> None:
        """`capacities` are the sizes of the replicas' KV caches in tokens.

        `by_prefix`: whether they share the beginnings of prompts. `in_turn`: each replica is as good as another.
        """
        self._ends = landmarks(block_size, max_model_len)
        self._by_prefix = by_prefix and not in_turn
        self._in_turn = in_turn
        self._loads = [_Load(PrefixIndex(self._ends, size) if self._by_prefix else None) for size in capacities]
        self._placed: dict[int, _Placed] = {}
        self._next = 0

    def load(self, replica: int) -> int:
        """What a replica has to do, in tokens."""
        return self._loads[replica].tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._placed)

    def place(self, requests: Sequence[AddRequest], among: Sequence[int]) -> dict[int, list[AddRequest]]:
        """A replica of `among` for each request; by replica those that go there, in their order.

        Successive requests of one and the same prompt, a list that they share, are its choices: they go together, for
        the prompt is computed once.
        """
        chosen: dict[int, list[AddRequest]] = {}
        first = 0
        while first < len(requests):
            end = first + 1
            while end < len(requests) and requests[end].prompt_token_ids is requests[first].prompt_token_ids:
                end += 1
            choices = requests[first:end]
            chosen.setdefault(self._place(choices, among), []).extend(choices)
            first = end
        return chosen

    def move(self, requests: Sequence[AddRequest], among: Sequence[int]) -> dict[int, list[AddRequest]]:
        """As `place`, for live requests whose replicas are away: what they have generated is computed anew as well."""
        before = [self._placed.pop(request.request_id) for request in requests]
        for placed in before:
            if not placed.paused:
                self._leave(placed)
        chosen = self.place(requests, among)
        for request, placed in zip(requests, before, strict=True):
            moved = self._placed[request.request_id]
            moved.token_ids = placed.token_ids
            moved.queued += len(placed.token_ids)
            self._loads[moved.replica].queued += len(placed.token_ids)
            if placed.paused:
                self._leave(moved)
                moved.paused = True
        return chosen

    def follow(self, request_id: int, token_ids: Sequence[int]) -> None:
        """What a request has generated is in `token_ids`, which grows with its outputs."""
        self._placed[request_id].token_ids = token_ids

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """A replica told of these."""
        for output in outputs:
            placed = self._placed.get(output.request_id)
            if placed is None:
                continue
            if placed.queued:
                if not placed.paused:
                    self._loads[placed.replica].queued -= placed.queued
                placed.queued = 0
            if output.finished:
                self._end(output)

    def pause(self, request_ids: Iterable[int]) -> None:
        """These requests leave their replicas for a while."""
        for placed in self._live(request_ids):
            if not placed.paused:
                self._leave(placed)
                placed.paused = True
                self._remember(placed)

    def resume(self, request_ids: Iterable[int]) -> None:
        """They come back to them, and are computed again as far as the cache has lost them."""
        for placed in self._live(request_ids):
            if placed.paused:
                placed.paused = False
                placed.queued = max(placed.queued, self._lost(placed))
                load = self._loads[placed.replica]
                load.live += 1
                load.queued += placed.queued

    def begin_again(self, replica: int) -> None:
        """Another core takes the place of a replica's, without its cache: it computes again what is live there."""
        load = self._loads[replica]
        if load.index is not None:
            load.index.clear()
        load.queued = 0
        for placed in self._placed.values():
            if placed.replica != replica or placed.paused:
                continue
            placed.queued = len(placed.prompt) + len(placed.token_ids)
            load.queued += placed.queued
            if load.index is not None and placed.chain is not None:
                load.index.use(placed.chain)

    # -- one prompt ---------------------------------------------------------------------------------------------

    def _place(self, choices: Sequence[AddRequest], among: Sequence[int]) -> int:
        request = choices[0]
        num_tokens = len(request.prompt_token_ids)
        chain = None
        if self._by_prefix:
            chain = PrefixChain(self._ends, chain_salt(request.cache_salt, request.adapter))
            chain.extend(request.prompt_token_ids)
        # Equals are taken in turn.
        turn = self._next % len(among)
        candidates = [*among[turn:], *among[:turn]]
        self._next += 1
        uncached = dict.fromkeys(candidates, num_tokens)
        if self._in_turn:
            replica = candidates[0]
        elif chain is None:
            replica = min(candidates, key=self.load)
        else:
            work = {}
            for each in candidates:
                index = self._loads[each].index
                assert index is not None
                uncached[each] -= index.cached_tokens(chain)
                work[each] = self._loads[each].tokens + uncached[each] * (1.0 + index.fill)
            replica = min(candidates, key=work.__getitem__)
        load = self._loads[replica]
        if chain is not None and load.index is not None:
            load.index.use(chain)
        load.live += len(choices)
        for number, choice in enumerate(choices):
            # The first one's blocks serve the others.
            queued = 0 if number and chain is not None else uncached[replica]
            load.queued += queued
            self._placed[choice.request_id] = _Placed(choice, replica, queued, chain)
        return replica

    def _end(self, output: RequestOutput) -> None:
        """What a request has computed stays in the cache behind it."""
        placed = self._placed.pop(output.request_id)
        if not placed.paused:
            self._leave(placed)
        self._remember(placed, output.output_tokens)

    def _leave(self, placed: _Placed) -> None:
        load = self._loads[placed.replica]
        load.live -= 1
        load.queued -= placed.queued

    def _remember(self, placed: _Placed, last_tokens: Sequence[int] = ()) -> None:
        """What a request has computed stays in the cache behind it; `last_tokens` are not in its `token_ids` yet."""
        index = self._loads[placed.replica].index
        if index is not None and placed.chain is not None and (placed.token_ids or last_tokens):
            index.use(_whole_chain(placed, placed.chain, last_tokens))

    def _lost(self, placed: _Placed) -> int:
        """Tokens of a request that are not in its replica's cache."""
        num_tokens = len(placed.prompt) + len(placed.token_ids)
        index = self._loads[placed.replica].index
        if index is None or placed.chain is None:
            return num_tokens
        return num_tokens - index.cached_tokens(_whole_chain(placed, placed.chain))

    def _live(self, request_ids: Iterable[int]) -> list[_Placed]:
        return [placed for id in request_ids if (placed := self._placed.get(id)) is not None]


def _whole_chain(placed: _Placed, chain: PrefixChain, last_tokens: Sequence[int] = ()) -> PrefixChain:
    """`chain`, the prompt's, with all that was generated behind it."""
    whole = chain.copy()
    whole.extend([*placed.prompt[chain.num_tokens :], *placed.token_ids, *last_tokens])
    return whole
