"""Items of `/v1/responses` as the server keeps and answers with them: messages, calls, their outputs, reasoning."""

from typing import Any, Literal, TypeAlias

import msgspec

from server.protocol.chat import TokenLogprob

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text", frozen=True):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", frozen=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal", frozen=True):
    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", frozen=True):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", frozen=True):
    text: str


MessageContent: TypeAlias = InputText | OutputText | Refusal


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True, frozen=True):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[MessageContent]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True, frozen=True):
    id: str
    call_id: str
    name: str
    arguments: str
    """JSON text of an object; cut short where `status` is `incomplete`."""
    status: ItemStatus = "completed"


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True, frozen=True):
    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True, frozen=True):
    """What the model thought, in plain text: `summary` and `encrypted_content` are never written here."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


OutputItem: TypeAlias = MessageItem | FunctionCallItem | ReasoningItem
Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class ItemList(msgspec.Struct, kw_only=True):
    """Answer to `GET /v1/responses/{id}/input_items`: a page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
