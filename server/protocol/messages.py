"""The messages of a chat: what `/v1/chat/completions` and `/tokenize` read, and what chat templates see of it."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from server.protocol.rules import NO_CHANGE, Ignored, Items, RequestModel, Unsupported, sentence


class ContentPart(RequestModel):
    """A piece of a message; this release reads text only."""

    type: Literal["text", "refusal"]
    text: str = ""
    """Of a part of type text."""
    refusal: str = ""
    """Of a part of type refusal, in an assistant's message."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise sentence(f"is of type {kind[:60]}; this server reads parts of type text only")
        if kind in ("text", "refusal") and kind not in data:
            raise sentence(f"is of type {kind} and has no field {kind}; it needs one")
        return data


class FunctionCall(RequestModel):
    name: str
    arguments: str
    """JSON text; text that is no JSON object reaches the chat template as it is."""


class ToolCall(RequestModel):
    """A call that the assistant made earlier in the chat."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """As streamed calls carry it; changes nothing here."""


class Message(RequestModel):
    """One turn of the chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    """Text, or a list of text parts; only an assistant's message with tool calls may do without."""
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    """In a tool's message: the call that it answers."""
    reasoning_content: str | None = None
    """For chat templates that show earlier reasoning."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    refusal: Ignored | None = None
    annotations: Annotated[list[Any], Field(description=NO_CHANGE)] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise sentence(f"has tool_calls, which only the role assistant has, not {self.role}")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise sentence(f"has no content; a message of role {self.role} needs some")
        return self

    @property
    def text(self) -> str | None:
        """The content with its parts joined: every template reads a string, not every one a list."""
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal for part in self.content)
        return self.content if self.content is not None else self.refusal

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: plain data, with tool-call arguments as objects.

        Earlier reasoning goes under each of the names that templates look for. `thinking` is gpt-oss's, whose template
        refuses it beside content.
        """
        message = self.model_dump(exclude_none=True, include={"role", "name", "tool_calls", "tool_call_id"})
        message["content"] = self.text
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message.update(reasoning_content=reasoning, reasoning=reasoning)
            if not message["content"]:
                message["thinking"] = reasoning
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
        return message


def _parsed(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
