"""The hub: every sequence's outputs reach their consumer, merged while it lags, and end exactly once."""

import asyncio
import math
from collections.abc import Sequence
from typing import cast

import pytest

from engine.client.core_manager import CoreManager, EngineDeadError
from engine.messages import AddRequest, RequestOutput, StepOutputs
from engine.sampling_params import SamplingParams
from engine.text.io_processor import NewSequence
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.errors import EngineError, NotReady
from server.limits.accounts import Tally
from server.limits.admission import Admission, Limits
from server.limits.jobs import Jobs
from server.limits.owners import ANYONE
from server.metrics import Metrics
from server.streaming.hub import Consumer, DeltaStream, Hub, WholeResult


class FakeCore:
    """Records the calls."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.aborted: list[int] = []
        self.paused: list[int] = []
        self.resumed: list[int] = []
        self.dead = False

    def add_requests(self, requests: Sequence[AddRequest]) -> None:
        if self.dead:
            raise EngineDeadError("the engine core has stopped")
        self.added += [request.request_id for request in requests]

    def abort(self, request_ids: Sequence[int]) -> None:
        self.aborted += request_ids

    def pause(self, request_ids: Sequence[int]) -> None:
        self.paused += request_ids

    def resume(self, request_ids: Sequence[int]) -> None:
        self.resumed += request_ids


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def hub(core: FakeCore) -> Hub:
    metrics = Metrics("1")
    admission = Admission(Limits(), metrics)
    return Hub(cast(CoreManager, core), metrics, admission, Jobs(admission.accounts).answers)


def delta_stream() -> DeltaStream:
    """A request whose client may lag without limit."""
    return DeltaStream(lambda: math.inf, lambda _: None, lambda: None)


def submit(hub: Hub, sequences: list[NewSequence], consumer: Consumer) -> None:
    hub.submit(sequences, [1] * len(sequences), consumer, Tally(ANYONE, ""))


def sequences(hub: Hub, tokenizer: Tokenizer, count: int, stop: str | None = None) -> list[NewSequence]:
    params = SamplingParams(stop_strings=[stop] if stop else None)
    return [
        NewSequence(AddRequest(id, [5], params), RequestState(id, [5], params, tokenizer)) for id in hub.new_ids(count)
    ]


def tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def step(hub: Hub, *outputs: RequestOutput) -> None:
    hub.receive(StepOutputs(list(outputs)))


async def test_deltas_arrive_by_choice(hub: Hub, core: FakeCore, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 2)
    stream = delta_stream()
    submit(hub, live, stream)
    assert core.added == [0, 1]
    step(hub, RequestOutput(1, tokens("one", tokenizer)), RequestOutput(0, tokens("zero", tokenizer)))
    taken = await stream.take()
    assert {index: delta.text for index, delta in taken.items()} == {0: "zero", 1: "one"}


async def test_deltas_of_a_lagging_client_merge_into_one(hub: Hub, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 1)
    stream = delta_stream()
    submit(hub, live, stream)
    for word in ("a", "b"):
        step(hub, RequestOutput(0, tokens(word, tokenizer)))
    step(hub, RequestOutput(0, tokens("c", tokenizer), finished=True, finish_reason="max_tokens"))
    (delta,) = (await stream.take()).values()
    assert (delta.text, delta.finished, delta.finish_reason) == ("abc", True, "length")
    assert delta.token_ids == live[0].state.token_ids


async def test_text_held_back_for_a_stop_string_does_not_wake_the_client(hub: Hub, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 1, stop="xyz")
    stream = delta_stream()
    submit(hub, live, stream)
    step(hub, RequestOutput(0, tokens("xy", tokenizer)))
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    step(hub, RequestOutput(0, tokens("a", tokenizer)))
    assert (await waiting)[0].text == "xya"


async def test_a_stop_string_ends_the_sequence_in_the_core(hub: Hub, core: FakeCore, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 1, stop="b")
    results = WholeResult(1)
    submit(hub, live, results)
    step(hub, RequestOutput(0, tokens("ab", tokenizer)))
    await results.wait()
    assert core.aborted == [0]
    assert (live[0].state.text, live[0].state.finish_reason) == ("a", "stop")
    step(hub, RequestOutput(0, [], finished=True, finish_reason="abort"))
    assert live[0].state.finish_reason == "stop"


async def test_results_wait_for_the_last_sequence(hub: Hub, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 2)
    results = WholeResult(2)
    submit(hub, live, results)
    waiting = asyncio.ensure_future(results.wait())
    step(hub, RequestOutput(0, tokens("a", tokenizer), finished=True, finish_reason="eos"))
    await asyncio.sleep(0)
    assert not waiting.done()
    step(hub, RequestOutput(1, tokens("b", tokenizer), finished=True, finish_reason="max_tokens"))
    await waiting
    assert [each.state.finish_reason for each in live] == ["stop", "length"]


async def test_an_engine_error_reaches_its_own_client_only(hub: Hub, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 2)
    guilty, other = WholeResult(1), delta_stream()
    submit(hub, live[:1], guilty)
    submit(hub, live[1:], other)
    failed = RequestOutput(0, [], finished=True, finish_reason="error", error="the step failed")
    step(hub, failed, RequestOutput(1, tokens("fine", tokenizer)))
    with pytest.raises(EngineError, match="the step failed"):
        await guilty.wait()
    assert (await other.take())[0].text == "fine"


@pytest.mark.parametrize(("is_poison", "headers"), [(True, {"x-should-retry": "false"}), (False, {})])
async def test_who_broke_the_engine_is_asked_not_to_retry(
    hub: Hub, tokenizer: Tokenizer, is_poison: bool, headers: dict[str, str]
) -> None:
    live = sequences(hub, tokenizer, 1)
    results = WholeResult(1)
    submit(hub, live, results)
    step(hub, RequestOutput(0, [], finished=True, finish_reason="error", error="it died", is_poison=is_poison))
    with pytest.raises(EngineError, match="it died") as raised:
        await results.wait()
    assert (raised.value.status, raised.value.headers) == (500, headers)


async def test_what_came_before_an_error_is_taken_before_it(hub: Hub, tokenizer: Tokenizer) -> None:
    live = sequences(hub, tokenizer, 1)
    stream = delta_stream()
    submit(hub, live, stream)
    step(hub, RequestOutput(0, tokens("a", tokenizer)))
    hub.fail_all(NotReady("the server is shutting down"))
    assert (await stream.take())[0].text == "a"
    with pytest.raises(NotReady, match="shutting down"):
        await stream.take()


async def test_tokens_without_text_do_not_wake_the_client_and_come_with_the_next_text(
    hub: Hub, tokenizer: Tokenizer
) -> None:
    live = sequences(hub, tokenizer, 2)
    stream = delta_stream()
    submit(hub, live, stream)
    first, second, other = tokens("a", tokenizer)[0], tokens("b", tokenizer)[0], tokens("c", tokenizer)[0]
    stream.put(0, RequestDelta("", [first]))
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(1, RequestDelta("c", [other]))
    assert (await waiting).keys() == {1}
    stream.put(0, RequestDelta("ab", [second]))
    assert (await stream.take())[0] == RequestDelta("ab", [first, second], merged=[("", 1), ("ab", 1)])


async def test_log_probabilities_of_a_prompt_wake_the_reader_and_survive_merging(
    hub: Hub, tokenizer: Tokenizer
) -> None:
    live = sequences(hub, tokenizer, 1)
    stream = delta_stream()
    submit(hub, live, stream)
    step(hub, RequestOutput(0, [], prompt_logprobs=[]))
    step(hub, RequestOutput(0, tokens("a", tokenizer)))
    delta = (await stream.take())[0]
    assert (delta.text, delta.prompt_logprobs) == ("a", [])


async def test_a_cancelled_request_is_aborted_once_and_its_late_outputs_are_dropped(
    hub: Hub, core: FakeCore, tokenizer: Tokenizer
) -> None:
    live = sequences(hub, tokenizer, 2)
    stream = delta_stream()
    submit(hub, live, stream)
    step(hub, RequestOutput(0, tokens("a", tokenizer), finished=True, finish_reason="eos"))
    hub.cancel([each.state for each in live])
    hub.cancel([each.state for each in live])
    assert core.aborted == [1]
    step(hub, RequestOutput(1, tokens("late", tokenizer)))
    assert list(await stream.take()) == [0]


async def test_an_output_that_cannot_be_read_fails_its_request_alone(
    hub: Hub, core: FakeCore, tokenizer: Tokenizer
) -> None:
    live = sequences(hub, tokenizer, 2)
    broken, fine = delta_stream(), delta_stream()
    submit(hub, live[:1], broken)
    submit(hub, live[1:], fine)
    step(hub, RequestOutput(0, ["no id"]), RequestOutput(1, tokens("fine", tokenizer)))  # type: ignore[list-item]
    with pytest.raises(EngineError, match="cannot be read"):
        await broken.take()
    assert (await fine.take())[0].text == "fine"
    assert core.aborted == [0]


def test_a_dead_core_is_reported_at_submission(hub: Hub, core: FakeCore, tokenizer: Tokenizer) -> None:
    core.dead = True
    live = sequences(hub, tokenizer, 1)
    with pytest.raises(EngineError, match="has stopped"):
        submit(hub, live, delta_stream())
