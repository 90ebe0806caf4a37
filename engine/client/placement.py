"""`Placement`: chooses the replica that computes a request. `CoreManager` uses it with several replicas.

It has no sockets: it knows the replica of each request, and the outputs. A request is sent to the replica with the
lowest cost, in tokens to compute:

    queued + 64 x live + uncached x (1 + fill)

where `queued` is the replica's number of queued prompt tokens, `live` its number of sequences, `uncached` the number
of the prompt's tokens that are not in the replica's prefix cache, and `fill` the used share of that cache. So a cached
prefix counts exactly the work that it saves: if the replica that has it is busier than another one by more than that,
the other one computes the prefix, and then caches it too. New tokens in a full cache evict as many others, which may
have to be computed again. They count twice, so that the replicas' caches do not all fill with the same prefixes.

The first half is `PrefixIndex`: it estimates the content of a replica's prefix cache, by digests of the prefixes that
were sent there. A wrong estimate may cause a worse placement, but never a wrong answer.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Self

from engine.messages import AddRequest, RequestOutput
from kvcache.hashing import chain_salt, compute_hash, first_parent

_FINE_TOKENS = 1024
"""Up to this length, prefixes are compared at every block; longer ones at intervals of 1 / 16 of their length."""

_COARSENESS = 16

_MOST_HASHED = 32
"""Most hashed tokens of an interval. A longer interval is sampled evenly, so that no prompt is expensive to place."""

_LEAST_BLOCK = 16


def sample_boundaries(block_size: int, longest: int) -> list[int]:
    """Return the prefix lengths, in tokens up to `longest`, at which digests are compared: about 140 for 100,000."""
    unit = max(block_size, _LEAST_BLOCK)
    ends = [unit]
    while ends[-1] < longest:
        interval = 0 if ends[-1] < _FINE_TOKENS else ends[-1] // _COARSENESS
        ends.append(ends[-1] + max(unit, interval // unit * unit))
    return ends


class PrefixChain:
    """Digests of a text's prefixes, one per sample boundary, each chained to the previous one (`kvcache.hashing`)."""

    __slots__ = ("_ends", "_parent", "digests")

    def __init__(self, ends: Sequence[int], salt: int | None) -> None:
        """`ends` are the sample boundaries; `salt` as in `kvcache.hashing.chain_salt`."""
        self._ends = ends
        self._parent = first_parent(salt)
        self.digests: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Length in tokens of the longest prefix with a digest."""
        return self._ends[len(self.digests) - 1] if self.digests else 0

    def copy(self) -> Self:
        """Return an independent copy."""
        copy = type(self).__new__(type(self))
        copy._ends, copy._parent, copy.digests = self._ends, self._parent, self.digests.copy()
        return copy

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the tokens after the first `num_tokens`, up to the last sample boundary."""
        ends, parent, offset = self._ends, self._parent, self.num_tokens
        start = 0
        for end in ends[len(self.digests) : bisect_right(ends, offset + len(tokens))]:
            stop = end - offset
            if stop - start <= 2 * _MOST_HASHED:
                interval = tokens[start:stop]
            else:
                every = (stop - start) // _MOST_HASHED
                interval = tokens[start + every - 1 : stop : every]
            parent = compute_hash(interval, parent)
            self.digests.append(parent)
            start = stop
        self._parent = parent


class PrefixIndex:
    """The most recently used prefixes of one replica, with as many tokens in all as its KV cache holds."""

    def __init__(self, ends: Sequence[int], capacity: int) -> None:
        """`ends` are the sample boundaries, `capacity` the cache's size in tokens."""
        self._ends = ends
        self._capacity = capacity
        self._digests: OrderedDict[int, int] = OrderedDict()
        """Number of tokens in the interval before each digest's boundary, least recently used first.

        A prefix is always more recent than its extensions, so that it is evicted last, as in the cache itself.
        """
        self._tokens = 0

    @property
    def fill(self) -> float:
        """Used share of the cache, 0 to 1."""
        return self._tokens / self._capacity

    def cached_tokens(self, chain: PrefixChain) -> int:
        """Return the length in tokens of the longest cached prefix of `chain`'s text, by bisection."""
        number = bisect_left(chain.digests, True, key=lambda digest: digest not in self._digests)
        return self._ends[number - 1] if number else 0

    def use(self, chain: PrefixChain) -> None:
        """Add the prefixes of `chain`'s text, which the replica computes, and evict the least recently used ones."""
        digests, ends = self._digests, self._ends
        for number in range(len(chain.digests) - 1, -1, -1):
            digest = chain.digests[number]
            if digest in digests:
                digests.move_to_end(digest)
                continue
            digests[digest] = interval = ends[number] - (ends[number - 1] if number else 0)
            self._tokens += interval
        while self._tokens > self._capacity:
            self._tokens -= digests.popitem(last=False)[1]

    def clear(self) -> None:
        """Empty the index, because the core was restarted."""
        self._digests.clear()
        self._tokens = 0


LIVE_TOKENS = 64
"""Cost of a generating sequence, in prompt tokens: it costs little per step, but in many steps."""


class _LiveRequest:
    """A live request and its replica."""

    __slots__ = ("chain", "num_prompt_tokens", "paused", "prompt", "queued", "replica", "token_ids")

    def __init__(self, request: AddRequest, replica: int, queued: int, chain: PrefixChain | None) -> None:
        self.replica = replica
        self.prompt = request.prompt_token_ids
        self.queued = queued
        """Tokens to compute before its next output; for a paused request, their number when it was paused."""
        self.chain = chain
        self.token_ids: Sequence[int] = ()
        self.paused = False


class _Load:
    """The work of a replica, and the estimated content of its cache."""

    def __init__(self, index: PrefixIndex | None) -> None:
        self.queued = 0
        self.live = 0
        self.index = index

    @property
    def tokens(self) -> int:
        return self.queued + LIVE_TOKENS * self.live


class Placement:
    """Chooses and records the replica of each live request, from `place` to its last output."""

    def __init__(
        self, capacities: Sequence[int], block_size: int, max_model_len: int, *, by_prefix: bool, in_turn: bool = False
    ) -> None:
        """`capacities` are the sizes of the replicas' KV caches in tokens.

        `by_prefix`: whether cached prefixes count. `in_turn`: choose replicas in turn, regardless of their work.
        """
        self._ends = sample_boundaries(block_size, max_model_len)
        self._by_prefix = by_prefix and not in_turn
        self._in_turn = in_turn
        self._loads = [_Load(PrefixIndex(self._ends, size) if self._by_prefix else None) for size in capacities]
        self._placed: dict[int, _LiveRequest] = {}
        self._next = 0

    def load(self, replica: int) -> int:
        """Return the work of a replica, in tokens."""
        return self._loads[replica].tokens

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._placed)

    def place(self, requests: Sequence[AddRequest], among: Sequence[int]) -> dict[int, list[AddRequest]]:
        """Choose a replica of `among` for each request. Returns the requests of each chosen replica, in their order.

        Consecutive requests that share one list of prompt tokens are choices of the same prompt. They get the same
        replica, so that the prompt is computed once.
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
        """As `place`, for live requests of unavailable replicas, whose generated tokens must be computed again too."""
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
        """Register `token_ids`, to which the caller appends, as the generated tokens of a request."""
        self._placed[request_id].token_ids = token_ids

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Subtract the work that these outputs show to be done."""
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
        """Subtract paused requests from the work of their replicas."""
        for placed in self._live(request_ids):
            if not placed.paused:
                self._leave(placed)
                placed.paused = True
                self._remember(placed)

    def resume(self, request_ids: Iterable[int]) -> None:
        """Add paused requests to the work of their replicas again, with the tokens that are no longer cached."""
        for placed in self._live(request_ids):
            if placed.paused:
                placed.paused = False
                placed.queued = max(placed.queued, self._lost(placed))
                load = self._loads[placed.replica]
                load.live += 1
                load.queued += placed.queued

    def begin_again(self, replica: int) -> None:
        """Note that a replica's core was restarted with an empty cache, and computes its live requests again."""
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
        # Replicas with equal cost are chosen in turn.
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
            # The other choices share the first one's blocks.
            queued = 0 if number and chain is not None else uncached[replica]
            load.queued += queued
            self._placed[choice.request_id] = _LiveRequest(choice, replica, queued, chain)
        return replica

    def _end(self, output: RequestOutput) -> None:
        """Remove a finished request. Its KV cache blocks stay cached."""
        placed = self._placed.pop(output.request_id)
        if not placed.paused:
            self._leave(placed)
        self._remember(placed, output.output_tokens)

    def _leave(self, placed: _LiveRequest) -> None:
        load = self._loads[placed.replica]
        load.live -= 1
        load.queued -= placed.queued

    def _remember(self, placed: _LiveRequest, last_tokens: Sequence[int] = ()) -> None:
        """Add a request's prompt and generated tokens to the index. `last_tokens` are not in its `token_ids` yet."""
        index = self._loads[placed.replica].index
        if index is not None and placed.chain is not None and (placed.token_ids or last_tokens):
            index.use(_whole_chain(placed, placed.chain, last_tokens))

    def _lost(self, placed: _LiveRequest) -> int:
        """Return the number of a request's tokens that are not in its replica's cache."""
        num_tokens = len(placed.prompt) + len(placed.token_ids)
        index = self._loads[placed.replica].index
        if index is None or placed.chain is None:
            return num_tokens
        return num_tokens - index.cached_tokens(_whole_chain(placed, placed.chain))

    def _live(self, request_ids: Iterable[int]) -> list[_LiveRequest]:
        return [placed for id in request_ids if (placed := self._placed.get(id)) is not None]


def _whole_chain(placed: _LiveRequest, chain: PrefixChain, last_tokens: Sequence[int] = ()) -> PrefixChain:
    """Extend `chain`, the prompt's chain, by the generated tokens."""
    whole = chain.copy()
    whole.extend([*placed.prompt[chain.num_tokens :], *placed.token_ids, *last_tokens])
    return whole
