"""The journal against a model of a core that dies: no token is lost or delivered twice, and each request ends once."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.client.replica import Journal
from engine.messages import AddRequest, RequestOutput, StepOutputs, terminal_output
from engine.sampling_params import SamplingParams

_LENGTH = 6
_PARAMS = SamplingParams(max_tokens=_LENGTH)


class JournalMachine(RuleBasedStateMachine):
    """A core counts from each request's position; the test uses the journal as `CoreManager` does."""

    @initialize()
    def begin(self) -> None:
        self.journal = Journal()
        self.serving = True
        self.core: dict[int, int] = {}
        """The tokens of each request in the core."""
        self.leaving: list[int] = []
        """Requests that the core was asked to abort."""
        self.reported: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.added = 0

    def deliver(self, outputs: list[RequestOutput]) -> None:
        step = StepOutputs(outputs)
        left = self.journal.record(step)
        for output in step.outputs:
            assert output.request_id not in self.ended
            self.reported[output.request_id] += output.output_tokens
            if output.finished:
                assert output.finish_reason is not None
                self.ended[output.request_id] = output.finish_reason
        if self.serving:
            self.send(left)

    def send(self, entries: list) -> None:  # type: ignore[type-arg]
        for message in self.journal.send(entries):
            assert message.request_id not in self.core
            self.core[message.request_id] = len(message.resumed_token_ids)
            assert list(message.resumed_token_ids) == self.reported[message.request_id]

    @rule()
    def add(self) -> None:
        request = AddRequest(self.added, [1], _PARAMS)
        self.reported[self.added] = []
        self.added += 1
        entries = self.journal.add([request])
        if self.serving:
            self.send(entries)

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        outputs = []
        for request_id in self.leaving:
            if self.core.pop(request_id, None) is not None:
                outputs.append(RequestOutput(request_id, [], finished=True, finish_reason="abort"))
        self.leaving = []
        for request_id in sorted(self.core):
            if data.draw(st.booleans()):
                token = self.core[request_id]
                self.core[request_id] += 1
                done = self.core[request_id] == _LENGTH
                outputs.append(RequestOutput(request_id, [token], done, "max_tokens" if done else None))
                if done:
                    del self.core[request_id]
        self.deliver(outputs)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        entries = self.journal.entries([data.draw(st.integers(0, self.added))])
        reported, ended = self.journal.abort(entries)
        if self.serving:
            self.leaving += reported
        self.deliver(ended)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        leaving = self.journal.recall(self.journal.entries([data.draw(st.integers(0, self.added))]))
        if self.serving:
            self.leaving += leaving

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        entries = self.journal.resume(self.journal.entries([data.draw(st.integers(0, self.added))]))
        if self.serving:
            self.send(entries)

    @rule(killed=st.booleans())
    def die_with_another(self, killed: bool) -> None:
        crashes = {entry.request.request_id: entry.crashes for entry in self.journal}
        self.serving, self.core, self.leaving = False, {}, []
        ended = self.journal.core_died(None, killed=killed)
        assert not any(output.is_poison for output in ended)
        self.deliver(ended)
        assert all(entry.crashes == crashes[entry.request.request_id] for entry in self.journal)

    @rule(data=st.data(), killed=st.booleans())
    def die(self, data: st.DataObject, killed: bool) -> None:
        in_step = data.draw(st.lists(st.sampled_from(sorted(self.core)), unique=True)) if self.core else []
        self.serving, self.core, self.leaving = False, {}, []
        ended = self.journal.core_died(in_step, killed=killed)
        if in_step:
            # No request fails because of steps that it was not in, however often the core died.
            assert {output.request_id for output in ended if output.is_poison} <= set(in_step)
        self.deliver(ended)

    @rule()
    def start_again(self) -> None:
        if not self.serving:
            self.serving = True
            self.send(list(self.journal))

    @invariant()
    def every_request_is_live_or_ended(self) -> None:
        assert self.journal.ids == set(range(self.added)) - self.ended.keys()

    @invariant()
    def tokens_are_told_once_and_in_order(self) -> None:
        for request_id, tokens in self.reported.items():
            assert tokens == list(range(len(tokens)))
            if self.ended.get(request_id) == "max_tokens":
                assert len(tokens) == _LENGTH

    def teardown(self) -> None:
        if not hasattr(self, "journal"):
            return
        self.start_again()
        self.send(self.journal.resume(list(self.journal)))
        for _ in range(2 * _LENGTH):
            outputs = [
                RequestOutput(request_id, [], finished=True, finish_reason="abort")
                for request_id in self.leaving
                if self.core.pop(request_id, None) is not None
            ]
            self.leaving = []
            for request_id in sorted(self.core):
                done = self.core[request_id] + 1 == _LENGTH
                outputs.append(
                    RequestOutput(request_id, [self.core[request_id]], done, "max_tokens" if done else None)
                )
                self.core[request_id] += 1
                if done:
                    del self.core[request_id]
            self.deliver(outputs)
        assert not self.journal.ids
        self.tokens_are_told_once_and_in_order()


TestJournal = JournalMachine.TestCase


def test_a_request_that_was_killed_with_cores_is_not_convicted_of_a_step_of_others() -> None:
    """Kills need one more death than crashes to fail a request; only requests in the step of a death can fail."""
    journal = Journal()
    journal.add([AddRequest(request_id, [1], _PARAMS) for request_id in (0, 1)])
    for in_step, killed in (([0], True), ([0], True), ([1], False)):
        journal.send(list(journal))
        assert journal.core_died(in_step, killed=killed) == []
    journal.send(list(journal))
    ended = journal.core_died([0], killed=False)
    assert [(output.request_id, output.is_poison) for output in ended] == [(0, True)]


def test_a_request_that_is_aborted_while_the_core_returns_it_ends() -> None:
    journal = Journal()
    entries = journal.add([AddRequest(0, [1], _PARAMS)])
    journal.send(entries)
    assert journal.recall(entries) == [0]
    assert journal.abort(entries) == ([], [])
    step = StepOutputs([terminal_output(0, "abort")])
    assert journal.record(step) == []
    assert [output.finish_reason for output in step.outputs] == ["abort"]
    assert not journal.ids
