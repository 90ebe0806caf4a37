"""`ToolTable`: the tools of a responses request as functions that the model sees, and back."""

from typing import Any

import pytest

from server.errors import BadRequest
from server.ignored import collect
from server.responses import tools
from server.responses.tools import ToolTable, flat_name
from server.schemas.responses import NamespaceTool
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
    for given in ([ADD, ADD], [ADD, {**PATCH, "name": "add"}]):
        with pytest.raises(BadRequest, match=r"two functions named add, the second at tools\[1\]"):
            table_of(*given)
    with pytest.raises(BadRequest, match=r"named add in the namespace crm, the second at tools\[1\].tools\[0\]"):
        table_of(CRM, CRM)


def test_a_name_twice_is_refused_before_further_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """434 KB of namespaces with one name took the event loop 1.3 s: each member was given a number of its own."""
    named: list[str] = []
    monkeypatch.setattr(tools, "flat_name", lambda *name: named.append(flat_name(*name)) or named[-1])
    with pytest.raises(BadRequest, match=r"the second at tools\[1\].tools\[0\]"):
        table_of(*[CRM] * 100)
    assert named == ["crm__add"] * 2


def test_numbers_of_names_go_on_where_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each name of the same beginning would count from 2 again."""
    looked_up: list[str] = []

    class Taken(set[str]):
        def __contains__(self, name: object) -> bool:
            looked_up.append(str(name))
            return super().__contains__(name)

    taken, numbers = Taken(f"n__{'a' * 60}"[:59] + f"{number:05}" for number in range(50)), dict[str, int]()
    for number in range(50):
        namespace = request_of(tools=[member("n", f"{'a' * 56}{number:05}")]).tools[0]
        assert isinstance(namespace, NamespaceTool)
        (offered,) = tools._members("tools[0]", namespace, taken, numbers)
        assert offered.flat == f"n__{'a' * 56}_{number + 2}"
    assert len(looked_up) == 100


def test_more_tools_than_a_chat_may_have_are_refused() -> None:
    many = [
        {**CRM, "name": f"n{number}", "tools": [{**ADD, "name": f"f{each}"} for each in range(300)]}
        for number in range(7)
    ]
    with pytest.raises(BadRequest, match=r"^tools\[6\].tools\[248\] is one tool too many; .* may hold 2048 in all$"):
        table_of(*many)


def test_a_tool_that_is_allowed_several_times_is_allowed_once() -> None:
    """Each time that a namespace of 1000 tools was allowed, all of its tools were listed again."""
    add, crm = {"type": "function", "name": "add"}, {"type": "namespace", "name": "crm"}
    chosen = [add, crm, {**add, "namespace": "crm"}] * 50
    request = request_of(tools=[CRM, ADD], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": chosen})
    choice = ToolTable(request).chat_choice(request.tool_choice)
    assert [each["function"]["name"] for each in choice["allowed_tools"]["tools"]] == ["add", "crm__add"]


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
