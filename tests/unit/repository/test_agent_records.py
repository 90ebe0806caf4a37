"""Recorded requests of agents contain their structure, and none of their words."""

from tests.agents.record import Reducer, shape


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


def test_tools_of_every_type_are_kept_with_grammars_of_our_own() -> None:
    functions = [{"type": "function", "name": f"f{number}", "parameters": {"type": "object"}} for number in range(6)]
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /their grammar/"}
    group = {"type": "namespace", "name": "files", "tools": [functions[0]]}
    call = {"type": "function_call", "name": "f0", "namespace": "files", "arguments": '{"path": "/home"}'}
    reduced = Reducer().body(
        {
            "tools": [*functions, {"type": "custom", "name": "patch", "format": form}, group],
            "input": [call],
            "include": ["a.b"],
        }
    )
    *first, patch, files = reduced["tools"]
    assert [tool["name"] for tool in first] == ["tool_1", "tool_2", "tool_3", "tool_4"]
    assert patch["format"] == {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z ]+/"}
    assert files["tools"][0]["name"] == "tool_1"
    assert reduced["input"][0]["namespace"] == files["name"]
    assert (reduced["input"][0]["arguments"], reduced["include"]) == ('{"argument_1": "word"}', ["a.b"])


def test_requests_that_differ_in_their_words_only_have_one_shape() -> None:
    def body(words: str, *roles: str) -> dict[str, object]:
        return {"messages": [{"role": role, "content": words} for role in roles], "stream": True}

    assert shape(body("Hi", "user")) == shape(body("Ho ho", "user"))
    assert shape(body("Hi", "user")) != shape(body("Hi", "system"))
    assert shape(body("Hi", "user")) != shape(body("Hi", "user", "user"))
