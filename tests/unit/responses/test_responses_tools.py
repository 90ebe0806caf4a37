"""`ToolTable`: the tools of a responses request as functions that the model sees, and back."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.ignored import collect
from server.responses.tools import ToolTable, flat_name
from tests.unit.responses_support import request_of

ADD: dict[str, Any] = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}
CRM: dict[str, Any] = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ADD]}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edit."}


def table_of(*tools: dict[str, Any], **fields: Any) -> ToolTable:
    return ToolTable(request_of(tools=list(tools), **fields))


def member(namespace: str, name: str) -> dict[str, Any]:
    return {**CRM, "name": namespace, "tools": [{**ADD, "name": name}]}


def names(table: ToolTable) -> list[str]:
    return [tool["function"]["name"] for tool in table.chat_tools()]


def test_members_are_shown_under_their_namespace_and_called_by_both_names() -> None:
    table = table_of(ADD, CRM)
    assert names(table) == ["add", "crm__add"]
    assert table.called("crm__add") == ("function", "crm", "add")
    assert table.called("add") == ("function", None, "add")
    assert table.flat("crm", "add") == "crm__add"
    assert table.chat_tools()[1]["function"]["description"] == "Customers.\n\nAdd."


@pytest.mark.parametrize(
    "tools",
    [
        [member("a", "b__c"), member("a__b", "c")],
        [{**ADD, "name": "crm__add"}, CRM],
        [CRM, {**ADD, "name": "crm__add"}],
        [{**CRM, "name": "n" * 64, "tools": [{**ADD, "name": "m" * 64}, {**ADD, "name": "m" * 63 + "k"}]}],
    ],
)  # fmt: skip
def test_no_two_tools_have_one_name_and_each_is_found_by_its_own(tools: list[dict[str, Any]]) -> None:
    table = table_of(*tools)
    shown = names(table)
    assert len(set(shown)) == len(shown) == 2
    assert all(len(name) <= 64 for name in shown)
    for offered in table.offered:
        assert table.called(offered.flat)[1:] == (offered.namespace, offered.tool.name)
        assert table.flat(offered.namespace, offered.tool.name) == offered.flat


def test_names_depend_on_nothing_but_the_tool() -> None:
    assert flat_name("mcp__notes", "read") == flat_name("mcp__notes__", "read") == "mcp__notes__read"
    assert flat_name("n" * 64, "a") != flat_name("n" * 64, "b")


def test_a_name_twice_is_refused_where_it_is() -> None:
    for tools in ([ADD, ADD], [ADD, {**PATCH, "name": "add"}]):
        with pytest.raises(BadRequest, match=r"two functions named add, the second at tools\[1\]"):
            table_of(*tools)
    with pytest.raises(BadRequest, match=r"named add in the namespace crm, the second at tools\[1\].tools\[0\]"):
        table_of(CRM, CRM)


def test_hosted_tools_are_left_out_and_reported() -> None:
    with collect() as ignored:
        table = table_of({"type": "web_search"}, ADD, {"type": "mcp", "server_label": "x"})
    assert names(table) == ["add"]
    assert ignored == ["tools[0] (web_search)", "tools[2] (mcp)"]


def test_tools_among_the_items_count_too() -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "additional_tools", "role": "developer", "tools": [CRM]}]
    table = table_of(ADD, input=items)
    assert names(table) == ["add", "crm__add"]
    assert table.offered[1].path == "input[1].tools[0].tools[0]"


def test_custom_tools_are_functions_of_one_string() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b+"}
    plain, bound = table_of(PATCH, {**PATCH, "name": "bound", "format": regex}).chat_tools()
    assert plain["function"]["description"] == "Edit.\n\nGive the text in `input`."
    assert plain["function"]["parameters"]["required"] == ["input"]
    assert not plain["function"]["strict"]
    assert bound["function"]["strict"]
    assert bound["function"]["parameters"]["properties"]["input"]["pattern"] == "^(a|b+)$"
    assert "a|b+" in bound["function"]["parameters"]["properties"]["input"]["description"]


def test_a_choice_names_what_the_model_sees() -> None:
    table = table_of(ADD, CRM, PATCH, {**CRM, "name": "erp", "tools": [{**ADD, "name": "ship"}]})

    def chosen(choice: dict[str, Any]) -> Any:
        return table.chat_choice(request_of(tool_choice=choice).tool_choice)

    def one(name: str) -> Any:
        return {"type": "function", "function": {"name": name}}

    assert chosen({"type": "function", "name": "add"}) == one("add")
    assert chosen({"type": "function", "name": "add", "namespace": "crm"}) == one("crm__add")
    assert chosen({"type": "function", "name": "ship"}) == one("erp__ship")
    assert chosen({"type": "custom", "name": "patch"}) == one("patch")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "crm"}, PATCH_CHOICE]}
    assert chosen(allowed)["allowed_tools"] == {"mode": "auto", "tools": [one("crm__add"), one("patch")]}
    assert chosen({"type": "namespace", "name": "crm"})["allowed_tools"]["mode"] == "required"
    for wrong in ({"type": "function", "name": "patch"}, {"type": "custom", "name": "add"}):
        with pytest.raises(BadRequest, match="among the tools are add, crm__add, patch, erp__ship"):
            chosen(wrong)


def test_hosted_tools_that_are_allowed_are_left_out_too() -> None:
    hosted = {"type": "web_search"}

    def chosen(*tools: dict[str, Any]) -> Any:
        choice = {"type": "allowed_tools", "mode": "required", "tools": list(tools)}
        return table_of(ADD, hosted).chat_choice(request_of(tool_choice=choice).tool_choice)

    with collect() as ignored:
        allowed = chosen(hosted, {"type": "function", "name": "add"})["allowed_tools"]
    assert [tool["function"]["name"] for tool in allowed["tools"]] == ["add"]
    assert ignored == ["tools[1] (web_search)", "tool_choice.tools[0] (web_search)"]
    with pytest.raises(BadRequest, match="allows only tools that this server does not have"):
        chosen(hosted)


PATCH_CHOICE = {"type": "custom", "name": "patch"}


def test_errors_name_the_tool_where_the_request_has_it() -> None:
    table = table_of({"type": "web_search"}, CRM)
    assert table.with_paths("tools[0].function.parameters cannot be followed") == (
        "tools[1].tools[0].parameters cannot be followed"
    )
