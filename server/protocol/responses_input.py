"""The `input` of `/v1/responses` as clients send it: text, or items of the types that this server reads."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.protocol.rules import NO_CHANGE, Items, RequestModel, rule, sentence

_ItemStatus: TypeAlias = Annotated[
    Literal["in_progress", "completed", "incomplete"] | None, Field(description=NO_CHANGE)
]


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """`data` as if what is null were absent: the official client's models write down all that they know."""
    return {name: value for name, value in data.items() if value is not None}


def _text_part(data: Any) -> Any:
    """Refuse parts that are no text, by their name."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in ("input_text", "output_text", "refusal"):
        raise sentence(
            f"is of type {kind[:60]}; this server reads parts of type input_text, output_text and refusal only"
        )
    field = "refusal" if kind == "refusal" else "text"
    if isinstance(kind, str) and data.get(field) is None:
        raise sentence(f"is of type {kind} and has no field {field}; it needs one")
    return _without_nulls(data) if isinstance(data, dict) else data


class InputTextPart(RequestModel):
    """A piece of text."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    """Of a part of type input_text or output_text."""
    refusal: str | None = None
    """Of a part of type refusal, in an assistant's message."""
    annotations: Annotated[list[Any] | None, Field(description=NO_CHANGE)] = None
    logprobs: Annotated[list[Any] | None, Field(description=NO_CHANGE)] = None


InputPart: TypeAlias = Annotated[InputTextPart, BeforeValidator(_text_part)]


def _to_parts(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of parts")
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts: TypeAlias = Annotated[
    Items[InputPart], BeforeValidator(_to_parts, json_schema_input_type=str | list[InputTextPart])
]
"""Text, or a list of parts; read as a list."""


class InputMessage(RequestModel):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    id: str | None = None
    status: _ItemStatus = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, Field(description=NO_CHANGE)] = None


class InputFunctionCall(RequestModel):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON text; text that is no JSON object reaches the chat template as it is."""
    id: str | None = None
    status: _ItemStatus = None


class InputFunctionCallOutput(RequestModel):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    """Of a function call before it."""
    output: _Parts
    id: str | None = None
    name: Annotated[str | None, Field(description=NO_CHANGE)] = None
    status: _ItemStatus = None


class InputSummary(RequestModel):
    type: Literal["summary_text"]
    text: str


class InputReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestModel):
    """What the model thought earlier; for chat templates that show it. Where there is no content, its summary is."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[InputSummary] | None = None
    content: Items[InputReasoningText] | None = None
    encrypted_content: Annotated[None, Field(description="Null: reasoning travels in `content` here.")] = None
    status: _ItemStatus = None


class InputReference(RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = "item_reference"
    id: str


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind(data: Any) -> str:
    """The type of an item, which a message and a reference may leave out."""
    kind = data.get("type")
    if kind is None:
        kind = "item_reference" if "id" in data and "role" not in data else "message"
    return str(kind)


def _known_item(data: Any) -> Any:
    if not isinstance(data, dict):
        raise rule("it must be an object")
    kind = data.get("type", "message")
    if kind is not None and not isinstance(kind, str):
        raise sentence("has a type that is no string; it must be one")
    if kind is not None and kind not in _KINDS:
        raise sentence(f"is of type {kind[:60]}; this server reads items of type {', '.join(_KINDS)} only")
    return _without_nulls(data)


InputItem: TypeAlias = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[InputFunctionCall, Tag("function_call")]
        | Annotated[InputFunctionCallOutput, Tag("function_call_output")]
        | Annotated[InputReasoning, Tag("reasoning")]
        | Annotated[InputReference, Tag("item_reference")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known_item),
]


def _to_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input: TypeAlias = Annotated[
    Items[InputItem],
    Field(min_length=1),
    BeforeValidator(
        _to_items,
        json_schema_input_type=str
        | list[InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning | InputReference],
    ),
]
"""A user's text, or a list of items; read as a list."""
