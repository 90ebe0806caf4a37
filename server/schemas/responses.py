"""`/v1/responses`: the requests, with the input and the tools as clients send them.

What the server stores and answers is in `server.schemas.response_objects`.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from engine.sampling_params import MAX_LOGPROBS
from server.schemas.body import (
    NO_CHANGE,
    Between,
    FewFields,
    Ignored,
    Items,
    Metadata,
    RequestModel,
    Schema,
    Unsupported,
    rule,
    sentence,
    without_nulls,
)
from server.schemas.chat import unread_note
from server.schemas.chat_tools import FunctionName
from server.schemas.generation import INT31, JsonObjectFormat, JsonSchema, SamplingFields, TextFormat

_ItemStatus: TypeAlias = Annotated[
    Literal["in_progress", "completed", "incomplete"] | None, Field(description=NO_CHANGE)
]


_TEXTS = ("input_text", "output_text", "refusal")


def _text_part(data: Any) -> Any:
    """Refuse parts that are not text, with their type in the message."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        raise sentence(
            f"is of type {kind[:60]}; this server reads parts of type {', '.join(_TEXTS)} only, so leave it out or "
            "describe it in text"
        )
    field = "refusal" if kind == "refusal" else "text"
    if isinstance(kind, str) and data.get(field) is None:
        raise sentence(f"is of type {kind} and has no field {field}; it needs one")
    return without_nulls(data)


_Parsed: TypeAlias = Annotated[Any, Field(description=NO_CHANGE)]
"""What OpenAI's `responses.parse` and `stream` add to an answer's parts and calls."""


class InputTextPart(RequestModel):
    """A piece of text."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    """Of a part of type input_text or output_text."""
    refusal: str | None = None
    """Of a part of type refusal, in an assistant's message."""
    annotations: Annotated[list[Any] | None, Field(description=NO_CHANGE)] = None
    logprobs: Annotated[list[Any] | None, Field(description=NO_CHANGE)] = None
    parsed: _Parsed = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, FewFields, Field(description=NO_CHANGE)] = None


class UnreadPart(RequestModel):
    """A part of a tool's output that the model cannot read: it gets a note, because agents cannot leave it out."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_image", "computer_screenshot", "input_file", "input_audio", "encrypted_content"]

    @property
    def note(self) -> str:
        return unread_note(self.type)


InputPart: TypeAlias = Annotated[InputTextPart, BeforeValidator(_text_part)]


def _to_parts(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of parts")
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts: TypeAlias = Annotated[
    Items[InputPart], BeforeValidator(_to_parts, json_schema_input_type=str | list[InputTextPart])
]
"""Text, or a list of parts; read as a list."""

_UNREAD: tuple[str, ...] = get_args(UnreadPart.model_fields["type"].annotation)


def _output_part(data: Any) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    return data if isinstance(kind, str) and kind in _UNREAD else _text_part(data)


OutputPart: TypeAlias = Annotated[
    Annotated[InputTextPart | UnreadPart, Field(discriminator="type")], BeforeValidator(_output_part)
]

_OutputParts: TypeAlias = Annotated[
    Items[OutputPart], BeforeValidator(_to_parts, json_schema_input_type=str | list[InputTextPart | UnreadPart])
]
"""The output of a tool: text, or a list of parts, of which images and files are replaced by a note."""

_Caller: TypeAlias = Annotated[dict[str, Any] | None, FewFields, Field(description=NO_CHANGE)]
_Async: TypeAlias = Annotated[bool | None, Field(alias="async", description=NO_CHANGE)]


class _InputItem(RequestModel):
    """What all items share: fields of agents that have no effect here."""

    internal_chat_message_metadata_passthrough: Annotated[
        dict[str, Any] | None, FewFields, Field(description=NO_CHANGE)
    ] = None
    metadata: Annotated[dict[str, Any] | None, FewFields, Field(description=NO_CHANGE)] = None
    created_by: Annotated[str | None, Field(description=NO_CHANGE)] = None


class InputMessage(_InputItem):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    id: str | None = None
    status: _ItemStatus = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, Field(description=NO_CHANGE)] = None
    end_turn: Annotated[bool | None, Field(description=NO_CHANGE)] = None


class _InputCall(_InputItem):
    """A call of a tool that the model made earlier."""

    call_id: str
    name: str
    namespace: str | None = None
    """The namespace of the tool; default: none."""
    id: str | None = None
    status: _ItemStatus = None
    caller: _Caller = None
    async_: _Async = None


class InputFunctionCall(_InputCall):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    arguments: str
    """JSON text. Text that is not a JSON object is passed to the chat template unchanged."""
    parsed_arguments: _Parsed = None
    encrypted_function_args: Annotated[list[str] | None, Field(description=NO_CHANGE)] = None


class InputCustomCall(_InputCall):
    """A call of a custom tool that the model made earlier."""

    type: Literal["custom_tool_call"]
    input: str
    """Free text."""


class _InputCallOutput(_InputItem):
    """The result of a tool's call."""

    output: _OutputParts
    id: str | None = None
    name: str | None = None
    """Name of the tool; of no effect if there is a `call_id`."""
    namespace: str | None = None
    """Namespace of the tool; of no effect if there is a `call_id`."""
    status: _ItemStatus = None
    caller: _Caller = None


class InputFunctionCallOutput(_InputCallOutput):
    """The result of a call, or what a tool reports without a call, as Codex passes it on."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    """That of an earlier call of a function. Without it, the model sees the output as a message of the user."""

    @model_validator(mode="after")
    def _has_an_origin(self) -> "InputFunctionCallOutput":
        if self.call_id is None and self.name is None:
            raise sentence("has no call_id; it needs that of an earlier call, or the name of the tool that reports")
        return self


class InputCustomCallOutput(_InputCallOutput):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    """That of an earlier call of a custom tool."""


class InputSummary(RequestModel):
    type: Literal["summary_text"]
    text: str


class InputReasoningText(RequestModel):
    type: Literal["reasoning_text", "text"]
    text: str


class InputReasoning(_InputItem):
    """Earlier reasoning, for chat templates that show it. Without content, its summary is used."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[InputSummary] | None = None
    content: Items[InputReasoningText] | None = None
    encrypted_content: str | None = None
    """The reasoning as this server sealed it: takes the place of `content`."""
    status: _ItemStatus = None


class InputCompaction(_InputItem):
    """A summary that this server wrote and sealed when a conversation was compacted."""

    type: Literal["compaction", "compaction_summary", "context_compaction"]
    encrypted_content: str
    id: str | None = None


class InputCompactionTrigger(_InputItem):
    """As the last item: answer with a compaction item that stands for the conversation so far."""

    type: Literal["compaction_trigger"]
    id: str | None = None


class InputHostedItem(RequestModel):
    """An item of a tool that another server ran. Calls and their outputs reach the model as those of functions."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "program",
        "program_output",
        "agent_message",
        "configuration_update",
    ]
    id: str | None = None


class InputReference(_InputItem):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = "item_reference"
    id: str


_HOSTED_ITEMS: tuple[str, ...] = get_args(InputHostedItem.model_fields["type"].annotation)
_COMPACTIONS: tuple[str, ...] = get_args(InputCompaction.model_fields["type"].annotation)
_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
    *_COMPACTIONS,
    "compaction_trigger",
    "additional_tools",
    "tool_search_output",
    *_HOSTED_ITEMS,
)


def _kind(data: Any) -> str:
    """The type of an item; messages and references may leave it out."""
    kind = data.get("type")
    if kind is None:
        kind = "item_reference" if "id" in data and "role" not in data else "message"
    return _TAGS.get(kind, str(kind))


_TAGS = {
    **dict.fromkeys(_HOSTED_ITEMS, "hosted"),
    **dict.fromkeys(_COMPACTIONS, "compaction"),
    "tool_search_output": "additional_tools",
}


def _known_item(data: Any) -> Any:
    if not isinstance(data, dict):
        raise rule("it must be an object")
    kind = data.get("type", "message")
    if kind is not None and not isinstance(kind, str):
        raise sentence("has a type that is not a string; it must be one")
    if kind is not None and kind not in _KINDS:
        raise sentence(f"is of type {kind[:60]}; this server reads items of type {', '.join(_KINDS)} only")
    return without_nulls(data)


# -- tools ----------------------------------------------------------------------------------------------------------


class _CallableTool(RequestModel):
    """What functions and custom tools share: fields that have no effect here."""

    defer_loading: Annotated[bool | None, Field(description=NO_CHANGE)] = None
    allowed_callers: Annotated[list[str] | None, Field(description=NO_CHANGE)] = None
    async_: _Async = None


class FunctionTool(_CallableTool):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    """JSON schema of the arguments, an object's; default: any object."""
    strict: bool | None = None
    """Constrain the arguments of every call to `parameters`; default: false."""
    output_schema: Annotated[Schema | None, Field(description=NO_CHANGE)] = None


class FreeText(RequestModel):
    """Any text."""

    type: Literal["text"]


class GrammarInput(RequestModel):
    """Text that a grammar describes."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class CustomTool(_CallableTool):
    """A tool whose input is free text. The model calls it as a function of one string, `input`."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[FreeText | GrammarInput, Field(discriminator="type")] | None = None
    """Form of the input; default: any text."""


class NamespaceTool(RequestModel):
    """A group of tools. The model sees each as `namespace__name`; calls are answered with `namespace` and `name`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Items[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


class HostedTool(RequestModel):
    """A tool that only OpenAI's servers or another client run: accepted, left out and named in `x-kaon-ignored`."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "computer",
        "computer_use",
        "computer_use_preview",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "mcp",
        "programmatic_tool_calling",
    ]


_HOSTED_TOOLS: tuple[str, ...] = get_args(HostedTool.model_fields["type"].annotation)
_TOOLS = ("function", "custom", "namespace", *_HOSTED_TOOLS)


def _known_tool(data: Any) -> Any:
    """Refuse tools of an unknown type, with the type in the message."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in _TOOLS:
        raise sentence(f"is of type {kind[:60]}, which is not known; it must be one of {', '.join(_TOOLS)}")
    return data


ResponseTool: TypeAlias = Annotated[
    Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, Field(discriminator="type")],
    BeforeValidator(_known_tool),
]


class InputTools(_InputItem):
    """Further tools, which count as if they were in `tools` of the same request."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Items[ResponseTool]
    role: Literal["developer"] | None = None
    id: str | None = None
    call_id: Annotated[str | None, Field(description=NO_CHANGE)] = None
    execution: Annotated[str | None, Field(description=NO_CHANGE)] = None
    status: _ItemStatus = None


# -- input ----------------------------------------------------------------------------------------------------------


InputItem: TypeAlias = Annotated[
    Annotated[
        Annotated[InputMessage, Tag("message")]
        | Annotated[InputFunctionCall, Tag("function_call")]
        | Annotated[InputFunctionCallOutput, Tag("function_call_output")]
        | Annotated[InputCustomCall, Tag("custom_tool_call")]
        | Annotated[InputCustomCallOutput, Tag("custom_tool_call_output")]
        | Annotated[InputReasoning, Tag("reasoning")]
        | Annotated[InputReference, Tag("item_reference")]
        | Annotated[InputCompaction, Tag("compaction")]
        | Annotated[InputCompactionTrigger, Tag("compaction_trigger")]
        | Annotated[InputTools, Tag("additional_tools")]
        | Annotated[InputHostedItem, Tag("hosted")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known_item),
]


def _to_items(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_AnyInput: TypeAlias = Annotated[
    Items[InputItem],
    BeforeValidator(
        _to_items,
        json_schema_input_type=str
        | list[
            InputMessage
            | InputFunctionCall
            | InputFunctionCallOutput
            | InputCustomCall
            | InputCustomCallOutput
            | InputReasoning
            | InputReference
            | InputCompaction
            | InputCompactionTrigger
            | InputTools
            | InputHostedItem
        ],
    ),
]
Input: TypeAlias = Annotated[_AnyInput, Field(min_length=1)]
"""A user's text, or a list of items; read as a list."""


# -- requests -------------------------------------------------------------------------------------------------------

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary: TypeAlias = Literal["auto", "concise", "detailed"]
Includable: TypeAlias = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _only(value: int | bool) -> BeforeValidator:
    """Accepts only `value`. A literal type would also accept false for 0 and true for 1."""

    def check(given: Any) -> Any:
        if type(given) is not type(value) or given != value:
            raise rule(f"it must be {json.dumps(value)}")
        return given

    return BeforeValidator(check)


class FunctionChoice(RequestModel):
    """The function that must be called, or one of those that may be."""

    type: Literal["function"]
    name: str
    namespace: str | None = None
    """Default: the function without a namespace or, if there is none, the only one of that name."""


class CustomChoice(RequestModel):
    """The custom tool that must be called, or one of those that may be."""

    type: Literal["custom"]
    name: str
    namespace: str | None = None


class NamespaceChoice(RequestModel):
    """All tools of a namespace, of which one must or may be called."""

    type: Literal["namespace"]
    name: str


NamedChoice: TypeAlias = FunctionChoice | CustomChoice | NamespaceChoice


def _callable_choice(data: Any) -> Any:
    """Refuse choices that this server cannot make, with their type in the message."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "namespace"):
        raise sentence(
            f"is of type {kind[:60]}, a tool that this server does not have; it must name a function, a custom tool "
            "or a namespace"
        )
    return data


def _allowed_choice(data: Any) -> Any:
    kind = data.get("type") if isinstance(data, dict) else None
    return data if isinstance(kind, str) and kind in _HOSTED_TOOLS else _callable_choice(data)


AllowedTool: TypeAlias = Annotated[
    Annotated[NamedChoice | HostedTool, Field(discriminator="type")], BeforeValidator(_allowed_choice)
]


class AllowedFunctions(RequestModel):
    """Some of the tools; the prompt shows all of them. Tools of hosted services are left out."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[AllowedTool], Field(min_length=1)]


def _is_choice(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise rule("it must be 'none', 'auto' or 'required', or an object that names functions")
        return value
    if not isinstance(value, dict):
        raise rule("it must be 'none', 'auto' or 'required', or an object that names functions")
    return value if value.get("type") == "allowed_tools" else _callable_choice(value)


ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedChoice | AllowedFunctions, Field(discriminator="type")],
    BeforeValidator(_is_choice),
]


class JsonSchemaText(JsonSchema):
    """JSON text that a schema describes."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class TextConfig(RequestModel):
    """Form of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Field(description=NO_CHANGE)] = None


class ReasoningConfig(RequestModel):
    """How the model reasons before it answers."""

    effort: Effort | None = None
    """Given to the chat template as `reasoning_effort`; `none` also turns `enable_thinking` off."""
    max_tokens: Annotated[int, Between(0, INT31)] | None = None
    """Most tokens of reasoning, which is closed after them. Not OpenAI's."""
    summary: Annotated[Summary | None, Field(description=NO_CHANGE)] = None
    generate_summary: Annotated[Summary | None, Field(description=NO_CHANGE)] = None
    context: Annotated[Literal["auto", "current_turn", "all_turns"] | None, Field(description=NO_CHANGE)] = None
    mode: Annotated[str | None, Field(description=NO_CHANGE)] = None


class ResponsesRequest(SamplingFields):
    """Body of `POST /v1/responses`."""

    input_field = "input"

    input: Input
    """What the model answers."""

    instructions: str | None = None
    """A system message before everything else; that of an earlier response is not carried over."""

    previous_response_id: str | None = None
    """Continue this stored response: its input and output come before `input`."""

    max_output_tokens: Annotated[int, Between(1, INT31)] | None = None
    """Most tokens to generate, reasoning included; default: what the context has left."""

    tools: Items[ResponseTool] = []  # noqa: RUF012
    """What the model may call: functions, custom tools and namespaces of these, shown to it by its chat template.
    Tools of hosted services are left out."""

    tool_choice: ToolChoice = "auto"
    """`none` hides the tools from the model; `required`, or a function's name, makes it call one."""

    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""

    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()

    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` drops the oldest items if the context has no room for all; `disabled` answers 400."""

    store: bool = True
    """Store the response, so that it can be retrieved and continued, until the store evicts it."""

    background: bool = False
    """Answer at once, and continue to run without the client. Needs `store`."""

    include: Items[Includable] = []  # noqa: RUF012
    """`message.output_text.logprobs` reports log probabilities, `reasoning.encrypted_content` adds the reasoning in a
    sealed form; the others name parts that answers here never have."""

    top_logprobs: Annotated[int, Between(0, MAX_LOGPROBS)] | None = None
    """Report this many of the most probable alternatives with each log probability."""

    metadata: Metadata = {}  # noqa: RUF012
    """Stored with the response."""

    chat_template_kwargs: Annotated[dict[str, Any], FewFields] = {}  # noqa: RUF012
    """Further variables of the model's chat template."""

    n: Annotated[Literal[1], _only(1)] = 1
    """A response has one answer."""

    prompt_logprobs: Unsupported = None
    return_token_ids: Annotated[Literal[False], _only(False)] = False

    max_tool_calls: Annotated[int, Between(1, INT31), Field(description=NO_CHANGE)] | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    client_metadata: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    background_options: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    prompt_cache_options: Annotated[dict[str, Any], FewFields, Field(description=NO_CHANGE)] | None = None
    access_programs: Unsupported = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None

    @model_validator(mode="after")
    def _background_is_stored(self) -> "ResponsesRequest":
        if self.background and not self.store:
            raise sentence("background is true; it needs store to be true, because only the store holds its answer")
        return self

    @property
    def wants_sealed_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    @property
    def compacts(self) -> bool:
        """Whether the answer is a compaction of the conversation."""
        return bool(self.input) and isinstance(self.input[-1], InputCompactionTrigger)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or bool(self.top_logprobs)


class InputTokensRequest(ResponsesRequest):
    """Body of `POST /v1/responses/input_tokens`: a request for a response whose prompt is counted."""

    model: str = ""
    """Name of a served model; default: the first."""

    personality: Ignored | None = None


class CompactRequest(ResponsesRequest):
    """Body of `POST /v1/responses/compact`: a request for a response, in whose place the conversation is compacted."""

    input: _AnyInput = []  # noqa: RUF012
    """The conversation, or what comes after `previous_response_id`."""

    stream: Annotated[Literal[False], _only(False)] = False
    background: Annotated[Literal[False], _only(False)] = False

    @model_validator(mode="after")
    def _has_a_conversation(self) -> "CompactRequest":
        if not self.input and self.previous_response_id is None:
            raise sentence("input is missing; send the conversation to compact, or previous_response_id")
        return self

    @property
    def compacts(self) -> bool:
        return True
