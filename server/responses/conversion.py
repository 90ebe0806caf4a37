"""From a responses request and its conversation to the chat that the model answers.

`prepare` converts the items and prepares the chat; with `truncation`, it drops the oldest items until the chat fits.
Errors of the chat are reported with the names that the fields have in a response.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from engine.text.io_processor import DoesNotFit
from server.errors import BadRequest
from server.frontend import Frontend
from server.limits.keys import Owner
from server.request_builder import PreparedChat, check_request_limits, prepare_chat
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.generation import SamplingFields
from server.schemas.responses import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)

Message: TypeAlias = dict[str, Any]

_SHARED = set(SamplingFields.model_fields) - {"n"}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
"""Names of fields: in a chat, in a response."""
_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")
"""A tool's fields are one level deeper in a chat."""
_LIMIT = re.compile(r"\bmax_tokens\b")
"""An older name in chats, which responses do not have."""


async def prepare(request: ResponsesRequest, items: Sequence[Item], frontend: Frontend, owner: Owner) -> PreparedChat:
    """The chat for `request`, whose conversation is `items`. Raises `BadRequest`."""
    messages = to_messages(items)
    instructions: list[Message] = []
    if request.instructions is not None:
        instructions.append({"role": "system", "content": request.instructions})
    try:
        return await _prepare(request, instructions + messages, frontend, owner)
    except BadRequest as error:
        if request.truncation == "disabled" or not isinstance(error.__cause__, DoesNotFit):
            raise with_responses_field_names(error) from error
        reason = error
    return await _prepare_truncated(request, instructions, messages, frontend, owner, reason)


async def _prepare(
    request: ResponsesRequest, messages: list[Message], frontend: Frontend, owner: Owner
) -> PreparedChat:
    chat = to_chat(request, messages)
    check_request_limits(chat, frontend)
    return await prepare_chat(chat, frontend, owner)


async def _prepare_truncated(
    request: ResponsesRequest,
    instructions: list[Message],
    messages: list[Message],
    frontend: Frontend,
    owner: Owner,
    reason: BadRequest,
) -> PreparedChat:
    """The longest end of the chat that fits, found by bisection. `reason`: why the whole chat does not fit."""
    model = frontend.loaded
    starts = _starts(messages, model.max_model_len * model.processor.tokenizer.longest_token)
    fitting: PreparedChat | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        try:
            fitting = await _prepare(request, instructions + messages[starts[middle] :], frontend, owner)
            high = middle
        except BadRequest as error:
            if not isinstance(error.__cause__, DoesNotFit):
                raise with_responses_field_names(error) from error
            reason, low = error, middle + 1
    if fitting is None:
        raise with_responses_field_names(reason) from reason
    return fitting


def _starts(messages: list[Message], most_characters: int) -> list[int]:
    """Indices where a truncated chat may begin: not at a call's output, nor where too many characters follow to fit.

    The last candidate is included in any case.
    """
    starts: list[int] = []
    characters = 0
    for index in range(len(messages) - 1, 0, -1):
        characters += len(messages[index]["content"] or "")
        if characters > most_characters and starts:
            break
        if messages[index]["role"] != "tool":
            starts.append(index)
    return starts[::-1]


def to_chat(request: ResponsesRequest, messages: list[Message]) -> ChatCompletionRequest:
    """`request` as a chat request. Raises `BadRequest` for what a chat refuses."""
    data: dict[str, Any] = request.model_dump(include=_SHARED, exclude_unset=True, by_alias=True)
    data |= {
        "messages": messages,
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}
            for tool in request.tools
        ],
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "reasoning_effort": request.reasoning.effort,
        "max_completion_tokens": request.max_output_tokens,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.wants_logprobs:
        data |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return validate(data, ChatCompletionRequest, allow_unknown=False)


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, str):
        return choice
    if choice.type == "function":
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": form.model_dump(by_alias=True, exclude_none=True, exclude={"type"}),
    }


def with_responses_field_names(error: BadRequest) -> BadRequest:
    """`error` of a chat request with the names that its fields have in this endpoint."""
    text = str(error).replace("messages are not accepted: their", "input is not accepted: its")
    text = _LIMIT.sub("max_output_tokens", _FUNCTION.sub(r"\1", text))
    param = error.param and _FUNCTION.sub(r"\1", error.param)
    for chat, responses in _NAMES.items():
        text = text.replace(chat, responses)
        if param is not None and param.startswith(chat):
            param = responses + param.removeprefix(chat)
    renamed = BadRequest(text, param=param)
    renamed.code = error.code
    return renamed


def to_messages(items: Iterable[Item]) -> list[Message]:
    """The conversation as a chat. Reasoning, text and calls of one turn become one assistant's message.

    Raises `BadRequest` for the output of a call that is not in the conversation.
    """
    messages: list[Message] = []
    turn: Message | None = None
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, FunctionCallOutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            turn = None
            messages.append(_input_message(item, names))
            continue
        if turn is None or _starts_new_turn(item, turn):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if isinstance(item, ReasoningItem):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
        elif isinstance(item, FunctionCallItem):
            names[item.call_id] = item.name
            function = {"name": item.name, "arguments": item.arguments}
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            turn["content"] = item.text
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _starts_new_turn(item: Item, turn: Message) -> bool:
    """Whether `item` cannot follow in `turn`, whose order is reasoning, text, calls."""
    if isinstance(item, ReasoningItem):
        return turn["content"] is not None or "tool_calls" in turn
    return isinstance(item, MessageItem) and (turn["content"] is not None or "tool_calls" in turn)


def _input_message(item: MessageItem | FunctionCallOutputItem, names: dict[str, str]) -> Message:
    """A message that is not the model's."""
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": item.text}
    if item.call_id not in names:
        raise BadRequest(
            f"input holds the output of the function call {item.call_id[:60]!r}, and no function_call with this "
            "call_id comes before it",
            param="input",
        )
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": item.output}
