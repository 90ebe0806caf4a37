"""Tools and tool choice: the fields of a request that declare them, and `ToolUse`, the calls that they allow.

`/v1/responses` and `/v1/messages` convert their tools to these. Dialects and grammars of tool calls read `ToolUse`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.schemas.body import (
    Items,
    RequestModel,
    rule,
    sentence,
)
from server.schemas.generation import TextFormat

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_NAME = 128
"""As at Anthropic and in responses. OpenAI's chat completions allow 64, but names of MCP tools are longer."""


def _is_function_name(name: str) -> str:
    if not (1 <= len(name) <= _MAX_NAME and _NAME_CHARACTERS.issuperset(name)):
        raise rule(f"it must be 1 to {_MAX_NAME} of the characters a-z, A-Z, 0-9, _, - and .")
    return name


def _is_object_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (schema or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise sentence("is not the schema of an object; its type must be object, because arguments are a JSON object")
    return schema


FunctionName: TypeAlias = Annotated[
    str, AfterValidator(_is_function_name), Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_.-]{1,128}$"})
]


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_is_object_schema)] | None = None
    """JSON schema of the arguments, which form an object; default: any object."""
    strict: bool | None = None
    """Constrain the arguments of every call to `parameters`, also if the model may choose whether to call."""


class FunctionTool(RequestModel):
    """A function that the model may call."""

    object_path = "tools[]."

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        return self.model_dump(exclude_unset=True)


class InputGrammar(RequestModel):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class GrammarFormat(RequestModel):
    """Text that a grammar describes."""

    type: Literal["grammar"]
    grammar: InputGrammar


class CustomDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None
    """Form of the input; default: any text."""


class CustomTool(RequestModel):
    """A tool whose input is free text. The model calls it as a function of one string, `input`."""

    object_path = "tools[]."

    type: Literal["custom"]
    custom: CustomDefinition

    @cached_property
    def function(self) -> FunctionDefinition:
        """The function that the model sees."""
        custom = self.custom
        return FunctionDefinition.model_validate(
            free_text_function(custom.name, custom.description or "", self.grammar)
        )

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the input; None: it is any text."""
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarFormat) else None

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_unset=True)}


FREE_TEXT = "input"
"""Name of the only argument of a custom tool, as the model sees it."""


class TextGrammar(Protocol):
    """The grammar of a custom tool's input, in any API."""

    @property
    def syntax(self) -> Literal["lark", "regex"]: ...

    @property
    def definition(self) -> str: ...


def free_text_function(name: str, description: str, grammar: TextGrammar | None) -> dict[str, Any]:
    """Convert a custom tool to a function of one string. A regular expression becomes the string's pattern."""
    text: dict[str, Any] = {"type": "string", "description": "The tool's input as free text."}
    if grammar is not None:
        form = "regular expression" if grammar.syntax == "regex" else "Lark grammar"
        text["description"] = f"Free text that follows this {form}:\n{grammar.definition}"
        if grammar.syntax == "regex":
            text["pattern"] = f"^({grammar.definition})$"
    return {
        "name": name,
        # Clients describe the input as bare text, but the model must write it as an argument.
        "description": f"{description}\n\nGive the text in `{FREE_TEXT}`.".lstrip(),
        "parameters": {
            "type": "object",
            "properties": {FREE_TEXT: text},
            "required": [FREE_TEXT],
            "additionalProperties": False,
        },
        "strict": "pattern" in text,
    }


def tag_of(data: Any) -> str:
    """Return the tag of a tool or call in a union. No field has a name of this form, so that errors can omit it."""
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


def known_kind(data: Any) -> Any:
    """Refuse unknown types of tools and calls, with the type in the message."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom"):
        raise sentence(f"is of type {kind[:60]}, which is not known; it must be function or custom")
    return data


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(tag_of),
    BeforeValidator(known_kind),
]
"""A tool that the model may call. `function` is the function that the model sees."""


class ToolReference(RequestModel):
    name: str


class NamedFunction(RequestModel):
    """The function that must be called, or a member of the allowed tools."""

    type: Literal["function"]
    function: ToolReference

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(RequestModel):
    """The custom tool that must be called, or a member of the allowed tools."""

    type: Literal["custom"]
    custom: ToolReference

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool: TypeAlias = NamedFunction | NamedCustomTool


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: Items[Annotated[NamedTool, Field(discriminator="type")]]
    """With mode `auto` the list may be empty: then no tool may be called."""

    @model_validator(mode="after")
    def _required_has_tools(self) -> "AllowedTools":
        if self.mode == "required" and not self.tools:
            raise sentence("has the mode required and no tools; it needs some")
        return self


class AllowedToolsChoice(RequestModel):
    """A subset of the tools. The prompt still shows all tools, so that its prefix stays cached."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)
"""Whether and which tools the model calls. A `NamedTool` means exactly one call, of that tool."""


def _names_differ(tools: list[Tool]) -> list[Tool]:
    _check_names(tool.function for tool in tools)
    return tools


def function_names_differ(functions: list[FunctionDefinition]) -> list[FunctionDefinition]:
    _check_names(functions)
    return functions


def _check_names(functions: Iterable[FunctionDefinition]) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            raise sentence(
                f"holds two functions named {function.name}, the second at [{index}]; give each a name of its own"
            )
        seen.add(function.name)


Tools: TypeAlias = Annotated[Items[Tool], AfterValidator(_names_differ)]
"""The tools of a request, with distinct names."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The calls that a request's tools and tool choice allow and require."""

    tools: tuple[Tool, ...]
    """The tools that may be called: none with the choice `none`."""

    forced: bool = False
    """Whether at least one call must be made."""

    once: bool = False
    """Whether at most one call may be made."""

    restricted: bool = False
    """Whether fewer tools may be called than the prompt shows."""

    positions: tuple[int, ...] = ()
    """Index of each of `tools` in the request."""

    free_texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Lark grammars of tools whose only argument is free text, by name, for dialects that can enforce them."""

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel_tool_calls: bool = True,
        free_texts: Mapping[str, str] | None = None,
    ) -> "ToolUse":
        """Combine tools and tool choice. Raises `ValueError` with a sentence if `choice` names an unknown tool."""
        return dataclasses.replace(cls._of(tools, choice, parallel_tool_calls), free_texts=free_texts or {})

    @classmethod
    def _of(cls, tools: Sequence[Tool], choice: ToolChoice, parallel_tool_calls: bool) -> "ToolUse":
        if choice == "none":
            return cls(())
        once = not parallel_tool_calls
        if choice == "auto":
            return cls(tuple(tools), once=once, positions=tuple(range(len(tools))))
        if not tools:
            raise ValueError("tool_choice asks for a call, and there are no tools to call; send tools with it")
        if choice == "required":
            return cls(tuple(tools), forced=True, once=once, positions=tuple(range(len(tools))))
        wanted: Sequence[NamedTool]
        if isinstance(choice, AllowedToolsChoice):
            wanted, forced = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
        else:
            wanted, forced, once = [choice], True, True
        positions = tuple(dict.fromkeys(_positions(tools, wanted)))
        allowed = tuple(tools[position] for position in positions)
        return cls(allowed, forced, once, restricted=len(allowed) < len(tools), positions=positions)


def _positions(tools: Sequence[Tool], wanted: Iterable[NamedTool]) -> Iterator[int]:
    """Yield the index of each wanted tool. Raises `ValueError` with a sentence for an unknown tool."""
    known = {(tool.type, tool.function.name): position for position, tool in enumerate(tools)}
    for each in wanted:
        if (each.type, each.name) not in known:
            kind = "custom tool" if each.type == "custom" else "function"
            there = ", ".join(tool.function.name for tool in tools[:20])
            raise ValueError(f"tool_choice names the {kind} {each.name[:64]!r}; among the tools are {there}")
        yield known[each.type, each.name]
