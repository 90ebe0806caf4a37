"""`RequestState`: engine outputs to deltas, finish reasons, and the final result with its timings."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.messages import RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestState
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock set by the test: each reading returns the next value; the last value stays."""
    times = [0.0]
    clock = SimpleNamespace(monotonic=lambda: times.pop(0) if len(times) > 1 else times[0])
    monkeypatch.setattr("engine.text.request_state.time", clock)
    return times


def start(tokenizer: Tokenizer, **params: object) -> RequestState:
    """A sequence after the prompt "the"."""
    return RequestState(1, tokenizer.encode("the"), SamplingParams(**params), tokenizer)  # type: ignore[arg-type]


def outputs(ids: list[int], finish_reason: str) -> Iterator[RequestOutput]:
    """One output per token, the last one finished."""
    for token_id in ids[:-1]:
        yield RequestOutput(1, [token_id])
    yield RequestOutput(1, ids[-1:], finished=True, finish_reason=finish_reason)


def test_deltas_concatenate_to_the_result(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("quick 日本 👩‍👩‍👧 fox")
    state = start(byte_level)
    deltas = [state.push(output) for output in outputs(ids, "max_tokens")]
    assert "".join(delta.text for delta in deltas) == state.result()["text"] == "quick 日本 👩‍👩‍👧 fox"
    assert [i for delta in deltas for i in delta.token_ids] == state.result()["token_ids"] == ids
    assert [delta.finished for delta in deltas] == [False] * (len(ids) - 1) + [True]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(ids) - 1)


@pytest.mark.parametrize(
    ("engine_reason", "finish_reason", "stop_reason"),
    [
        ("eos", "stop", None),
        ("max_tokens", "length", None),
        ("stop_sequence", "stop", None),
        ("stop_42", "stop", 42),
        ("abort", "abort", None),
        ("error", "error", None),
    ],
)
def test_engine_finish_reasons_become_openais(
    byte_level: Tokenizer, engine_reason: str, finish_reason: str, stop_reason: int | None
) -> None:
    state = start(byte_level)
    output = RequestOutput(1, byte_level.encode("a"), finished=True, finish_reason=engine_reason)
    delta = state.push(output)
    assert (delta.finished, delta.finish_reason, delta.stop_reason) == (True, finish_reason, stop_reason)
    assert state.stopped_early is False


def test_an_error_says_why(byte_level: Tokenizer) -> None:
    state = start(byte_level)
    delta = state.push(RequestOutput(1, [], finished=True, finish_reason="error", error="the step failed"))
    assert (delta.text, delta.error, state.result()["error"]) == ("", "the step failed", "the step failed")


@pytest.mark.parametrize(("skip", "shown"), [(True, "fox"), (False, "fox<|im_end|>")])
@pytest.mark.parametrize("reason", ["eos", "stop_1"])
def test_a_special_end_token_shows_only_when_special_tokens_do(
    byte_level: Tokenizer, skip: bool, shown: str, reason: str
) -> None:
    ids = byte_level.encode("fox<|im_end|>")
    state = start(byte_level, skip_special_tokens=skip)
    for output in outputs(ids, reason):
        state.push(output)
    assert (state.text, state.token_ids) == (shown, ids)


@pytest.mark.parametrize(("include", "shown"), [(False, "fox"), (True, "fox<tool call>")])
def test_a_stop_token_with_text_shows_only_when_asked_for(byte_level: Tokenizer, include: bool, shown: str) -> None:
    ids = byte_level.encode("fox<tool call>")
    state = start(byte_level, include_stop_str_in_output=include, skip_special_tokens=False)
    for output in outputs(ids, f"stop_{ids[-1]}"):
        state.push(output)
    assert (state.text, state.token_ids) == (shown, ids)


def test_a_token_that_merely_ends_at_max_tokens_is_shown(byte_level: Tokenizer) -> None:
    state = start(byte_level)
    for output in outputs(byte_level.encode("fox dog"), "max_tokens"):
        state.push(output)
    assert state.text == "fox dog"


def test_a_stop_string_ends_the_sequence_before_the_core_does(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a.b.c")
    logprobs = [TokenLogprobs(token_id, -0.5) for token_id in ids]
    state = start(byte_level, stop_strings=["."], logprobs=0)
    delta = state.push(RequestOutput(1, ids, logprobs=logprobs))
    assert (delta.text, delta.finished, delta.finish_reason, delta.stop_reason) == ("a", True, "stop", ".")
    assert state.stopped_early
    assert (delta.token_ids, state.token_ids) == (ids[:2], ids[:2])
    assert (delta.logprobs, state.logprobs) == (logprobs[:2], logprobs[:2])


def test_a_stop_string_in_the_last_output_leaves_nothing_to_abort(byte_level: Tokenizer) -> None:
    state = start(byte_level, stop_strings=["c"])
    delta = state.push(RequestOutput(1, byte_level.encode("abc"), finished=True, finish_reason="max_tokens"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "c")
    assert state.stopped_early is False


def test_an_abort_releases_text_that_was_held_back(byte_level: Tokenizer) -> None:
    state = start(byte_level, stop_strings=["stop"])
    assert state.push(RequestOutput(1, byte_level.encode("st"))).text == ""
    assert state.push(RequestOutput(1, [], finished=True, finish_reason="abort")).text == "st"


def test_a_completion_keeps_the_space_that_parts_it_from_its_prompt(byte_fallback: Tokenizer) -> None:
    state = start(byte_fallback)
    assert state.push(RequestOutput(1, byte_fallback.encode("Hello", add_special_tokens=False))).text == " Hello"


def test_timings_count_from_arrival_to_first_and_last_token(byte_level: Tokenizer, clock: list[float]) -> None:
    clock[:] = [10.0, 10.5, 10.8, 11.5]
    state = start(byte_level)
    ids = byte_level.encode("abc")
    state.push(RequestOutput(1, ids[:1], num_cached_tokens=2, queue_time=0.25))
    state.push(RequestOutput(1, ids[1:2]))
    state.push(RequestOutput(1, ids[2:], finished=True, finish_reason="max_tokens"))
    result = state.result()
    assert (result["ttft"], result["tpot"], result["latency"]) == (0.5, 0.5, 1.5)
    assert (result["num_tokens_input"], result["num_tokens_output"]) == (len(byte_level.encode("the")), 3)
    assert (result["num_cached_tokens"], state.queue_time) == (2, 0.25)


def test_a_sequence_without_tokens_has_no_ttft(byte_level: Tokenizer, clock: list[float]) -> None:
    clock[:] = [10.0, 12.0]
    state = start(byte_level)
    state.push(RequestOutput(1, [], finished=True, finish_reason="abort"))
    result = state.result()
    assert (result["ttft"], result["tpot"], result["latency"], result["num_tokens_output"]) == (0.0, 0.0, 2.0, 0)


def test_times_are_those_of_the_core_however_late_its_outputs_are_read(
    byte_level: Tokenizer, clock: list[float]
) -> None:
    clock[:] = [100.0, 500.0]
    state = start(byte_level)
    state.push(RequestOutput(1, [5], time=103.0))
    state.push(RequestOutput(1, [6], time=104.0))
    state.push(RequestOutput(1, [7], True, "max_tokens", time=105.0))
    result = state.result()
    assert (result["ttft"], result["tpot"], result["latency"]) == (3.0, 1.0, 5.0)
