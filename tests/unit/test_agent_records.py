"""What is kept of an agent's requests: their structure, and none of their words."""

from tests.agents.record import Reducer


def test_a_request_keeps_its_structure_and_loses_its_words() -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where it is"}, "mode": {"enum": ["secret"]}},
        "required": ["path"],
    }
    reducer = Reducer()
    reduced = reducer.body(
        {
            "model": "m",
            "system": "You must keep this secret",
            "tools": [
                {"name": "Open", "description": "Opens a file", "input_schema": schema},
                {"type": "function", "function": {"name": "Close", "parameters": schema}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Open my file, please"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "Open", "input": {"path": "/x"}}],
                },
            ],
            "stream": True,
        }
    )
    tool = {
        "type": "object",
        "properties": {"argument_1": {"type": "string", "description": "word word word"}, "argument_2": {}},
        "required": ["argument_1"],
    }
    assert reduced == {
        "model": "m",
        "system": "word word word word word",
        "tools": [
            {"name": "tool_1", "description": "word word word", "input_schema": tool},
            {"type": "function", "function": {"name": "tool_2", "parameters": tool}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "word word word word"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "tool_1", "input": {"argument_1": "word"}}],
            },
        ],
        "stream": True,
    }


def test_the_billing_line_keeps_its_form_and_what_changes_in_it() -> None:
    lines = [f"x-anthropic-billing-header: cc_version=1.{n}; cc_entrypoint=cli{n};" for n in "ab"]
    reduced = [Reducer().body({"system": line})["system"] for line in lines]
    assert reduced[0] != reduced[1]
    assert all(line.startswith("x-anthropic-billing-header: version=") for line in reduced)
