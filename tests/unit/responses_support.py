"""Helpers for the tests of responses: requests, steps of a model, and a scripted parser."""

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import ConfigDict, TypeAdapter

from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from models.demo import CHECKPOINT_DIR
from server.limits.owners import ANYONE
from server.parsing.parser import AnswerParser, Part
from server.responses.rendering import ResponsesRenderer
from server.responses.tools import ToolTable
from server.schemas.body import validate
from server.schemas.generation import PromptTokensDetails, Usage
from server.schemas.response_objects import ResponseObject
from server.schemas.responses import ResponsesRequest
from server.sealing import Seal

USAGE = Usage(7, 5, 12, PromptTokensDetails(4))
SEALED = Seal()
"""Seals the answers of renderers under test."""
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent, config=ConfigDict(defer_build=True))


def request_of(**fields: Any) -> ResponsesRequest:
    return validate({"model": "m", "input": "Hi", **fields}, ResponsesRequest, allow_unknown=False)


class ScriptedParser(AnswerParser):
    """Returns the next parts of its script for any text."""

    def __init__(self, script: Sequence[list[Part]], rest: Sequence[Part] = ()) -> None:
        self._script = iter(script)
        self._rest = list(rest)

    def push(self, text: str) -> list[Part]:
        return next(self._script)

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        return self._rest


def renderer_of(
    parser: AnswerParser | None = None, ended: list[ResponseObject] | None = None, **fields: Any
) -> ResponsesRenderer:
    """A renderer, which calls `ended` at the response's end."""
    tokenizer = Tokenizer.from_checkpoint(CHECKPOINT_DIR)
    reported = [] if ended is None else ended
    request = request_of(**fields)
    params = SamplingParams(temperature=0.75 if request.temperature is None else request.temperature)
    return ResponsesRenderer(
        request, params, tokenizer, "f", parser, ToolTable(request), SEALED.sealer(ANYONE.key), reported.append
    )


def events_of(stream: bytes) -> list[Any]:
    """The events of a stream, as the official client's types; they are numbered without gaps, and their two names
    agree."""
    events = []
    for frame in stream.split(b"\n\n")[:-1]:
        name, data = frame.split(b"\n")
        event = _EVENTS.validate_json(data.removeprefix(b"data: "))
        assert name == f"event: {event.type}".encode()
        assert json.loads(data.removeprefix(b"data: "))["sequence_number"] == len(events)
        events.append(event)
    return events


def types_of(stream: bytes) -> list[str]:
    return [event.type.removeprefix("response.") for event in events_of(stream)]
