"""Random outages of replicas: no token is lost or delivered twice, and only requests that crash cores fail."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.stub_supervisors import LONGEST_START, Cluster, StubSupervisor

_LENGTH = 6


class RelocationMachine(RuleBasedStateMachine):
    """Hosts are lost with their cores at any time; some requests kill the core that computes their n-th token."""

    @initialize(size=st.integers(2, 4))
    def begin(self, size: int) -> None:
        self.cluster = Cluster(size)
        self.added = 0
        self.kills_at: dict[int, int] = {}
        """For each killing request, the number of its tokens at which it kills."""
        self.deaths: dict[int, int] = {}
        """For each killing request, how often it has killed."""

    @property
    def serving(self) -> list[StubSupervisor]:
        return [stub for stub in self.cluster.stubs if stub.is_serving]

    @property
    def away(self) -> list[StubSupervisor]:
        return [stub for stub in self.cluster.stubs if not stub.is_serving]

    @rule(choices=st.integers(1, 3), shared=st.booleans(), kills_at=st.none() | st.integers(0, _LENGTH - 1))
    def add(self, choices: int, shared: bool, kills_at: int | None) -> None:
        ids = range(self.added, self.added + choices)
        self.added += choices
        if kills_at is not None:
            self.kills_at[ids[0]] = kills_at
        self.cluster.add(*ids, prompt=[1] * 20 if shared else None, max_tokens=_LENGTH)

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.compute(data.draw(st.sampled_from(self.serving)))

    def compute(self, stub: StubSupervisor) -> None:
        """A step, which may be the core's last."""
        chosen = stub.next_step()
        deadly = [request_id for request_id in chosen if self.kills_at.get(request_id) == stub.tokens[request_id]]
        if deadly:
            for request_id in deadly:
                self.deaths[request_id] = self.deaths.get(request_id, 0) + 1
            stub.lose(chosen)
        else:
            stub.step()

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def lose_host(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.serving)).lose(None)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def return_host(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.away)).serve()

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 2 * LONGEST_START]))
    def stay_away(self, seconds: float) -> None:
        self.cluster.stay_away(seconds)

    @rule(data=st.data(), what=st.sampled_from(["abort", "pause", "resume"]))
    def tell(self, data: st.DataObject, what: str) -> None:
        getattr(self.cluster.manager, what)([data.draw(st.integers(0, self.added))])

    @invariant()
    def every_request_is_of_one_replica_or_has_ended(self) -> None:
        if self.added:
            assert self.cluster.homes().keys() == set(range(self.added)) - self.cluster.ends.keys()

    @invariant()
    def each_is_in_one_core_at_most(self) -> None:
        if self.added:
            inside = [request_id for stub in self.serving for request_id in stub.core]
            assert len(inside) == len(set(inside))

    @invariant()
    def tokens_are_told_once_and_in_order(self) -> None:
        if self.added:
            self.cluster.assert_in_order()

    @invariant()
    def only_who_kills_ends_with_an_error_after_two_deaths(self) -> None:
        if not self.added:
            return
        ends = self.cluster.ends.items()
        guilty = {request_id for request_id, output in ends if output.finish_reason == "error"}
        assert guilty <= self.kills_at.keys()
        for request_id, deaths in self.deaths.items():
            # It may have been in the step of another request that kills.
            assert deaths <= 2
            assert deaths < 2 or request_id in guilty or self.cluster.ends[request_id].finish_reason == "abort"

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        if not self.serving:
            self.cluster.stubs[0].serve()
        self.cluster.manager.resume(range(self.added))
        self.settle()
        # Requests that were lost with one core after the other wait until their own turn.
        waiting = {entry for replica in self.cluster.manager._replicas for entry in replica.journal}
        assert all(entry.losses >= 3 for entry in waiting)
        for stub in self.away:
            stub.serve()
        self.settle()
        assert not self.cluster.manager.live
        for request_id, tokens in self.cluster.reported.items():
            if self.cluster.ends[request_id].finish_reason == "max_tokens":
                assert len(tokens) == _LENGTH
        self.only_who_kills_ends_with_an_error_after_two_deaths()
        self.cluster.close()

    def settle(self) -> None:
        """Time passes, and only cores that their requests killed are started again."""
        for _ in range(10 * _LENGTH + 10 * self.added):
            for stub in self.serving:
                self.compute(stub)
                if not stub.is_serving:
                    stub.serve()
            self.cluster.stay_away(2 * LONGEST_START)


RelocationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRelocation = RelocationMachine.TestCase
