"""`Cluster`: a real `CoreManager` over replicas whose cores are counters in this process, run step by step."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import pytest

from engine.client import relocation
from engine.client.core_manager import CoreManager
from engine.client.supervisor import Keeper
from engine.config.config import Config, ParallelConfig
from engine.messages import AbortRequests, AddRequest, Failed, Inbound, ModelInfo, Ready, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams

_MODEL = ModelInfo("StubForCausalLM", "float32", "cpu", "cpu", 0, 50_000, 8192, [2], 16, 1024)
_FIRST_TOKEN = 1000
_LONG_AGO = 100.0
LONGEST_START = 300.0


class _Clock:
    """A replacement of the module `time`, whose time the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


_CLOCK = _Clock()


class StubSupervisor:
    """A core that counts: a request's n-th token is `_FIRST_TOKEN + n`. It replaces `Supervisor`."""

    link = None
    next_poll = 0.0
    pid = 1
    longest_start = LONGEST_START

    def __init__(self, config: Config, keeper: Keeper, name: str, *, starts: bool = True) -> None:
        self.name = name
        self.is_serving = False
        self.since = _CLOCK.monotonic()
        self.failure: Failed | None = None
        self.core: dict[int, AddRequest] = {}
        """The core's requests."""
        self.untried: list[int] = []
        """Suspects among them, which it computes first, each alone."""
        self.tokens: dict[int, int] = {}
        """Number of tokens of each request in the core."""
        self.leaving: list[int] = []
        self._keeper = keeper
        self._has_served = False
        self._looks_to_the_end: int | None = None

    def attach(self, loop: object) -> None:
        """As `Supervisor`."""

    def note_work(self) -> None:
        """As `Supervisor`."""

    def poll(self) -> None:
        """As `Supervisor`; a core that was asked to end has ended at the second poll."""
        if self._has_served and not self.is_serving and self.failure is None:
            self._keeper.on_unavailable()
        if self._looks_to_the_end is not None:
            self._looks_to_the_end -= 1
            if not self._looks_to_the_end:
                self.end(Failed(f"{self.name} has stopped"))

    def begin_shutdown(self, messages: Sequence[Inbound]) -> None:
        """As `Supervisor`."""
        self._looks_to_the_end = 2 if self.is_serving else None

    def end(self, failure: Failed) -> None:
        """As `Supervisor`."""
        if self.failure is None:
            self.is_serving, self.failure = False, failure
            self._keeper.on_end(failure)

    def send(self, messages: Sequence[Inbound]) -> None:
        """As `Supervisor`."""
        if not self.is_serving:
            return
        for message in messages:
            match message:
                case AddRequest(request_id=request_id):
                    assert request_id not in self.core
                    self.core[request_id] = message
                    self.tokens[request_id] = len(message.resumed_token_ids)
                    if message.suspect:
                        self.untried.append(request_id)
                case AbortRequests():
                    self.leaving += message.request_ids

    # -- actions of the test ------------------------------------------------------------------------------------

    def serve(self) -> None:
        """The next core is ready."""
        assert not self.is_serving
        self.is_serving, self.since = True, _CLOCK.monotonic()
        again, self._has_served = self._has_served, True
        self._keeper.on_core_ready(Ready(_MODEL, {}), again=again)

    def stall(self) -> None:
        """The core is found to be stuck, and is about to be killed."""
        self.is_serving, self.since = False, _CLOCK.monotonic()

    def lose(self, in_step: Collection[int] | None, *, killed: bool = False) -> None:
        """The core has died in a step of these requests; None: with its host."""
        if self.is_serving:
            self.is_serving, self.since = False, _CLOCK.monotonic()
        self.core, self.tokens, self.leaving, self.untried = {}, {}, [], []
        self._keeper.on_core_death(in_step, killed=killed)

    def next_step(self) -> list[int]:
        """The requests that the core's next step computes."""
        return self.untried[:1] or list(self.core)

    def step(self, among: Collection[int] | None = None) -> None:
        """All requests of the next step, or those among these, get a token each; aborted requests end."""
        outputs = []
        chosen = self.next_step()
        for request_id in self.leaving:
            if self.core.pop(request_id, None) is not None:
                outputs.append(RequestOutput(request_id, [], True, "abort"))
        self.leaving = []
        for request_id in chosen:
            if request_id in self.core and (among is None or request_id in among):
                token = self.tokens[request_id]
                self.tokens[request_id] += 1
                done = token + 1 == self.core[request_id].sampling_params.max_tokens
                outputs.append(RequestOutput(request_id, [_FIRST_TOKEN + token], done, "max_tokens" if done else None))
                if done:
                    del self.core[request_id]
        reported = {output.request_id for output in outputs}
        self.untried = [each for each in self.untried if each in self.core and each not in reported]
        self._keeper.on_step(StepOutputs(outputs))

    def fail(self, request_id: int) -> None:
        """A step raises because of the request, which ends; the core continues."""
        del self.core[request_id]
        self.untried = [each for each in self.untried if each != request_id]
        self._keeper.on_step(StepOutputs([RequestOutput(request_id, [], True, "error", "the step failed")]))


class Cluster:
    """The manager, its replicas' stubs, and the tokens delivered for each request."""

    def __init__(self, size: int = 2, **parallel: Any) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("engine.client.replica.Supervisor", StubSupervisor)
        self._patch.setattr(relocation, "time", _CLOCK)
        self.reported: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self.moves: list[tuple[int, int]] = []
        fields = {"data_parallel_size": size, **parallel}
        self.manager = CoreManager(Config(parallel_config=ParallelConfig.model_validate(fields)))
        self.manager.attach(None, self._take, on_move=lambda *reported: self.moves.append(reported))  # type: ignore[arg-type]
        self.stubs: list[StubSupervisor] = [each.supervisor for each in self.manager._replicas]  # type: ignore[misc]
        for stub in self.stubs:
            stub.serve()
        self.pass_time(_LONG_AGO)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all replicas; no process may remain."""
        self.manager.shutdown()
        self._patch.undo()
        assert not self.manager.live

    def pass_time(self, seconds: float) -> None:
        """Pretend that `seconds` have passed."""
        _CLOCK.now += seconds

    def poll(self) -> None:
        """Run the periodic work of the supervisors."""
        for stub in self.stubs:
            stub.poll()

    def stay_away(self, seconds: float = relocation.UNAVAILABLE_SECONDS) -> None:
        """Pretend that `seconds` have passed, and run the periodic work."""
        self.pass_time(seconds)
        self.poll()

    def add(self, *ids: int, to: int | None = None, prompt: list[int] | None = None, **params: Any) -> None:
        """Requests of `prompt`, by default each with a prompt of its own; `to`: the only available replica."""
        others = [stub for number, stub in enumerate(self.stubs) if to not in (None, number) and stub.is_serving]
        for stub in others:
            stub.is_serving = False
        requests = []
        for request_id in ids:
            self.reported[request_id] = []
            fields = {"max_tokens": 6, "ignore_eos": True, **params}
            requests.append(AddRequest(request_id, prompt or [request_id + 1], SamplingParams(**fields)))
        self.manager.add_requests(requests)
        for stub in others:
            stub.is_serving = True

    def homes(self) -> dict[int, int]:
        """The replica of each live request."""
        found = [(id, replica.number) for replica in self.manager._replicas for id in replica.live]
        assert len(found) == len(self.manager.live), "each is of one replica"
        return dict(found)

    def run(self, holds: Callable[[], bool]) -> None:
        """Run steps of all ready cores until `holds()` is true."""
        for _ in range(1000):
            if holds():
                return
            for stub in self.stubs:
                if stub.is_serving:
                    stub.step()
        raise AssertionError("it never came to hold")

    def until_ended(self, *ids: int) -> None:
        """Run steps until these requests have ended."""
        self.run(lambda: self.ends.keys() >= set(ids))

    def assert_complete(self, *ids: int, max_tokens: int = 6) -> None:
        """Assert that each request has all its tokens, in order and once."""
        for request_id in ids:
            assert self.ends[request_id].finish_reason == "max_tokens", self.ends[request_id]
            assert self.reported[request_id] == [_FIRST_TOKEN + number for number in range(max_tokens)]

    def assert_in_order(self) -> None:
        """Assert that no token was lost or delivered twice."""
        for tokens in self.reported.values():
            assert tokens == [_FIRST_TOKEN + number for number in range(len(tokens))]

    def _take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            assert output.request_id not in self.ends, "a request had an output after its end"
            self.reported[output.request_id] += output.output_tokens
            if output.finished:
                self.ends[output.request_id] = output
