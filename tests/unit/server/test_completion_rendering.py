"""Answers of `/v1/completions`: the first chunk of a stream, and fields that were not requested."""

import json
from typing import Any

import pytest

from engine.messages import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.request_state import RequestDelta, RequestState
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.routes.completions import CompletionRenderer, PromptEcho
from server.schemas.body import validate
from server.schemas.completions import CompletionRequest
from server.schemas.generation import PromptTokensDetails, Usage
from server.streaming.logprobs import CompletionLogprobsWriter
from server.streaming.sse import encode

USAGE = Usage(1, 2, 3, PromptTokensDetails(0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(CHECKPOINT_DIR)


def renderer(tokenizer: Tokenizer, prompts: list[PromptEcho], **fields: Any) -> CompletionRenderer:
    request = validate({"model": "m", "prompt": "x", "stream": True, **fields}, CompletionRequest, allow_unknown=False)
    return CompletionRenderer(request, tokenizer, "f", prompts)


def choices(raw: bytes) -> list[dict[str, Any]]:
    events = [json.loads(block.removeprefix("data: ")) for block in raw.decode().split("\n\n")[:-1]]
    return [choice for event in events for choice in event["choices"]]


def positions(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, (token_id, 7), (-0.5, -1.5), 1) for token_id in token_ids]


def test_a_plain_chunk_holds_openais_members_and_no_other(tokenizer: Tokenizer) -> None:
    plain = renderer(tokenizer, [PromptEcho([5], "")])
    assert plain.opening() == b""
    (choice,) = choices(plain.chunk(0, RequestDelta("a", [5], positions([5]))))
    assert choice == {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}


def test_an_echo_without_log_probabilities_does_not_wait(tokenizer: Tokenizer) -> None:
    echoing = renderer(tokenizer, [PromptEcho([5], "ab"), PromptEcho([6], "cd")], echo=True, n=2)
    assert [choice["text"] for choice in choices(echoing.opening())] == ["ab", "ab", "cd", "cd"]


def test_choices_wait_for_their_prompts_log_probabilities_and_no_others(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two")
    prompts = [PromptEcho(ids, "One two"), PromptEcho(ids, "One two")]
    waiting = renderer(tokenizer, prompts, echo=True, logprobs=1, n=2)
    assert waiting.opening() == b""
    assert waiting.chunk(1, RequestDelta("b", [8], positions([8]))) == b""
    assert waiting.chunk(3, RequestDelta("d", [8], positions([8]))) == b""
    reported = RequestDelta("a", [9], positions([9]), prompt_logprobs=positions(ids[1:]))
    came = choices(waiting.chunk(0, reported))
    assert [(choice["index"], choice["text"]) for choice in came] == [
        (0, "One two"),
        (1, "One two"),
        (1, "b"),
        (0, "a"),
    ]
    assert [len(choice["logprobs"]["tokens"]) for choice in came] == [len(ids), len(ids), 1, 1]
    assert came[0]["logprobs"]["token_logprobs"] == [None, *([-0.5] * (len(ids) - 1))]
    assert came[2]["logprobs"]["text_offset"] == came[3]["logprobs"]["text_offset"] == [len("One two")]
    assert [choice["text"] for choice in choices(waiting.chunk(1, RequestDelta("e", [8], positions([8]))))] == ["e"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_log_probabilities_are_converted_once_for_all_its_choices(
    tokenizer: Tokenizer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converting them is Python, which delays the event loop."""
    ids = tokenizer.encode("One two")
    converted, add = list[TokenLogprobs](), CompletionLogprobsWriter._add

    def counted(writer: CompletionLogprobsWriter, written: Any, position: TokenLogprobs, count: int) -> None:
        converted.append(position)
        add(writer, written, position, count)

    monkeypatch.setattr(CompletionLogprobsWriter, "_add", counted)
    fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "n": 3}
    echoing = renderer(tokenizer, [PromptEcho(ids, "One two")], **fields)
    reported = positions(ids[1:])
    if stream:
        came = choices(echoing.chunk(0, RequestDelta("", [], prompt_logprobs=reported)))[:3]
    else:
        states = [RequestState(number, ids, SamplingParams(), tokenizer) for number in range(3)]
        for state in states:
            state.prompt_logprobs = reported
        came = json.loads(encode(echoing.whole(states, USAGE)))["choices"]
    assert converted == reported
    assert [choice["index"] for choice in came] == [0, 1, 2]
    assert all(len(choice["logprobs"]["tokens"]) == len(ids) for choice in came)
    assert all(len(choice["prompt_logprobs"]) == len(ids) for choice in came)


def test_echoed_log_probabilities_show_as_many_alternatives_as_logprobs_says(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two")
    both = renderer(tokenizer, [PromptEcho(ids, "One two")], echo=True, logprobs=0, prompt_logprobs=2)
    (opening, _) = choices(both.chunk(0, RequestDelta("a", [9], positions([9]), prompt_logprobs=positions(ids[1:]))))
    assert [len(top) for top in opening["logprobs"]["top_logprobs"][1:]] == [1] * (len(ids) - 1)
    assert opening["prompt_logprobs"][0] is None
    assert opening["prompt_logprobs"][1] == {
        str(ids[1]): {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(ids[1])},
        "7": {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(7)},
    }


def test_minus_infinity_is_reported_as_a_number(tokenizer: Tokenizer) -> None:
    infinite = [TokenLogprobs(5, float("-inf"), (6,), (float("-inf"),), 9)]
    asking = renderer(tokenizer, [PromptEcho([4, 5], "")], prompt_logprobs=1)
    (opening, _) = choices(asking.chunk(0, RequestDelta("a", [9], prompt_logprobs=infinite)))
    assert [entry["logprob"] for entry in opening["prompt_logprobs"][1].values()] == [-9999.0, -9999.0]


def test_usage_of_a_stream_counts_on_where_each_chunk_reports_it(tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counting = renderer(tokenizer, [PromptEcho([5, 6], ""), PromptEcho([7], "")], stream_options=options)
    raw = counting.chunk(0, RequestDelta("a", [1, 2])) + counting.chunk(1, RequestDelta("b", [1], None, True, "stop"))
    reported = [json.loads(block.removeprefix("data: "))["usage"] for block in raw.decode().split("\n\n")[:-1]]
    assert reported == [
        {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    ]


def test_usage_in_each_chunk_needs_usage_at_the_end(tokenizer: Tokenizer) -> None:
    plain = renderer(tokenizer, [PromptEcho([5], "")], stream_options={"continuous_usage_stats": True})
    assert b"usage" not in plain.chunk(0, RequestDelta("a", [1])) + plain.closing(USAGE)


def test_tokens_can_be_spelled_by_their_ids(tokenizer: Tokenizer) -> None:
    asking = renderer(tokenizer, [PromptEcho([5], "")], logprobs=2, return_tokens_as_token_ids=True)
    (choice,) = choices(asking.chunk(0, RequestDelta("a", [9], positions([9]))))
    assert choice["logprobs"]["tokens"] == ["token_id:9"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:9": -0.5, "token_id:7": -1.5}]
