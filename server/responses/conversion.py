"""Converts a responses request and its conversation to the chat that the model answers.

`prepare` converts the items and prepares the chat; with `truncation`, it drops the oldest items until the chat fits.
Errors of the chat are reported with the names that the fields have in a response.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import msgspec

from engine.text.io_processor import DoesNotFit
from server.errors import BadRequest, ContextLengthExceeded
from server.frontend import Frontend
from server.ignored import ignore
from server.limits.jobs import Result
from server.limits.owners import Owner
from server.request_builder import PreparedChat, TextForm, check_request_limits, compile_text_forms, prepare_chat
from server.responses.store import Turn
from server.responses.tools import ToolTable
from server.schemas.body import validate
from server.schemas.chat import ChatCompletionRequest
from server.schemas.chat_tools import FREE_TEXT
from server.schemas.generation import SamplingFields
from server.schemas.response_objects import (
    CompactionItem,
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from server.schemas.responses import CustomTool, GrammarInput, ResponsesRequest
from server.sealing import Changed, Foreign, Kind

Message: TypeAlias = dict[str, Any]

Open: TypeAlias = Callable[[Kind, str], str]
"""Decrypts a sealed text. Raises `Foreign` and `Changed`."""


class InvalidEncryptedContent(BadRequest):
    """A sealed text was changed, belongs to another API key, or cannot be decrypted although it is needed."""

    code = "invalid_encrypted_content"

    def __init__(self, id: str, why: str) -> None:
        super().__init__(f"the encrypted_content of the item {id[:60]!r} cannot be read: {why}", param="input")


_CHANGED = "it was changed, or was made for another API key; send the item as it was answered, or leave it out"

_SHARED = set(SamplingFields.model_fields) - {"n"}
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_budget": "reasoning.max_tokens",
    "messages": "input",
}
"""Names of fields in responses, by their names in chats."""
_LIMIT = re.compile(r"\bmax_tokens\b")
"""An older name of a chat field, which responses do not have."""


_COMPACT = (
    "Stop here and write a summary that will replace this conversation: whoever goes on sees your summary only. State "
    "what was asked for, including every constraint; what was done, found and decided, with exact names, paths, "
    "commands and values; what failed; and what is left to do next. Write plain text, call no tool."
)
"""The message that is appended to a conversation to compact it."""

_SUMMARY_TOKENS = 4096
"""Most tokens of a summary, where the request sets no limit and the context is long."""


_QUICKLY_READ_BYTES = 256 * 2**10
"""A longer conversation is converted in a thread: a small request may continue one with megabytes of sealed items."""


_QUICKLY_CONVERTED_TOOLS = 64
"""More tools are converted in a thread."""


async def prepare(
    request: ResponsesRequest, turn: Turn, tools: ToolTable, open: Open, frontend: Frontend, owner: Owner
) -> PreparedChat:
    """Prepare the chat for `request`, which adds `turn` to its conversation. Raises `BadRequest`, `Overloaded`."""
    is_short = turn.total_size() <= _QUICKLY_READ_BYTES and len(tools.offered) <= _QUICKLY_CONVERTED_TOOLS

    async def run(work: Callable[[], Result]) -> Result:
        return work() if is_short else await frontend.jobs.of(owner).text(work, is_large=True)

    messages = await run(partial(to_messages, turn.context(), tools, open))
    instructions: list[Message] = []
    if request.instructions:
        instructions.append({"role": "system", "content": request.instructions})

    most_tokens = request.max_output_tokens
    summary_tokens = min(most_tokens or _SUMMARY_TOKENS, frontend.loaded.max_model_len // 4)
    if request.compacts:
        messages.append({"role": "user", "content": _COMPACT})
        most_tokens = most_tokens or summary_tokens

    free_texts = await compile_text_forms(_text_forms(tools), frontend, owner)

    async def attempt(messages: list[Message]) -> PreparedChat:
        chat = await run(partial(to_chat, request, instructions + messages, tools, most_tokens))
        check_request_limits(chat, frontend)
        prepared = await prepare_chat(chat, frontend, owner, free_texts)
        if request.compacts and prepared.prompt.max_tokens < summary_tokens:
            reason = DoesNotFit(f"it leaves {prepared.prompt.max_tokens} tokens for a summary", "messages")
            raise ContextLengthExceeded(
                f"input cannot be compacted: {reason}, which needs {summary_tokens}; leave tools or instructions out",
                param="input",
            ) from reason
        return prepared

    try:
        try:
            return await attempt(messages)
        except BadRequest as error:
            is_whole = request.truncation == "disabled" and not request.compacts
            if is_whole or not isinstance(error.__cause__, DoesNotFit):
                raise
            reason = error
        model = frontend.loaded
        starts = _starts(messages, model.max_model_len * model.processor.tokenizer.longest_token)
        return await _longest_that_fits(messages, starts, attempt, reason)
    except BadRequest as error:
        raise with_responses_field_names(error, tools) from error


def _text_forms(tools: ToolTable) -> Iterator[TextForm]:
    for each in tools.offered:
        form = each.tool.format if isinstance(each.tool, CustomTool) else None
        if isinstance(form, GrammarInput):
            yield TextForm(each.flat, form, f"{each.path}.format", f"{each.path}.format.definition")


async def _longest_that_fits(
    messages: list[Message],
    starts: list[int],
    attempt: Callable[[list[Message]], Awaitable[PreparedChat]],
    reason: BadRequest,
) -> PreparedChat:
    """Find the longest suffix of the chat that fits, by bisection. `reason` is the error of the whole chat."""
    fitting: PreparedChat | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        try:
            fitting = await attempt(messages[starts[middle] :])
            high = middle
        except BadRequest as error:
            if not isinstance(error.__cause__, DoesNotFit):
                raise
            reason, low = error, middle + 1
    if fitting is None:
        raise reason
    return fitting


def _starts(messages: list[Message], most_characters: int) -> list[int]:
    """Return the indices at which a truncated chat may begin.

    Excluded are outputs of calls, and indices after which more than `most_characters` characters follow; the last
    index is always included.
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


def to_chat(
    request: ResponsesRequest, messages: list[Message], tools: ToolTable, most_tokens: int | None
) -> ChatCompletionRequest:
    """Convert `request` to a chat request. Raises `BadRequest` for values that chats refuse."""
    choice = tools.chat_choice(request.tool_choice)
    data: dict[str, Any] = request.model_dump(include=_SHARED, exclude_unset=True, by_alias=True)
    data |= {
        "messages": messages,
        "tools": tools.chat_tools(),
        # A summary needs no call. But with `none` the prompt would lack the tools, so its prefix would not be cached.
        "tool_choice": "auto" if request.compacts and choice != "none" else choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "reasoning_effort": request.reasoning.effort,
        "thinking_budget": request.reasoning.max_tokens,
        "max_completion_tokens": most_tokens,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.wants_logprobs:
        data |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return validate(data, ChatCompletionRequest, allow_unknown=False)


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format
    if form is None or form.type == "text":
        return None
    if request.compacts:
        # A summary is plain text for the model, but agents send the form of their last answer here too.
        ignore("text.format (of a compaction)")
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": form.model_dump(by_alias=True, exclude_none=True, exclude={"type"}),
    }


def with_responses_field_names(error: BadRequest, tools: ToolTable) -> BadRequest:
    """Replace the names of chat fields in `error` by those of responses."""
    text = str(error).replace("messages are not accepted: their", "input is not accepted: its")
    text = _LIMIT.sub("max_output_tokens", tools.with_paths(text))
    param = error.param and tools.with_paths(error.param)
    for chat, responses in _NAMES.items():
        text = text.replace(chat, responses)
        if param is not None and param.startswith(chat):
            param = responses + param.removeprefix(chat)
    renamed = BadRequest(text, param=param)
    renamed.code = error.code
    return renamed


def to_messages(items: Iterable[Item], tools: ToolTable, open: Open) -> list[Message]:
    """Convert the conversation to chat messages. Reasoning, text and calls of one turn become one message.

    Raises `BadRequest` for the output of a call that is not in the conversation, and for a sealed text that cannot be
    decrypted.
    """
    messages: list[Message] = []
    turn: Message | None = None
    reasoning: list[str] = []
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, FunctionCallOutputItem | CustomCallOutputItem | CompactionItem) or (
            isinstance(item, MessageItem) and item.role != "assistant"
        ):
            turn = None
            messages.append(_input_message(item, names, open))
            continue
        if turn is None or _starts_new_turn(item, turn):
            turn, reasoning = {"role": "assistant", "content": None}, []
            messages.append(turn)
        if isinstance(item, ReasoningItem):
            reasoning.append(_reasoning(item, open))
            turn["reasoning_content"] = reasoning
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            name = tools.flat(_given(item.namespace), item.name)
            names[item.call_id] = name
            if isinstance(item, CustomCallItem):
                arguments = json.dumps({FREE_TEXT: item.input}, ensure_ascii=False)
            else:
                arguments = item.arguments
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        else:
            turn["content"] = item.text
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _given(namespace: str | msgspec.UnsetType) -> str | None:
    return None if namespace is msgspec.UNSET else namespace


def _starts_new_turn(item: Item, turn: Message) -> bool:
    """Return whether `item` cannot be appended to `turn`, whose order is reasoning, text, calls."""
    if isinstance(item, ReasoningItem):
        return turn["content"] is not None or "tool_calls" in turn
    return isinstance(item, MessageItem) and (turn["content"] is not None or "tool_calls" in turn)


def _reasoning(item: ReasoningItem, open: Open) -> str:
    """Return the item's text. Text that another server sealed is ignored: the conversation can continue without it."""
    if item.encrypted_content is not None:
        try:
            return open("reasoning", item.encrypted_content)
        except Changed:
            raise InvalidEncryptedContent(item.id, _CHANGED) from None
        except Foreign:
            if not item.text:
                ignore("reasoning (encrypted_content of another server)")
    return item.text


def _input_message(
    item: MessageItem | FunctionCallOutputItem | CustomCallOutputItem | CompactionItem,
    names: dict[str, str],
    open: Open,
) -> Message:
    """Convert an item that the model did not write to a message."""
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": item.text}
    if isinstance(item, CompactionItem):
        return {"role": "user", "content": SUMMARY_INTRODUCTION + _summary(item, open)}
    if item.call_id not in names:
        raise BadRequest(
            f"input holds the output of the function call {item.call_id[:60]!r}, and no function_call with this "
            "call_id comes before it",
            param="input",
        )
    return {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": item.output}


def retained_messages(items: Iterable[Item], most_characters: int) -> list[MessageItem]:
    """Return the newest user messages, oldest first, with at most `most_characters` characters in all."""
    retained: list[MessageItem] = []
    for item in reversed(list(items)):
        if isinstance(item, MessageItem) and item.role == "user":
            most_characters -= len(item.text)
            if most_characters < 0:
                break
            retained.append(item)
    return retained[::-1]


SUMMARY_INTRODUCTION = (
    "The conversation up to here was replaced by this summary, which you wrote yourself. Go on from it.\n\n"
)
"""Precedes the text of a compaction item in the prompt."""


def _summary(item: CompactionItem, open: Open) -> str:
    """Return the text of a compaction. If it cannot be decrypted, refuse it: the conversation would be lost."""
    try:
        return open("compaction", item.encrypted_content)
    except Changed:
        raise InvalidEncryptedContent(item.id, _CHANGED) from None
    except Foreign:
        why = (
            "another server sealed it, or this one before a restart without reasoning_key_file; send the conversation"
        )
        raise InvalidEncryptedContent(item.id, why) from None
