"""`/v1/chat/completions`: the request, and the answer whole. Chunks of a stream are written by `server.sse`."""

import json
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, model_validator

from server.protocol.common import INT31, Logprobs, SamplingFields, Usage
from server.protocol.rules import (
    NO_CHANGE,
    Between,
    FewFields,
    Ignored,
    Items,
    RequestModel,
    Unsupported,
    rule,
    sentence,
)

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


class TextPart(RequestModel):
    """A piece of a message; this release reads text only."""

    type: Literal["text"]
    text: str


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
    content: str | Items[TextPart] | None = None
    """Text, or a list of text parts; only an assistant's message with tool calls may do without."""
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    """In a tool's message: the call that it answers."""
    reasoning_content: str | None = None
    """For chat templates that show earlier reasoning."""
    refusal: Ignored | None = None
    annotations: Annotated[list[Any], Field(description=NO_CHANGE)] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise sentence(f"has tool_calls, which only the role assistant has, not {self.role}")
        if self.content is None and not self.tool_calls:
            raise sentence(f"has no content; a message of role {self.role} needs some")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: plain data, with tool-call arguments as objects."""
        message = self.model_dump(exclude_none=True)
        message["content"] = self._text()
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
        return message

    def _text(self) -> str | None:
        """The content with its parts joined: every template reads a string, not every one a list."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content


def _parsed(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


class FunctionDefinition(RequestModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(RequestModel):
    """Form of the answer; this release generates free text only."""

    type: Literal["text"]


def _not_stored(value: bool) -> bool:
    if value:
        raise rule("it must be false, because this server stores no answers")
    return value


def _no_reserved_names(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(_RESERVED & value.keys()):
        raise rule(f"it must not set {', '.join(reserved)}, which the request itself sets")
    return value


class ChatCompletionRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    """The chat so far, oldest first."""

    max_completion_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Most tokens to generate; default: what the context has left."""

    max_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Older name of `max_completion_tokens`, which wins where both are set."""

    logprobs: bool = False
    """Report the log probability of each token."""

    top_logprobs: Logprobs | None = None
    """With `logprobs`: report this many likeliest alternatives too."""

    tools: Items[Tool] = []  # noqa: RUF012
    """Shown to the model through its chat template. Its calls are passed on as the text that it writes."""

    tool_choice: Literal["none", "auto"] = "auto"
    """`none` hides the tools from the model. Forcing a call is not supported."""

    parallel_tool_calls: Annotated[bool, Field(description=NO_CHANGE)] = True
    response_format: ResponseFormat | None = None
    """Only `{"type": "text"}` is supported."""

    add_generation_prompt: bool = True
    """End the prompt with the beginning of an assistant's turn."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_no_reserved_names)] = {}  # noqa: RUF012
    """Further variables of the model's chat template."""

    modalities: Items[Literal["text"]] | None = None
    store: Annotated[bool, AfterValidator(_not_stored)] = False
    metadata: Annotated[dict[str, str], FewFields, Field(description=NO_CHANGE)] | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _logprobs_on(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise sentence(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None: what the context has left."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report log probabilities of; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of an answer, one entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
