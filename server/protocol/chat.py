"""`/v1/chat/completions`: the request, and the answer whole. Chunks of a stream are written by `server.sse`."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, model_validator

from server.protocol.common import INT31, Logprobs, PromptLogprobs, SamplingFields, Usage
from server.protocol.messages import Message
from server.protocol.rules import (
    NO_CHANGE,
    Between,
    FewFields,
    Ignored,
    Items,
    Unsupported,
    rule,
    sentence,
)
from server.protocol.structured import ResponseFormat
from server.protocol.tools import ToolChoice, Tools

_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})


def no_reserved_names(value: dict[str, Any]) -> dict[str, Any]:
    """Validator of `chat_template_kwargs`."""
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

    tools: Tools = []  # noqa: RUF012
    """Functions that the model may call: shown to it by its chat template."""

    tool_choice: ToolChoice = "auto"
    """`none` hides the tools from the model; `required`, or a function's name, makes it call one."""

    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""

    response_format: ResponseFormat | None = None
    """Form of the answer: free text, or JSON of any shape or of a schema's, to which it is held."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Given to the chat template as `reasoning_effort`; `none` also turns `enable_thinking` off."""

    add_generation_prompt: bool = True
    """End the prompt with the beginning of an assistant's turn."""

    continue_final_message: bool = False
    """Go on with the last message, an assistant's, instead of beginning a turn."""

    echo: bool = False
    """With `continue_final_message`: begin the answer with the message that it continues."""

    add_special_tokens: bool = False
    """Put around the rendered chat what the model's tokenizer puts around a text; most templates write it already."""

    chat_template: str | None = None
    """A template in place of the model's; only with `--trust-request-chat-template`."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(no_reserved_names)] = {}  # noqa: RUF012
    """Further variables of the model's chat template."""

    modalities: Items[Literal["text"]] | None = None
    store: Annotated[bool, Field(description=NO_CHANGE)] = False
    metadata: Annotated[dict[str, str], FewFields, Field(description=NO_CHANGE)] | None = None
    prediction: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    verbosity: Literal["medium"] | None = None
    """Only OpenAI's default, which changes nothing here."""
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _logprobs_on(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise sentence(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> "ChatCompletionRequest":
        if self.continue_final_message:
            last = self.messages[-1]
            if last.role != "assistant" or not last.text:
                raise sentence("continue_final_message is true; the last message must be an assistant's, with content")
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise sentence("add_generation_prompt is true; with continue_final_message no new turn is begun")
        elif self.echo:
            raise sentence("echo is true; a chat has only an answer to echo with continue_final_message")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template sees besides messages and tools; `chat_template_kwargs` wins."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                variables["enable_thinking"] = False
        return {**variables, **self.chat_template_kwargs}

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


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON text of an object; cut short where `finish_reason` is `length`."""


class AnsweredToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str | None
    """Null where there are only tool calls."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[AnsweredToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """What the model thought before it answered."""
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same under its other name."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    """The stop string, or the id of the stop token, that ended the text."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
