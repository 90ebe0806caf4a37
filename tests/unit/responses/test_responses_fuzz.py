"""Any JSON as a responses request becomes a chat request and an answer, or a `BadRequest`."""

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
from server.responses.tools import ToolTable
from server.schemas.body import validate
from server.schemas.responses import _KINDS, _TOOLS, ResponsesRequest
from server.sealing import Seal

SEAL = Seal()
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
TYPES = st.sampled_from([*_KINDS, "unknown"])
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
        "action": VALUES,
        "input": st.text() | VALUES,
        "namespace": st.sampled_from(["a", "b"]) | VALUES,
        "encrypted_content": st.text() | VALUES,
        "tools": st.lists(st.deferred(lambda: TOOLS), max_size=2) | VALUES,
        "output": st.text() | st.lists(PARTS, max_size=2) | VALUES,
        "summary": VALUES,
    },
)
NAMES = st.sampled_from(["a", "b", "a__b", "x" * 128]) | VALUES
MEMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom"]), "name": NAMES},
    optional={
        "description": st.text() | VALUES,
        "parameters": VALUES,
        "strict": st.booleans(),
        "format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "grammar"])},
            optional={"syntax": st.sampled_from(["lark", "regex"]), "definition": st.text()},
        ),
    },
)
TOOLS = (
    MEMBERS
    | st.fixed_dictionaries({"type": st.just("namespace"), "name": NAMES, "tools": st.lists(MEMBERS, max_size=3)})
    | st.fixed_dictionaries({"type": st.sampled_from(_TOOLS) | VALUES}, optional={"server_label": VALUES})
)
LISTED: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
FIELDS = st.dictionaries(st.sampled_from(sorted(ResponsesRequest.model_fields)) | st.text(), VALUES, max_size=3)


@given(st.text() | st.lists(ITEMS | VALUES, max_size=4), st.lists(TOOLS, max_size=3), FIELDS, st.booleans())
def test_any_fields_become_a_chat_and_an_answer_or_are_refused(
    input: Any, tools: Any, fields: Any, allow_unknown: bool
) -> None:
    try:
        request = validate(
            {"model": "m", "input": input, "tools": tools, **fields}, ResponsesRequest, allow_unknown=allow_unknown
        )
        turn = Turn(None, stored_items(request.input, lambda id: None))
        table = ToolTable(request)
        messages = to_messages(turn.context(), table, lambda kind, sealed: SEAL.open(kind, sealed, None))
        to_chat(request, messages, table, None)
    except BadRequest as error:
        json.loads(error.body())
    else:
        _new_response(request, SamplingParams(), "resp_1", 0)
        assert len(turn.input) <= 2 * len(request.input)


@given(st.lists(ITEMS, max_size=4))
def test_any_items_that_are_read_are_listed_in_the_clients_types(given_items: list[Any]) -> None:
    try:
        request = validate({"model": "m", "input": given_items}, ResponsesRequest, allow_unknown=False)
        items = stored_items(request.input, lambda id: None)
    except BadRequest:
        return
    LISTED.validate_json(msgspec.json.encode(items))
