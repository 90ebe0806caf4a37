"""`/v1/chat/completions`: messages, the request, and the complete answer. Tools are in `server.schemas.chat_tools`.

`/v1/responses` and `/tokenize` convert their requests to these. `server.routes.chat` writes the chunks of a stream.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from engine.config.server import TEMPLATE_ARGUMENTS
from server.ignored import ignore
from server.schemas.body import (
    NO_CHANGE,
    Between,
    FewFields,
    Ignored,
    Items,
    Metadata,
    RequestModel,
    Unsupported,
    check_values,
    rule,
    sentence,
    without_nulls,
)
from server.schemas.chat_tools import (
    FREE_TEXT,
    FunctionDefinition,
    FunctionTool,
    NamedFunction,
    ToolChoice,
    ToolReference,
    Tools,
    function_names_differ,
    known_kind,
    tag_of,
)
from server.schemas.generation import INT31, Logprobs, PromptLogprobs, ResponseFormat, SamplingFields, Usage

# -- messages ---------------------------------------------------------------------------------------------------


class ContentPart(RequestModel):
    """A part of a message; this release supports text only."""

    object_path = "messages[].content[]."

    type: Literal["text", "refusal"]
    text: str = ""
    """Text of a part of type text."""
    refusal: str = ""
    """Text of a part of type refusal, in an assistant's message."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise sentence(
                f"is of type {kind[:60]}; this server reads parts of type text only, so leave it out or describe it "
                "in text"
            )
        if kind not in ("text", "refusal"):
            return data
        if data.get(kind) is None:
            raise sentence(f"is of type {kind} and has no field {kind}; it needs one")
        return without_nulls(data)


_UNREAD = ("image_url", "image", "input_image", "file", "input_file", "input_audio", "video_url")


def unread_note(kind: str) -> str:
    """Return the replacement in the prompt for a part of a tool's output that is not text."""
    what = kind.removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"[The output holds content of type {what} here, which cannot be shown: this model reads text only.]"


def _noted(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _UNREAD:
        return part
    ignore(f"messages[].content[] ({kind} of a tool)")
    return {"type": "text", "text": unread_note(kind)}


class FunctionCall(RequestModel):
    object_path = "messages[].tool_calls[].function."

    name: str
    arguments: str
    """JSON text. Text that is not a JSON object is passed to the chat template unchanged."""


class ToolCall(RequestModel):
    """A call of a function that the assistant made earlier in the chat."""

    object_path = "messages[].tool_calls[]."

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """As in streamed calls; changes nothing here."""

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        data = self.model_dump(exclude_none=True)
        data["function"]["arguments"] = _parsed(self.function.arguments)
        return data


class CustomCallInput(RequestModel):
    name: str
    input: str


class CustomToolCall(RequestModel):
    """A call of a custom tool that the assistant made earlier in the chat."""

    object_path = "messages[].tool_calls[]."

    id: str
    type: Literal["custom"]
    custom: CustomCallInput
    index: int | None = None
    """As in streamed calls; changes nothing here."""

    def for_template(self) -> dict[str, Any]:
        """The call of the function that represents the tool."""
        function = {"name": self.custom.name, "arguments": {FREE_TEXT: self.custom.input}}
        return {"id": self.id, "type": "function", "function": function}


class Message(RequestModel):
    """One turn of the chat."""

    object_path = "messages[]."
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    """Text, or a list of text parts; only an assistant's message may have none."""
    name: str | None = None
    tool_calls: (
        Items[
            Annotated[
                Annotated[ToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")],
                Discriminator(tag_of),
                BeforeValidator(known_kind),
            ]
        ]
        | None
    ) = None
    tool_call_id: str | None = None
    """In a tool's message: the call that it answers."""
    function_call: FunctionCall | None = None
    """Older name of the one call that an assistant made; a message of role function answers it."""
    reasoning_content: str | None = None
    """Earlier reasoning, for chat templates that show it."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    refusal: Ignored | None = None
    annotations: Annotated[list[Any], Field(description=NO_CHANGE)] | None = None
    audio: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _reads_outputs(cls, data: Any) -> Any:
        """Replace parts of a tool's output that are not text by a note: otherwise an agent could not continue."""
        if isinstance(data, dict) and data.get("role") == "tool" and isinstance(data.get("content"), list):
            return {**data, "content": [_noted(part) for part in data["content"]]}
        return data

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        for field in ("tool_calls", "function_call"):
            if getattr(self, field) and self.role != "assistant":
                raise sentence(f"has {field}, which only the role assistant has, not {self.role}")
        if self.tool_calls and self.function_call:
            raise sentence("has both tool_calls and function_call; send tool_calls")
        if self.role == "function" and self.name is None:
            raise sentence("has the role function and no name; it needs that of the function")
        if self.content is None and self.role != "assistant":
            raise sentence(f"has no content; a message of role {self.role} needs some")
        return self

    @property
    def text(self) -> str | None:
        """The content with its parts joined, because not every template reads a list."""
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal for part in self.content)
        if self.content is None and self.refusal is None and not self.tool_calls:
            # Agents send empty turns back too.
            return ""
        return self.content if self.content is not None else self.refusal

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: plain data, with tool-call arguments as objects.

        Earlier reasoning is stored under each name that templates use. `thinking` is that of gpt-oss, whose template
        refuses it next to content.
        """
        message = self.model_dump(exclude_none=True, include={"role", "name", "tool_call_id"})
        message["content"] = self.text
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message.update(reasoning_content=reasoning, reasoning=reasoning)
            if not message["content"]:
                message["thinking"] = reasoning
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _may_be_object(arguments: str) -> bool:
    return arguments.lstrip().startswith("{")


def _parsed(arguments: str) -> Any:
    if not _may_be_object(arguments):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# -- request and answer -----------------------------------------------------------------------------------------


def reasoning_switch(is_on: bool) -> dict[str, Any]:
    """The variables by which chat templates switch reasoning: `enable_thinking` (Qwen, GLM, Gemma 4 and most others),
    `thinking` (DeepSeek-V3.1, Kimi, Granite) and `reasoning` (Command A)."""
    return {"enable_thinking": is_on, "thinking": is_on, "reasoning": is_on}


def reasoning_history(is_shown: bool) -> dict[str, Any]:
    """The variables by which chat templates show the reasoning of earlier turns or leave it out: `preserve_thinking`
    (Qwen3.6 and later, Gemma 4, Kimi-K2.6), `preserved_thinking` (Hunyuan 3), `keep_past_thinking` (LFM2.5),
    `think_render_option` (Solar Open), and of the opposite meaning `clear_thinking` (GLM-4.7 and later),
    `truncate_history_thinking` (Nemotron 3), `drop_thinking` (DeepSeek-V4) and `drop_history_thinking` (GigaChat
    3.5)."""
    shown: dict[str, Any] = dict.fromkeys(("preserve_thinking", "preserved_thinking", "keep_past_thinking"), is_shown)
    shown["think_render_option"] = "all" if is_shown else "lastthink"
    dropped = ("clear_thinking", "truncate_history_thinking", "drop_thinking", "drop_history_thinking")
    return shown | dict.fromkeys(dropped, not is_shown)


def no_reserved_names(value: dict[str, Any]) -> dict[str, Any]:
    """Validator of `chat_template_kwargs`."""
    if reserved := sorted(TEMPLATE_ARGUMENTS & value.keys()):
        raise rule(f"it must not set {', '.join(reserved)}, which the request itself sets")
    return value


def _note_verbosity(value: str | None) -> str | None:
    if value not in (None, "medium"):
        ignore("verbosity")
    return value


class Thinking(RequestModel):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Between(0, INT31)] | None = None
    """Most tokens of reasoning: another name of `thinking_budget`."""
    clear_thinking: bool | None = None
    """The opposite of `preserve_thinking`, as in Z.ai's API. `preserve_thinking` takes precedence."""


_OTHER_NAMES = (("effort", "reasoning_effort"), ("enabled", "enable_thinking"), ("max_tokens", "thinking_budget"))
"""Fields of `reasoning`, and the chat's own of the same meaning."""

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _is_reported(value: bool) -> bool:
    if value:
        raise rule("reasoning is always reported, so it must be false")
    return value


class ChatReasoning(RequestModel):
    """How much the model reasons, as OpenRouter's interface writes it."""

    effort: ReasoningEffort | None = None
    """Another name of `reasoning_effort`."""
    enabled: bool | None = None
    """Another name of `enable_thinking`."""
    exclude: Annotated[bool, AfterValidator(_is_reported)] | None = None
    """Must be false: reasoning is always reported."""
    max_tokens: Annotated[int, Between(0, INT31)] | None = None
    """Another name of `thinking_budget`."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "ChatReasoning":
        if self.enabled and self.effort == "none":
            raise sentence("has enabled true and effort none; leave one of them out")
        if self.enabled is False and (self.effort not in (None, "none") or self.max_tokens):
            field = "effort" if self.effort not in (None, "none") else "max_tokens"
            raise sentence(f"has enabled false and {field} {getattr(self, field)}; leave one of them out")
        return self


class ChatCompletionRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    input_field = "messages"

    messages: Annotated[Items[Message], Field(min_length=1)]
    """The chat so far, oldest first."""

    max_completion_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Most tokens to generate; default: what the context has left."""

    max_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Older name of `max_completion_tokens`, which takes precedence if both are set."""

    logprobs: bool = False
    """Report the log probability of each token.

    An answer that is not streamed may have 4194304 of them, with those of alternatives, in all its choices; with more
    it ends with a 400.
    """

    top_logprobs: Logprobs | None = None
    """With `logprobs`: report this many of the most probable alternatives too."""

    tools: Tools = []  # noqa: RUF012
    """Functions and custom tools that the model may call: shown to it by its chat template."""

    tool_choice: ToolChoice = "auto"
    """`none` hides the tools from the model; `required`, or a function's name, makes it call one."""

    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""

    response_format: ResponseFormat | None = None
    """Form of the answer: free text, any JSON object, or JSON that a schema constrains."""

    reasoning_effort: ReasoningEffort | None = None
    """Given to the chat template as `reasoning_effort`; `none` also turns `enable_thinking` off."""

    enable_thinking: bool | None = None
    """Given to the chat template as `enable_thinking`, `thinking` and `reasoning`: templates differ in its name."""

    reasoning: ChatReasoning | None = None
    """The same and `thinking_budget`, as OpenRouter's interface writes them."""

    thinking: Thinking | None = None
    """Whether the model reasons, as Anthropic's and DeepSeek's interfaces write it: also `enable_thinking`."""

    preserve_thinking: bool | None = None
    """Whether the chat template shows the reasoning of all earlier turns (`reasoning_content`);
    default: decided by the template; most show only the reasoning since the user's last message."""

    thinking_budget: Annotated[int, Between(0, INT31)] | None = None
    """Most tokens of reasoning, which is closed after them; default: as many as the answer may have."""

    max_thinking_tokens: Annotated[int, Between(0, INT31)] | None = None
    """Another name of `thinking_budget`, which takes precedence."""

    thinking_token_budget: Annotated[int, Between(0, INT31)] | None = None
    """Another name of `thinking_budget`, which takes precedence."""

    add_generation_prompt: bool = True
    """End the prompt with the beginning of an assistant's turn."""

    continue_final_message: bool = False
    """Continue the last message, an assistant's, instead of beginning a turn."""

    echo: bool = False
    """With `continue_final_message`: begin the answer with the continued message."""

    add_special_tokens: bool = False
    """Add the tokenizer's special tokens to the rendered chat; most templates write them already."""

    chat_template: str | None = None
    """A template instead of the model's; only with `--trust-request-chat-template`."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(no_reserved_names)] = {}  # noqa: RUF012
    """Further variables of the model's chat template."""

    modalities: Items[Literal["text"]] | None = None
    store: Annotated[bool, Field(description=NO_CHANGE)] = False
    metadata: Annotated[Metadata, Field(description=NO_CHANGE)] | None = None
    prediction: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    prompt_cache_options: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, AfterValidator(_note_verbosity), Field(description=NO_CHANGE)
    ] = None
    functions: Annotated[Items[FunctionDefinition], AfterValidator(function_names_differ)] | None = None
    """Older form of `tools`; the answer then has `function_call` instead of `tool_calls`."""
    function_call: Literal["none", "auto"] | ToolReference | None = None
    """Older form of `tool_choice`."""
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _logprobs_on(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise sentence(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _reads_reasoning(self) -> "ChatCompletionRequest":
        """Copy the fields of `reasoning` to those that they are other names of."""
        for field, name in _OTHER_NAMES:
            given, own = getattr(self.reasoning, field, None), getattr(self, name)
            if given is None:
                continue
            if own not in (None, given):
                raise sentence(
                    f"{name} is {json.dumps(own)} and reasoning.{field} is {json.dumps(given)}; they mean the same, "
                    "so send one"
                )
            setattr(self, name, given)
        return self

    @model_validator(mode="after")
    def _functions_are_tools(self) -> "ChatCompletionRequest":
        """Rewrite the older fields as `tools`, `tool_choice` and messages of role tool."""
        if self.function_call is not None and self.functions is None:
            raise sentence("function_call is set; it needs functions")
        if self.functions is not None:
            if self.tools:
                raise sentence("functions and tools are both set; send tools")
            self.tools = [FunctionTool(type="function", function=each) for each in self.functions]
            self.parallel_tool_calls = False
            if isinstance(self.function_call, ToolReference):
                self.tool_choice = NamedFunction(type="function", function=self.function_call)
            elif self.function_call is not None:
                self.tool_choice = self.function_call
        id: str | None = None
        for index, message in enumerate(self.messages):
            if message.function_call is not None:
                # Some templates take ids of nine letters and digits only.
                id = f"call{index:05d}"
                message.tool_calls = [ToolCall(id=id, function=message.function_call)]
            elif message.role == "function":
                if id is None:
                    raise sentence(
                        f"messages[{index}] has the role function; before it, a message must have a function_call"
                    )
                message.role, message.tool_call_id = "tool", id
        return self

    @model_validator(mode="after")
    def _has_few_arguments(self) -> "ChatCompletionRequest":
        """Bound the number of values in the arguments of earlier calls, which are JSON within JSON."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        texts = [call.function.arguments for call in calls if isinstance(call, ToolCall)]
        objects = [text.encode(errors="replace") for text in texts if _may_be_object(text)]
        check_values(objects, subject="the JSON in the arguments of messages' tool_calls")
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
        """Variables of the chat template besides messages and tools; `chat_template_kwargs` takes precedence."""
        is_on: bool | None = None
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
        if self.enable_thinking is not None:
            is_on = self.enable_thinking
        if self.reasoning_effort == "none":
            is_on = False
        variables = {} if is_on is None else reasoning_switch(is_on)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        is_shown = self.preserve_thinking
        if is_shown is None and self.thinking is not None and self.thinking.clear_thinking is not None:
            is_shown = not self.thinking.clear_thinking
        if is_shown is not None:
            variables |= reasoning_history(is_shown)
        return {**variables, **self.chat_template_kwargs}

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None: what the context has left."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def reasoning_limit(self) -> int | None:
        """Most tokens of reasoning; None: no limit of their own."""
        of_switch = self.thinking.budget_tokens if self.thinking is not None else None
        limits = self.thinking_budget, self.max_thinking_tokens, self.thinking_token_budget, of_switch
        return next((limit for limit in limits if limit is not None), None)

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
    """Log probabilities of an answer, one entry for each token."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON text of an object; truncated if `finish_reason` is `length`."""


class AnsweredToolCall(msgspec.Struct, tag_field="type", tag="function"):
    """A call of a function that the model makes."""

    id: str
    function: CalledFunction

    @property
    def type(self) -> Literal["function"]:
        return "function"


class CalledCustomTool(msgspec.Struct):
    name: str
    input: str
    """Truncated if `finish_reason` is `length`."""


class AnsweredCustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    """A call of a custom tool that the model makes."""

    id: str
    custom: CalledCustomTool

    @property
    def type(self) -> Literal["custom"]:
        return "custom"


class AssistantMessage(msgspec.Struct, kw_only=True):
    content: str | None
    """Null if there are only tool calls."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[AnsweredToolCall | AnsweredCustomCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    """In place of `tool_calls`, if the request has `functions`."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The model's reasoning before the answer."""
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
