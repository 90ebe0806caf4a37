"""Tools of a request and the choice among them: `/v1/chat/completions` reads them, `/v1/responses` converts to them.

What the rest of the server asks of a choice, it asks of a `ToolUse`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from server.protocol.rules import Items, RequestModel, rule, sentence

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_NAME = 64


def _is_function_name(name: str) -> str:
    if not (1 <= len(name) <= _MAX_NAME and _NAME_CHARACTERS.issuperset(name)):
        raise rule(f"it must be 1 to {_MAX_NAME} of the characters a-z, A-Z, 0-9, _, - and .")
    return name


def _is_object_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (schema or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise sentence("is no schema of an object; its type must be object, because arguments are a JSON object")
    return schema


FunctionName: TypeAlias = Annotated[
    str, AfterValidator(_is_function_name), Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_.-]{1,64}$"})
]


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_is_object_schema)] | None = None
    """JSON schema of the arguments, an object's; default: any object."""
    strict: bool | None = None
    """Hold the arguments of every call to `parameters`, also where the model is free to call or not."""


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestModel):
    name: str


class NamedTool(RequestModel):
    """The function that must be called, or one of those that may be."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: Annotated[Items[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(RequestModel):
    """Some of the tools; the prompt shows all of them, so that it stays cached."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)
"""Whether and what the model calls; a `NamedTool` means exactly one call, of that function."""


def _names_differ(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise sentence(f"holds two functions named {name}, the second at [{index}]; give each a name of its own")
        seen.add(name)
    return tools


Tools: TypeAlias = Annotated[Items[Tool], AfterValidator(_names_differ)]
"""The tools of a request, no two of a name."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools and choice come to."""

    tools: tuple[Tool, ...]
    """Those that may be called: none with the choice `none`."""

    forced: bool = False
    """At least one call must be made."""

    once: bool = False
    """No second call may be made."""

    restricted: bool = False
    """Fewer tools may be called than the prompt shows."""

    positions: tuple[int, ...] = ()
    """Where each tool stands in the request."""

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice, parallel_tool_calls: bool = True) -> "ToolUse":
        """Raises `ValueError`, one sentence, where `choice` asks for a tool that is not there."""
        if choice == "none":
            return cls(())
        names = [tool.function.name for tool in tools]
        once = not parallel_tool_calls
        if choice == "auto":
            return cls(tuple(tools), once=once, positions=tuple(range(len(tools))))
        if not tools:
            raise ValueError("tool_choice asks for a call, and there are no tools to call; send tools with it")
        if choice == "required":
            return cls(tuple(tools), forced=True, once=once, positions=tuple(range(len(tools))))
        if isinstance(choice, NamedTool):
            wanted, forced, once = [choice], True, True
        else:
            wanted, forced = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
        positions = tuple(dict.fromkeys(_position(names, each) for each in wanted))
        allowed = tuple(tools[position] for position in positions)
        return cls(allowed, forced, once, restricted=len(allowed) < len(tools), positions=positions)


def _position(names: list[str], choice: NamedTool) -> int:
    name = choice.function.name
    if name not in names:
        raise ValueError(f"tool_choice names the function {name[:64]!r}; among the tools are {', '.join(names[:20])}")
    return names.index(name)
