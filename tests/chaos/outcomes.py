"""`Outcome`: the parts of an answer that faults must not change; a stream's events add up to the whole answer.

Ids and times, which differ between answers, and cached tokens, which depend on earlier requests, are excluded.
"""

import json
from typing import Any, TypeAlias

Outcome: TypeAlias = dict[str, Any]

_OWN = {"id", "created", "created_at", "completed_at", "call_id", "item_id", "previous_response_id"}
_OF_THE_CACHE = {"prompt_tokens_details", "input_tokens_details"}
_LEFT_OUT = _OWN | _OF_THE_CACHE


def reduced(answer: Any) -> Any:
    """A whole answer, or a part of one, without the values that may differ."""
    match answer:
        case dict():
            return {key: reduced(value) for key, value in answer.items() if key not in _LEFT_OUT}
        case list():
            return [reduced(value) for value in answer]
    return answer


def read_events(text: str) -> list[Any]:
    """The JSON of a stream's events, including [DONE] as a string. Raises `AssertionError` for a malformed event."""
    assert text.endswith("\n\n"), f"the stream ends within an event: {text[-200:]!r}"
    events: list[Any] = []
    for event in text[:-2].split("\n\n"):
        if event.startswith(":"):  # A comment, which keeps a silent connection alive.
            continue
        lines = event.split("\n")
        kind = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        assert len(lines) == 1, f"an event is one line of data, and this is {event!r}"
        assert lines[0].startswith("data: "), f"an event is one line of data, and this is {event!r}"
        data = lines[0].removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
        assert kind is None or events[-1]["type"] == kind
    return events


def merged(path: str, events: list[Any]) -> Outcome:
    """The sum of a stream's events. Raises `AssertionError` if they are not a complete stream."""
    for event in events[-2:]:
        assert "error" not in event or event["error"] is None, f"the stream failed: {event['error']}"
    if path.endswith("/responses"):
        return _merged_response(events)
    assert events[-1] == "[DONE]", f"the stream ends in {events[-1]!r}"
    assert "[DONE]" not in events[:-1]
    assert len({event["id"] for event in events[:-1]}) == 1, "a stream has one id"
    outcome: Outcome = {"choices": {}, "usage": None}
    for event in events[:-1]:
        for choice in event["choices"]:
            _add_choice(outcome["choices"].setdefault(choice["index"], {}), choice)
        outcome["usage"] = reduced(event.get("usage")) or outcome["usage"]
    assert outcome["usage"] is not None, "the usage was asked for"
    unfinished = [index for index, choice in outcome["choices"].items() if choice.get("finish_reason") is None]
    assert not unfinished, f"the choices {unfinished} never finished"
    outcome["choices"] = dict(sorted(outcome["choices"].items()))
    return outcome


def _add_choice(whole: Outcome, choice: Outcome) -> None:
    """Add one chunk's content to a choice."""
    assert whole.get("finish_reason") is None, f"a choice goes on after its end: {choice}"
    for key, value in choice.items():
        match key:
            case "index":
                pass
            case "delta":
                _add_delta(whole.setdefault("message", {}), value)
            case "logprobs":
                _extend(whole.setdefault("logprobs", {}), value or {})
            case "text":
                whole["text"] = whole.get("text", "") + value
            case _:
                assert value is None or whole.get(key) is None, f"{key} is reported twice"
                whole[key] = whole.get(key) if value is None else value


def _add_delta(message: Outcome, delta: Outcome) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value:
                _add_call(message.setdefault("tool_calls", {}), call)
        elif key == "role":
            assert "role" not in message, "the role is reported twice"
            message["role"] = value
        elif value is not None:
            message[key] = message.get(key, "") + value


def _add_call(calls: dict[int, Outcome], call: Outcome) -> None:
    index, function = call["index"], call["function"]
    known = calls.get(index)
    if known is None:
        assert index == len(calls), "calls are reported in order"
        assert call["id"], "a call begins with its id"
        calls[index] = {"type": call["type"], "name": function["name"], "arguments": function.get("arguments") or ""}
    else:
        assert not function.get("name"), "a call is named once"
        known["arguments"] += function["arguments"]


def _extend(whole: Outcome, part: Outcome) -> None:
    """Add lists of log probabilities to the earlier ones."""
    for key, value in part.items():
        if isinstance(value, list):
            whole.setdefault(key, []).extend(value)


def _merged_response(events: list[Any]) -> Outcome:
    """The response of the last event, whose texts must equal the sum of the deltas before it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), f"it ends in {events[-1]['type']}"
    reported: dict[int, str] = {}
    for event in events:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            reported[event["output_index"]] = reported.get(event["output_index"], "") + event["delta"]
    response: Outcome = reduced(events[-1]["response"])
    for index, item in enumerate(response["output"]):
        if item["type"] == "message":
            assert reported.get(index, "") == "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            assert reported.get(index, "") == item["arguments"]
    return response
