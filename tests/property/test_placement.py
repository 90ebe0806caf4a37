"""Placement under random load: each request is placed once, load stays bounded, and no state leaks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.client.placement import LIVE_TOKENS, Placement
from engine.messages import AddRequest, RequestOutput
from engine.sampling_params import SamplingParams

_BLOCK = 16
_PREFIXES = [[seed] * (_BLOCK * length) for seed, length in enumerate((1, 4, 20, 70, 90))]


class PlacementMachine(RuleBasedStateMachine):
    """Replicas that join and leave, and requests with common prefixes or without."""

    @initialize(size=st.integers(1, 4), capacity=st.integers(1, 200), by_prefix=st.booleans())
    def begin(self, size: int, capacity: int, by_prefix: bool) -> None:
        self.size = size
        self.placement = Placement([capacity * _BLOCK] * size, _BLOCK, 4096, by_prefix=by_prefix)
        self.live: dict[int, tuple[int, list[int], list[int]]] = {}
        """Replica, prompt and tokens of each request."""
        self.paused: set[int] = set()
        self.added = 0

    @rule(
        prefix=st.sampled_from(_PREFIXES),
        own=st.lists(st.integers(100, 200), max_size=64),
        choices=st.integers(1, 3),
        data=st.data(),
    )
    def add(self, prefix: list[int], own: list[int], choices: int, data: st.DataObject) -> None:
        replicas = st.lists(st.integers(0, self.size - 1), min_size=1, unique=True)
        among = data.draw(replicas)
        prompt = [*prefix, *own]
        before = [self.placement.load(each) for each in range(self.size)]
        requests = [AddRequest(self.added + i, prompt, SamplingParams()) for i in range(choices)]
        self.added += choices
        ((replica, placed),) = self.placement.place(requests, among).items()
        assert placed == requests
        assert replica in among
        # A cached prefix is worth the tokens that it saves: at most the prompt, and twice that if the other's cache is
        # full.
        assert before[replica] <= min(before[each] for each in among) + 2 * len(prompt)
        for request in requests:
            tokens: list[int] = []
            self.placement.follow(request.request_id, tokens)
            self.live[request.request_id] = replica, prompt, tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), max_size=40), finished=st.booleans())
    def step(self, data: st.DataObject, tokens: list[int], finished: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True))
        self.placement.note([RequestOutput(id, tokens, finished, "eos" if finished else None) for id in chosen])
        for id in chosen:
            if finished:
                del self.live[id]
                self.paused.discard(id)
            else:
                self.live[id][2].extend(tokens)

    @rule(data=st.data(), pause=st.booleans())
    def pause_or_resume(self, data: st.DataObject, pause: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, self.added)))
        if pause:
            self.placement.pause(ids)
            self.paused |= self.live.keys() & set(ids)
        else:
            self.placement.resume(ids)
            self.paused -= set(ids)

    @rule(data=st.data())
    def core_dies(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.size - 1))
        self.placement.begin_again(replica)
        there = [each for id, each in self.live.items() if each[0] == replica and id not in self.paused]
        expected = sum(len(prompt) + len(tokens) + LIVE_TOKENS for _, prompt, tokens in there)
        assert self.placement.load(replica) == expected

    @invariant()
    def load_is_that_of_the_live_requests(self) -> None:
        if not hasattr(self, "live"):
            return
        assert self.placement.num_live == len(self.live)
        for replica in range(self.size):
            there = [each for id, each in self.live.items() if each[0] == replica and id not in self.paused]
            least = LIVE_TOKENS * len(there)
            most = least + sum(len(prompt) + len(tokens) for _, prompt, tokens in there)
            assert least <= self.placement.load(replica) <= most

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.placement.note([RequestOutput(id, [], True, "abort") for id in list(self.live)])
            assert self.placement.num_live == 0
            assert [self.placement.load(replica) for replica in range(self.size)] == [0] * self.size


PlacementMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestPlacement = PlacementMachine.TestCase
