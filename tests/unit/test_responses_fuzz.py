"""Whatever JSON arrives as a responses request: it becomes a chat request and an answer, or a `BadRequest`."""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from engine.sampling_params import SamplingParams
from server.errors import BadRequest
from server.responses.conversion import to_chat, to_messages
from server.responses.rendering import _new_response
from server.responses.store import Turn, stored_items
from server.schemas.body import validate
from server.schemas.responses import ResponsesRequest

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
TYPES = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "item_reference", "web_search_call"]
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]) | VALUES},
    optional={"text": st.text() | VALUES, "refusal": st.text() | VALUES},
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | VALUES,
        "id": st.text() | VALUES,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "content": st.text() | st.lists(PARTS, max_size=2) | VALUES,
        "call_id": st.sampled_from(["a", "b"]) | VALUES,
        "name": st.text() | VALUES,
        "arguments": st.text() | VALUES,
        "output": st.text() | st.lists(PARTS, max_size=2) | VALUES,
        "summary": VALUES,
    },
)
LISTED: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
FIELDS = st.dictionaries(st.sampled_from(sorted(ResponsesRequest.model_fields)) | st.text(), VALUES, max_size=3)


@given(st.text() | st.lists(ITEMS | VALUES, max_size=4), FIELDS, st.booleans())
def test_any_fields_become_a_chat_and_an_answer_or_are_refused(input: Any, fields: Any, allow_unknown: bool) -> None:
    try:
        request = validate({"model": "m", "input": input, **fields}, ResponsesRequest, allow_unknown=allow_unknown)
        turn = Turn(None, stored_items(request.input, lambda id: None))
        to_chat(request, to_messages(turn.context()))
    except BadRequest as error:
        json.loads(error.body())
    else:
        _new_response(request, SamplingParams(), "resp_1", 0)
        assert len(turn.input) == len(request.input)


@given(st.lists(ITEMS, max_size=4))
def test_any_items_that_are_read_are_listed_in_the_clients_types(given_items: list[Any]) -> None:
    try:
        request = validate({"model": "m", "input": given_items}, ResponsesRequest, allow_unknown=False)
        items = stored_items(request.input, lambda id: None)
    except BadRequest:
        return
    LISTED.validate_json(msgspec.json.encode(items))
