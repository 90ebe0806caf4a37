"""`/v1/responses`: the items that the server stores, and its answers.

`server.responses.store` makes stored items from the input, and `server.responses.rendering` those of an answer, with
the events of a stream. The requests are in `server.schemas.responses`.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from server.schemas.chat import TokenLogprob

# -- items ----------------------------------------------------------------------------------------------------------

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


# The garbage collector does not visit these items (`gc=False`), which form no cycles, nor tuples of them. Its full
# collections hold the interpreter's lock, and took 36 ms for 24 stored responses of 2000 items each.


class InputText(msgspec.Struct, tag_field="type", tag="input_text", frozen=True, gc=False):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", frozen=True, gc=False):
    text: str
    annotations: tuple[Any, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class Refusal(msgspec.Struct, tag_field="type", tag="refusal", frozen=True, gc=False):
    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", frozen=True, gc=False):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", frozen=True, gc=False):
    text: str


MessageContent: TypeAlias = InputText | OutputText | Refusal


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True, frozen=True, gc=False):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: tuple[MessageContent, ...]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class _CallItem(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The namespace of the tool, if it has one."""
    status: ItemStatus = "completed"


class FunctionCallItem(_CallItem, tag_field="type", tag="function_call", kw_only=True, frozen=True, gc=False):
    arguments: str
    """JSON text of an object; truncated if `status` is `incomplete`."""


class CustomCallItem(_CallItem, tag_field="type", tag="custom_tool_call", kw_only=True, frozen=True, gc=False):
    input: str
    """Free text; truncated if `status` is `incomplete`."""


class _CallOutputItem(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The result of a tool's call."""

    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class FunctionCallOutputItem(
    _CallOutputItem, tag_field="type", tag="function_call_output", kw_only=True, frozen=True, gc=False
):
    pass


class CustomCallOutputItem(
    _CallOutputItem, tag_field="type", tag="custom_tool_call_output", kw_only=True, frozen=True, gc=False
):
    pass


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True, frozen=True, gc=False):
    """The model's reasoning as plain text: the server never writes `summary`."""

    id: str
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] = ()
    encrypted_content: str | None = None
    """The same text, sealed, where `include` asks for it: for clients that send only this back."""
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class CompactionItem(msgspec.Struct, tag_field="type", tag="compaction", kw_only=True, frozen=True, gc=False):
    """Stands for the conversation before it."""

    id: str
    encrypted_content: str
    """A summary that the model wrote, sealed."""


OutputItem: TypeAlias = MessageItem | FunctionCallItem | CustomCallItem | ReasoningItem | CompactionItem
Item: TypeAlias = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomCallItem
    | CustomCallOutputItem
    | ReasoningItem
    | CompactionItem
)


class ItemList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/responses/{id}/input_items`: a page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


# -- answers --------------------------------------------------------------------------------------------------------


class InputTokens(msgspec.Struct):
    """Answer to `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseUsageInput(msgspec.Struct):
    cached_tokens: int
    """Input tokens whose KV came from the prefix cache."""
    cache_write_tokens: int = 0


class ResponseUsageOutput(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a response's prompt and answer."""

    input_tokens: int
    input_tokens_details: ResponseUsageInput
    output_tokens: int
    output_tokens_details: ResponseUsageOutput
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct):
    message: str
    code: str = "server_error"
    """`rate_limit_exceeded` or `context_length_exceeded` where that is the reason."""


ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/responses` and `GET /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since the epoch, like `completed_at`."""
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class CompactedResponse(msgspec.Struct, kw_only=True):
    """Answer to `POST /v1/responses/compact`. `output` takes the place of the conversation in the next request."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[OutputItem]
    """The newest messages of the user, as many as fit a quarter of the context, and the compaction item."""
    usage: ResponseUsage


class DeletedResponse(msgspec.Struct):
    """Answer to `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
