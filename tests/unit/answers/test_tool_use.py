"""The result of a request's tools and `tool_choice`, and their refusals."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from server.schemas.chat_tools import FunctionTool, ToolChoice, Tools, ToolUse

CHOICE: TypeAdapter[Any] = TypeAdapter(ToolChoice)
TOOLS: TypeAdapter[list[FunctionTool]] = TypeAdapter(Tools)
F, G = ({"type": "function", "function": {"name": name}} for name in "fg")


def use(choice: Any, *tools: Any, parallel: bool = True) -> ToolUse:
    return ToolUse.of(TOOLS.validate_python(list(tools)), CHOICE.validate_python(choice), parallel)


def names(tool_use: ToolUse) -> str:
    return "".join(tool.function.name for tool in tool_use.tools)


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "called", "forced", "once", "restricted"),
    [
        ("none", "", False, False, False),
        ("auto", "fg", False, False, False),
        ("required", "fg", True, False, False),
        (G, "g", True, True, True),
        (allowed("auto", G), "g", False, False, True),
        (allowed("required", G, F), "gf", True, False, False),
        (allowed("required", G, G), "g", True, False, True),
        (allowed("auto"), "", False, False, True),
    ],
)
def test_a_choice_says_what_may_and_what_must_be_called(
    choice: Any, called: str, forced: bool, once: bool, restricted: bool
) -> None:
    made = use(choice, F, G)
    assert (names(made), made.forced, made.once, made.restricted) == (called, forced, once, restricted)
    assert [[F, G][position]["function"]["name"] for position in made.positions] == list(called)


def test_parallel_tool_calls_off_means_one_call() -> None:
    assert use("auto", F, parallel=False).once
    assert use("required", F, parallel=False).once


@pytest.mark.parametrize("choice", ["required", F, allowed("auto", F)], ids=json.dumps)
def test_a_choice_that_needs_tools_is_refused_without(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"^tool_choice asks for a call, and there are no tools"):
        use(choice)


def test_required_tools_are_some() -> None:
    with pytest.raises(ValidationError, match="has the mode required and no tools"):
        use(allowed("required"), F)


class _Counted(list[Any]):
    """A list that counts the items that iterators yield."""

    num_visited = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.num_visited += 1
            yield each


def test_allowed_tools_are_found_in_one_pass_over_all() -> None:
    functions = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(64)]
    tools = _Counted(TOOLS.validate_python(functions))
    assert len(ToolUse.of(tools, CHOICE.validate_python(allowed("auto", *functions))).tools) == 64
    assert tools.num_visited <= 2 * 64


@pytest.mark.parametrize("choice", [G, allowed("auto", F, G)], ids=json.dumps)
def test_a_choice_names_tools_that_are_there(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"^tool_choice names the function 'g'; among the tools are f$"):
        use(choice, F)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "naïve", "a/b", "f\n"])
def test_a_function_name_is_of_few_characters(name: str) -> None:
    with pytest.raises(ValidationError, match="1 to 128 of the characters"):
        use("auto", {"type": "function", "function": {"name": name}})


def test_a_name_may_be_as_long_as_agents_make_those_of_mcp_tools() -> None:
    name = "mcp__plugin_" + "x" * 116
    assert use("auto", {"type": "function", "function": {"name": name}}).tools[0].function.name == name


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["array"]}, {"type": None}])
def test_arguments_are_an_object(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="its type must be object"):
        use("auto", {"type": "function", "function": {"name": "f", "parameters": parameters}})


def test_two_functions_of_a_name_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"two functions named f, the second at \[2\]"):
        use("auto", F, G, F)
