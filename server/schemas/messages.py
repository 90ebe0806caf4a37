"""`/v1/messages`: the requests of Anthropic's clients, and the complete answers.

Clients send other fields from release to release. Fields without effect here are listed and ignored, all others are a
400. `server.anthropic.rendering` writes the events of a stream.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from server.schemas.body import (
    MAX_STOP_CHARACTERS,
    NO_CHANGE,
    Between,
    FewFields,
    Items,
    RequestModel,
    Schema,
    StringOrStrings,
    rule,
    sentence,
    without_nulls,
)
from server.schemas.chat_tools import FunctionName
from server.schemas.generation import INT31, ModelRequest

Hint: TypeAlias = Annotated[dict[str, Any] | None, FewFields, Field(description=NO_CHANGE)]
"""An object without effect here, with any content."""

HintList: TypeAlias = Annotated[list[Any] | None, Field(description=NO_CHANGE)]
HintAny: TypeAlias = Annotated[Any, Field(description=NO_CHANGE)]
HintText: TypeAlias = Annotated[str | None, Field(description=NO_CHANGE)]

MIN_BUDGET = 1024
"""Fewest tokens of a thinking budget, as at Anthropic."""


class _Part(RequestModel):
    """Base of objects that clients send back as they received them: null fields count as absent."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return without_nulls(data)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, with null for every field that may be missing."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        described = handler.resolve_ref_schema(schema)
        for name in described.get("properties", {}).keys() - set(described.get("required", ())):
            field = described["properties"][name]
            if {"type": "null"} not in field.get("anyOf", ()):
                outer = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                described["properties"][name] = {"anyOf": [field, {"type": "null"}], **outer}
        return schema


# -- content ----------------------------------------------------------------------------------------------------


class TextBlock(_Part):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: Hint = None
    citations: HintList = None


class ThinkingBlock(_Part):
    """Earlier reasoning, with the signature that it was answered with."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    cache_control: Hint = None


class RedactedThinkingBlock(_Part):
    """Earlier reasoning that the client does not see."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: Hint = None


class ToolUseBlock(_Part):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], FewFields, BeforeValidator(lambda value: {} if value == "" else value)]
    """An empty string, as LangChain sends it after a stream, is an empty object."""
    cache_control: Hint = None
    caller: Hint = None
    toolset_name: HintText = None


class ImageBlock(_Part):
    """An image, which this server does not support: in a tool's result it is replaced by a note, elsewhere refused."""

    type: Literal["image"]
    source: Annotated[dict[str, Any], FewFields]
    cache_control: Hint = None
    transformations: HintAny = None


class DocumentBlock(_Part):
    """A document. This server reads those whose source is text or content blocks of text."""

    type: Literal["document"]
    source: Annotated[dict[str, Any], FewFields]
    title: str | None = None
    context: str | None = None
    cache_control: Hint = None
    citations: Hint = None


class SearchResultBlock(_Part):
    """A search result of the client's own."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]
    cache_control: Hint = None
    citations: Hint = None


class ToolReferenceBlock(_Part):
    """A tool that the client's own tool search found."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Hint = None


class CompactionBlock(_Part):
    """A summary of earlier turns; shown to the model as text."""

    type: Literal["compaction"]
    content: str = ""
    cache_control: Hint = None
    encrypted_content: HintText = None
    signature: HintText = None
    tool_changes: HintList = None


class ChangedTool(_Part):
    """A tool that a change names."""

    type: Literal["tool_reference"]
    name: str


class ChangedMCPTools(_Part):
    """A tool or all tools of an MCP server. The change is ignored, because this server connects to none."""

    type: Literal["mcp_tool_reference", "mcp_toolset_reference"]
    name: HintText = None
    server_name: HintText = None


class ToolRemovalBlock(_Part):
    """From here on the model may not call the tool. The prompt still shows it, so that its prefix stays cached."""

    type: Literal["tool_removal"]
    tool: Annotated[ChangedTool | ChangedMCPTools, Field(discriminator="type")]
    cache_control: Hint = None


_HOSTED_BLOCKS = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "container_upload",
    "browser_state",
    "fallback",
)
"""Blocks of tools that run at Anthropic, in conversations that began there."""


class HostedBlock(_Part):
    """A block of a tool that runs at Anthropic. It is not part of the prompt."""

    model_config = ConfigDict(extra="ignore")

    type: str


_RESULT_BLOCKS = ("text", "image", "document", "search_result", "tool_reference", "browser_state")
_BLOCKS = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "search_result"),
    *("compaction", "tool_addition", "tool_removal", *_HOSTED_BLOCKS),
)


def _of_known_type(data: Any, known: tuple[str, ...]) -> Any:
    """Refuse a block of another type, with its type in the message."""
    if not isinstance(data, dict):
        raise rule("it must be an object")
    kind = data.get("type")
    if not isinstance(kind, str):
        raise sentence("has no type, which must be a string")
    if kind not in known:
        shown = ", ".join(each for each in known if each not in _HOSTED_BLOCKS)
        raise sentence(f"is of type {kind[:60]}; this server reads blocks of type {shown}")
    return data


def _tag(data: Any) -> str:
    """Return the tag of a block's class, in brackets, which distinguish it from a field's name in the path of an
    error."""
    kind = data["type"]
    return "<hosted>" if kind in _HOSTED_BLOCKS else f"<{kind}>"


ResultBlock: TypeAlias = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ImageBlock, Tag("<image>")]
        | Annotated[DocumentBlock, Tag("<document>")]
        | Annotated[SearchResultBlock, Tag("<search_result>")]
        | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
        | Annotated[HostedBlock, Tag("<hosted>")],
        Discriminator(_tag),
    ],
    BeforeValidator(lambda data: _of_known_type(data, _RESULT_BLOCKS)),
]


class ToolResultBlock(_Part):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    """Id of an earlier `tool_use`."""
    content: str | Items[ResultBlock] = ""
    is_error: bool = False
    """Whether the call failed: then the prompt has `The tool failed:` before the content."""
    cache_control: Hint = None
    toolset_name: HintText = None


# -- tools ------------------------------------------------------------------------------------------------------

_HOSTED_TOOLS = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "bash_",
    "text_editor_",
    "computer_",
    "memory_",
    "tool_search_tool_",
    "browser_toolset_",
    "advisor_",
    "mcp_toolset",
)
"""Prefixes of the types of tools that Anthropic defines."""


class ClientTool(_Part):
    """A tool of the client's, which the model may call."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: Schema
    """JSON schema of the call's input, which is an object."""
    strict: bool = False
    """Enforce the schema in the input of every call, also if the model may choose whether to call."""
    cache_control: Hint = None
    allowed_callers: HintList = None
    defer_loading: Annotated[bool, Field(description=f"{NO_CHANGE} The model is shown every tool.")] = False
    eager_input_streaming: Annotated[bool, Field(description=f"{NO_CHANGE} Input is always streamed.")] = False
    input_examples: HintList = None


class AnthropicTool(_Part):
    """A tool that Anthropic defines, such as `web_search_20250305` or `bash_20250124`. It is ignored."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _known_tool(data: Any) -> Any:
    if not isinstance(data, dict):
        raise rule("it must be an object")
    kind = data.get("type")
    if kind is not None and (not isinstance(kind, str) or (kind != "custom" and not kind.startswith(_HOSTED_TOOLS))):
        raise sentence(f"is of type {str(kind)[:60]}, which is not known; a tool of your own has the type custom")
    return data


Tool: TypeAlias = Annotated[
    Annotated[
        Annotated[ClientTool, Tag("<custom>")] | Annotated[AnthropicTool, Tag("<hosted>")],
        Discriminator(lambda data: "<custom>" if data.get("type") in (None, "custom") else "<hosted>"),
    ],
    BeforeValidator(_known_tool),
]


class ToolDefinition(_Part):
    """A tool that is defined in the course of the conversation."""

    type: Literal["tool_definition"]
    definition: Tool


class ToolAdditionBlock(_Part):
    """The model may call the tool: one of `tools`, or a new one. The prompt shows all tools at its beginning."""

    type: Literal["tool_addition"]
    tool: Annotated[ChangedTool | ChangedMCPTools | ToolDefinition, Field(discriminator="type")]
    cache_control: Hint = None


# -- messages ---------------------------------------------------------------------------------------------------

Block: TypeAlias = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ToolResultBlock, Tag("<tool_result>")]
        | Annotated[ImageBlock, Tag("<image>")]
        | Annotated[DocumentBlock, Tag("<document>")]
        | Annotated[SearchResultBlock, Tag("<search_result>")]
        | Annotated[CompactionBlock, Tag("<compaction>")]
        | Annotated[ToolAdditionBlock, Tag("<tool_addition>")]
        | Annotated[ToolRemovalBlock, Tag("<tool_removal>")]
        | Annotated[HostedBlock, Tag("<hosted>")],
        Discriminator(_tag),
    ],
    BeforeValidator(lambda data: _of_known_type(data, _BLOCKS)),
]
"""A block of a message's content."""


def _text_blocks(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of text blocks")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _blocks(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rule("it must be a string or a list of content blocks")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Effort: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]


class TurnConfig(_Part):
    effort: Effort | None = None
    """Given to the chat template as `reasoning_effort` for the answer to the user's message that it follows."""


class MessageParam(_Part):
    """One message. Consecutive messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    """`system`: further instructions in the course of the conversation."""
    content: Annotated[Items[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Any])] = []  # noqa: RUF012
    """Text, or a list of content blocks; read as a list."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """For a system message: with `next_user_message` the prompt leaves it out once a user message follows."""
    output_config: TurnConfig | None = None
    """For a system message: settings of its turn; `content` may then be missing."""

    @model_validator(mode="after")
    def _fields_go_with_role(self) -> "MessageParam":
        for field in ("clear_at", "output_config"):
            if getattr(self, field) is not None and self.role != "system":
                raise sentence(f"has {field}, which only the role system has, not {self.role}")
        has_settings = self.output_config is not None and self.output_config.model_fields_set
        has_none = not self.content if self.role == "system" else "content" not in self.model_fields_set
        if has_none and not has_settings:
            raise sentence("has no content; it needs some")
        return self


class ToolChoice(_Part):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    """`any` makes it call one, `tool` the one named; `none` hides the tools from it."""
    name: str | None = None
    """With type `tool`: the tool to call."""
    disable_parallel_tool_use: bool = False
    """Allow one call at most."""

    @model_validator(mode="after")
    def _name_goes_with_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise sentence("must have a name if its type is tool, and only then")
        return self


# -- requests ---------------------------------------------------------------------------------------------------


class ThinkingConfig(_Part):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    """Of a model that always reasons, `disabled` leaves the reasoning out of the answer."""
    budget_tokens: Annotated[int, Between(MIN_BUDGET, INT31)] | None = None
    """With type `enabled`: most tokens of reasoning, which is closed after them. `max_tokens` limits reasoning and
    answer together."""
    display: Literal["summarized", "omitted", "updates"] = "summarized"
    """`omitted` answers with the signature alone, which holds the reasoning for the next turn."""
    block_binding: Hint = None

    @model_validator(mode="after")
    def _enabled_has_a_budget(self) -> "ThinkingConfig":
        if self.type == "enabled" and self.budget_tokens is None:
            raise sentence("is of type enabled and has no budget_tokens; it needs some")
        return self

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"


class OutputFormat(_Part):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(_Part):
    """Form of the answer, and how much work goes into it."""

    effort: Effort | None = None
    """Given to the chat template as `reasoning_effort`."""
    format: OutputFormat | None = None
    task_budget: Hint = None


def _no_mcp_servers(value: list[Any]) -> list[Any]:
    if value:
        raise rule("it must be empty: this server connects to no MCP servers; have the client connect, and send tools")
    return value


class CountTokensRequest(ModelRequest):
    """Body of `POST /v1/messages/count_tokens`: the fields of a message request that determine its prompt."""

    input_field = "messages"

    messages: Annotated[Items[MessageParam], Field(min_length=1)]
    """The conversation so far, oldest first. A last message with the role assistant is continued."""

    system: Annotated[Items[TextBlock], BeforeValidator(_text_blocks, json_schema_input_type=str | list[Any])] = []  # noqa: RUF012
    """Instructions before the conversation: text, or a list of text blocks."""

    tools: Items[Tool] = []  # noqa: RUF012
    """Tools that the model may call: shown to it by its chat template."""

    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingConfig = ThinkingConfig(type="disabled")
    output_config: OutputConfig = OutputConfig()

    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""

    chat_template_kwargs: Annotated[dict[str, Any], FewFields] = {}  # noqa: RUF012
    """Further variables of the model's chat template. Not Anthropic's."""

    mcp_servers: Annotated[list[Any], AfterValidator(_no_mcp_servers)] = []  # noqa: RUF012
    """Must be empty: this server connects to no MCP servers; the client must, and send their tools."""

    cache_control: Hint = None
    context_management: Annotated[
        dict[str, Any] | None,
        FewFields,
        Field(
            description="`clear_thinking_20251015` that keeps `all` has the chat template show the reasoning of all "
            "earlier turns. Other edits are accepted; nothing of the conversation is cleared."
        ),
    ] = None
    speed: HintText = None
    anthropic_version: HintText = None
    anthropic_beta: HintList = None
    betas: HintList = None
    billing_policy: Hint = None
    compaction: Hint = None
    user_profile_id: HintText = None
    workspace_id: HintText = None

    @property
    def keeps_thinking(self) -> bool:
        """Whether the reasoning of all earlier turns is part of the prompt."""
        edits = (self.context_management or {}).get("edits")
        return isinstance(edits, list) and any(
            isinstance(edit, dict)
            and str(edit.get("type")).startswith("clear_thinking_")
            and edit.get("keep") in ("all", {"type": "all"})
            for edit in edits
        )


_MAX_SEQUENCES_CHARACTERS = 4 * MAX_STOP_CHARACTERS
"""Most characters of all stop sequences, as many as four stop strings of a chat may have: while text may be the
beginning of long ones, it is compared with each at each token."""


def _fit_together(value: list[str]) -> list[str]:
    if (together := sum(map(len, value))) > _MAX_SEQUENCES_CHARACTERS:
        raise rule(f"its strings may have {_MAX_SEQUENCES_CHARACTERS} characters together, and have {together}")
    return value


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Between(0, INT31)]
    """Most tokens to generate, reasoning included. 0 only caches the prompt, and
    answers without content. More than the context has left is lowered to that
    (`--max-tokens-overflow`)."""

    stop_sequences: Annotated[StringOrStrings, AfterValidator(_fit_together)] = []  # noqa: RUF012
    """End before any of these strings."""

    stream: bool = False
    """Answer with server-sent events."""

    temperature: Annotated[float, Between(0, 1)] | None = None
    """0 takes the most probable token; higher is more random.

    Default: the checkpoint's generation config, or else 1."""

    top_p: Annotated[float, Between(0, 1)] | None = None
    """Sample from the most probable tokens that together have this probability."""

    top_k: Annotated[int, Between(0, INT31)] | None = None
    """Sample from this many of the most probable tokens; 0 takes all."""

    seed: Annotated[int, Between(-(2**63), 2**63 - 1)] | None = None
    """Makes sampling reproducible. Not Anthropic's, like the next three."""

    priority: Annotated[int, Between(-INT31 - 1, INT31)] = 0
    """Requests with a lower value are served first, equal ones in order of arrival."""

    timeout: Annotated[float, Between(0, 86400, low_open=True)] | None = None
    """Seconds that the answer may take, waiting included."""

    cache_salt: str | None = None
    """Share cached prefixes only with requests that have the same salt."""

    metadata: Hint = None
    service_tier: HintText = None
    container: Annotated[str | dict[str, Any] | None, Field(description=NO_CHANGE)] = None
    diagnostics: Hint = None
    fallback_credit_token: HintAny = None
    fallbacks: HintAny = None
    inference_geo: HintText = None

    thread: Annotated[dict[str, Any] | None, FewFields] = None
    """Refused: conversations are not stored here. The error makes Anthropic's clients send them whole."""

    @model_validator(mode="after")
    def _thinking_leaves_room(self) -> "MessagesRequest":
        budget = self.thinking.budget_tokens
        if budget is not None and self.thinking.type == "enabled" and budget >= self.max_tokens:
            raise sentence(f"max_tokens is {self.max_tokens}; it must be above thinking.budget_tokens, {budget}")
        return self


# -- answers ----------------------------------------------------------------------------------------------------


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    """The input; only completely written values, if `stop_reason` is `max_tokens`."""


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of prompt and answer. The prompt is the sum of the three fields of input."""

    input_tokens: int
    """Prompt tokens that were neither read from the prefix cache nor counted as written to it."""
    cache_creation_input_tokens: int = 0
    """Newly cached prompt tokens, if the request has a `cache_control`."""
    cache_read_input_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    output_tokens: int
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET
    service_tier: Literal["standard"] = "standard"


class AppliedEdits(msgspec.Struct):
    applied_edits: list[Any] = []


class MessageAnswer(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET
    """Present if the request has one: no edit is ever applied."""


class TokenCount(msgspec.Struct):
    """Answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int
