"""From the `input` of a request to the items that are kept of it. Called by `server.responses.conversion`."""

import uuid
from collections.abc import Callable, Iterable

from server.errors import BadRequest
from server.protocol.responses_input import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputItem,
    InputMessage,
    InputPart,
    InputReasoning,
    InputReference,
)
from server.protocol.responses_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageContent,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def kept_items(given: Iterable[InputItem], stored: Callable[[str], Item | None]) -> list[Item]:
    """The items of a request. `stored` finds what a reference means. Raises `BadRequest` where it finds nothing."""
    items: list[Item] = []
    for index, each in enumerate(given):
        if isinstance(each, InputReference):
            item = stored(each.id)
            if item is None:
                raise BadRequest(
                    f"input[{index}].id is {each.id[:60]!r}, and no stored response has an item of this id; "
                    "send the item itself",
                    param=f"input[{index}].id",
                )
            items.append(item)
        else:
            items.append(_kept(each))
    return items


def _kept(item: InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning) -> Item:
    if isinstance(item, InputMessage):
        id = item.id or new_id("msg")
        content = [_content(part, is_answer=item.role == "assistant") for part in item.content]
        return MessageItem(id=id, role=item.role, content=content, status=item.status or "completed")
    if isinstance(item, InputFunctionCall):
        return FunctionCallItem(
            id=item.id or new_id("fc"),
            call_id=item.call_id,
            name=item.name,
            arguments=item.arguments,
            status=item.status or "completed",
        )
    if isinstance(item, InputFunctionCallOutput):
        output = "".join(part.text or part.refusal or "" for part in item.output)
        return FunctionCallOutputItem(id=item.id or new_id("fco"), call_id=item.call_id, output=output)
    return ReasoningItem(
        id=item.id or new_id("rs"),
        summary=[SummaryText(each.text) for each in item.summary or ()],
        content=[ReasoningText(each.text) for each in item.content or ()],
    )


def _content(part: InputPart, *, is_answer: bool) -> MessageContent:
    """Text by the name that it has in a message of its role."""
    if not is_answer:
        return InputText(part.text or part.refusal or "")
    return Refusal(part.refusal or "") if part.type == "refusal" else OutputText(part.text or "")
