"""`ToolTable`: maps the tools of a responses request to the functions that the model sees, and back.

A member of a namespace becomes `namespace__name`, a custom tool a function with one string parameter `input`. Hosted
tools are ignored.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from server.errors import BadRequest
from server.ignored import ignore
from server.schemas.body import MAX_ITEMS
from server.schemas.chat_tools import free_text_function
from server.schemas.responses import (
    AllowedFunctions,
    CustomTool,
    FunctionTool,
    GrammarInput,
    HostedTool,
    InputTools,
    NamedChoice,
    NamespaceTool,
    ResponsesRequest,
    ResponseTool,
    ToolChoice,
)

_MAX_NAME = 64
_HASH_CHARACTERS = 8


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool that the model sees, of at most 64 characters if it is a member of a namespace."""
    if namespace is None:
        return name
    flat = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    if len(flat) <= _MAX_NAME:
        return flat
    digest = hashlib.blake2b(f"{namespace}\0{name}".encode(), digest_size=_HASH_CHARACTERS // 2).hexdigest()
    return f"{flat[: _MAX_NAME - _HASH_CHARACTERS - 1]}_{digest}"


class OfferedTool(NamedTuple):
    """A tool that the model may call, with its name in the prompt."""

    tool: FunctionTool | CustomTool
    namespace: str | None
    flat: str
    """Its name as the model sees it, unique within a request."""
    path: str
    """Its path in the request: `tools[3].tools[0]`."""
    introduction: str
    """The description of its namespace if it is the first member, else empty."""


class Called(NamedTuple):
    """The tool that a called name belongs to."""

    kind: Literal["function", "custom"]
    namespace: str | None
    name: str


class ToolTable:
    """The tools of one request."""

    def __init__(self, request: ResponsesRequest) -> None:
        """Hosted tools are reported as ignored. Raises `BadRequest` for two tools with the same name, and for too many
        tools."""
        self.offered: list[OfferedTool] = []
        self._by_flat: dict[str, OfferedTool] = {}
        self._flat: dict[tuple[str | None, str], str] = {}
        self._of_namespace: dict[str | None, list[OfferedTool]] = {}
        self._of_name: dict[tuple[str, str], list[OfferedTool]] = {}
        """By the types and names of tools."""
        for each in _offered(request):
            if len(self.offered) == MAX_ITEMS:
                raise BadRequest(
                    f"{each.path} is one tool too many; tools and namespaces may hold {MAX_ITEMS} in all",
                    param="tools",
                )
            key = each.namespace, each.tool.name
            if key in self._flat:
                whose = "" if each.namespace is None else f" in the namespace {each.namespace}"
                raise BadRequest(
                    f"tools holds two functions named {each.tool.name}{whose}, the second at {each.path}; give each "
                    "a name of its own",
                    param="tools",
                )
            self._flat[key] = each.flat
            self._by_flat[each.flat] = each
            self.offered.append(each)
            self._of_namespace.setdefault(each.namespace, []).append(each)
            self._of_name.setdefault((each.tool.type, each.tool.name), []).append(each)

    def flat(self, namespace: str | None, name: str) -> str:
        """Return the name of a tool in the prompt, also for a tool that only an earlier turn had."""
        return self._flat.get((namespace, name)) or flat_name(namespace, name)

    def called(self, flat: str) -> Called:
        """Return the tool that the model called. An unknown name is taken for a function, so that the client reports
        it."""
        offered = self._by_flat.get(flat)
        if offered is None:
            return Called("function", None, flat)
        kind: Literal["function", "custom"] = "custom" if isinstance(offered.tool, CustomTool) else "function"
        return Called(kind, offered.namespace, offered.tool.name)

    def chat_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the chat request."""
        return [{"type": "function", "function": _function(each)} for each in self.offered]

    def chat_choice(self, choice: ToolChoice) -> Any:
        """Return the tool choice of the chat request. Raises `BadRequest` for an unknown tool."""
        if isinstance(choice, str):
            return choice
        if isinstance(choice, AllowedFunctions):
            names, mode = self._allowed(choice), str(choice.mode)
        else:
            names, mode = self._chosen(choice), "required"
            if choice.type != "namespace":
                return {"type": "function", "function": {"name": names[0]}}
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    def _allowed(self, choice: AllowedFunctions) -> list[str]:
        names: list[str] = []
        seen: set[tuple[str, str, str | None]] = set()
        for index, each in enumerate(choice.tools):
            if isinstance(each, HostedTool):
                ignore(f"tool_choice.tools[{index}] ({each.type})")
            elif (key := (each.type, each.name, getattr(each, "namespace", None))) not in seen:
                seen.add(key)
                names += self._chosen(each)
        if not names:
            raise BadRequest(
                "tool_choice allows only tools that this server does not have; name a function, a custom tool or a "
                "namespace",
                param="tool_choice",
            )
        return list(dict.fromkeys(names))

    def _chosen(self, choice: NamedChoice) -> list[str]:
        """Return the names, as the model sees them, of the tools that `choice` names."""
        if choice.type == "namespace":
            names = [each.flat for each in self._of_namespace.get(choice.name, ())]
        else:
            same = self._of_name.get((choice.type, choice.name), [])
            names = [each.flat for each in same if each.namespace == choice.namespace]
            if not names and choice.namespace is None and len(same) == 1:
                names = [same[0].flat]
        if names:
            return names
        if not self.offered:
            raise BadRequest(
                "tool_choice asks for a call, and there are no tools to call; send tools with it", param="tool_choice"
            )
        there = ", ".join(each.flat for each in self.offered[:20])
        what = choice.name[:_MAX_NAME]
        raise BadRequest(
            f"tool_choice names the {choice.type} {what!r}; among the tools are {there}", param="tool_choice"
        )

    def with_paths(self, text: str) -> str:
        """Replace the paths of chat tools in the error `text` by those of the responses request."""
        return _CHAT_PATH.sub(self._path, text)

    def _path(self, match: re.Match[str]) -> str:
        position = int(match[1])
        return self.offered[position].path if position < len(self.offered) else f"tools[{position}]"


_CHAT_PATH = re.compile(r"\btools\[(\d+)\](?:\.function\b)?")


def _offered(request: ResponsesRequest) -> Iterator[OfferedTool]:
    listed = [(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)]
    for number, item in enumerate(request.input):
        if isinstance(item, InputTools):
            listed += [(f"input[{number}].tools[{index}]", tool) for index, tool in enumerate(item.tools)]
    taken = {tool.name for _, tool in listed if isinstance(tool, FunctionTool | CustomTool)}
    numbers: dict[str, int] = {}
    for path, tool in listed:
        if isinstance(tool, HostedTool):
            ignore(f"{path} ({tool.type})")
        elif isinstance(tool, NamespaceTool):
            yield from _members(path, tool, taken, numbers)
        else:
            yield OfferedTool(tool, None, tool.name, path, "")


def _members(path: str, namespace: NamespaceTool, taken: set[str], numbers: dict[str, int]) -> Iterator[OfferedTool]:
    """`taken` has the names so far. `numbers` has the last number that was appended to each beginning of a name."""
    introduction = f"{namespace.description}\n\n" if namespace.description else ""
    for index, tool in enumerate(namespace.tools):
        flat = flat_name(namespace.name, tool.name)
        beginning = flat[: _MAX_NAME - 5]
        while flat in taken:
            numbers[beginning] = numbers.get(beginning, 1) + 1
            flat = f"{beginning}_{numbers[beginning]}"
        taken.add(flat)
        yield OfferedTool(tool, namespace.name, flat, f"{path}.tools[{index}]", introduction)
        introduction = ""


def _function(offered: OfferedTool) -> dict[str, Any]:
    """Convert a tool to a function of a chat, with the fields that the request set."""
    tool = offered.tool
    if isinstance(tool, CustomTool):
        grammar = tool.format if isinstance(tool.format, GrammarInput) else None
        return free_text_function(offered.flat, offered.introduction + (tool.description or ""), grammar)
    data = tool.model_dump(exclude_unset=True, include={"description", "parameters", "strict"})
    if offered.introduction:
        data["description"] = offered.introduction + (tool.description or "")
    return {"name": offered.flat, **data}


def echoed(tool: ResponseTool) -> dict[str, Any] | None:
    """Return a tool as the response repeats it; None for an ignored tool."""
    if isinstance(tool, HostedTool):
        return None
    if isinstance(tool, NamespaceTool):
        members = [each for member in tool.tools if (each := echoed(member)) is not None]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": members}
    if isinstance(tool, CustomTool):
        form = {"type": "text"} if tool.format is None else tool.format.model_dump()
        return {"type": "custom", "name": tool.name, "description": tool.description, "format": form}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
