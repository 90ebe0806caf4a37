"""Random bodies of `/v1/messages`, a part of which is valid."""

from typing import Any

from hypothesis import strategies as st

from server.schemas.messages import MessagesRequest

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
)
_TYPES = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "search_result"),
    *("server_tool_use", "web_search_tool_result", "tool_reference", "compaction", "browser_state", "hologram"),
)
_IDS = st.sampled_from(["a", "b"])
_SCHEMAS = st.sampled_from([{}, {"type": "object"}, {"type": "array"}, {"$ref": "#/nowhere"}])
_SOURCES = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "content", "base64", "url"])},
    optional={"data": VALUES, "content": VALUES, "media_type": VALUES},
)
BLOCKS = st.deferred(
    lambda: st.fixed_dictionaries(
        {"type": st.sampled_from(_TYPES) | VALUES},
        optional={
            "text": st.text(max_size=20) | VALUES,
            "thinking": st.text(max_size=20) | VALUES,
            "signature": st.text(max_size=20) | VALUES,
            "data": VALUES,
            "id": _IDS | VALUES,
            "name": st.sampled_from(["f", "g"]) | VALUES,
            "input": st.just({}) | VALUES,
            "tool_use_id": _IDS | VALUES,
            "content": st.text(max_size=20) | st.lists(BLOCKS, max_size=2) | VALUES,
            "is_error": st.booleans() | VALUES,
            "source": _SOURCES | VALUES,
            "title": st.text(max_size=9) | VALUES,
            "cache_control": VALUES,
        },
    )
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | VALUES,
        "content": st.text(max_size=20) | st.lists(BLOCKS, max_size=3) | VALUES,
    }
)
TOOLS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a b", "x" * 129]) | VALUES},
    optional={
        "type": st.sampled_from(["custom", "web_search_20250305", "bash_20250124", "robot"]) | VALUES,
        "input_schema": _SCHEMAS | VALUES,
        "description": st.text(max_size=9) | VALUES,
        "strict": st.booleans() | VALUES,
    },
)
_NAMES = st.sampled_from(sorted(MessagesRequest.model_fields)) | st.text(max_size=9)
_FIELDS = st.dictionaries(_NAMES, VALUES, max_size=2)


def _body(messages: Any, tools: Any, choice: Any, thinking: Any, fields: dict[str, Any]) -> dict[str, Any]:
    right = {"model": "kaon-demo", "max_tokens": 3, "messages": messages, "tools": tools}
    return {**right, **choice, **thinking, **fields}


BODIES: st.SearchStrategy[dict[str, Any]] = st.builds(
    _body,
    st.lists(MESSAGES, max_size=4),
    st.lists(TOOLS, max_size=2),
    st.just({})
    | st.fixed_dictionaries(
        {"tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])}) | VALUES}
    ),
    st.just({})
    | st.fixed_dictionaries(
        {"thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "adaptive", "disabled"])}) | VALUES}
    ),
    _FIELDS,
)
"""Requests that may be valid, with some of their parts set to anything."""
