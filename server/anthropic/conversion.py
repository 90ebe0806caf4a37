"""Converts a request of Anthropic's Messages API to the chat that the model answers.

`prepare` converts a request for an answer, `count_tokens` only counts its tokens. Errors of the chat are reported with
the names that the fields have in a message.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from engine.text.io_processor import DoesNotFit, InvalidRequest
from server.error_answers import refusal
from server.errors import BadRequest, ContextLengthExceeded, ThreadUnsupported
from server.frontend import Frontend
from server.ignored import ignore
from server.limits.owners import Owner
from server.request_builder import (
    MANY_PARTS,
    PreparedChat,
    check_request_limits,
    prepare_chat,
    render_prompt,
)
from server.schemas.body import MAX_ITEMS, validate
from server.schemas.chat import ChatCompletionRequest, reasoning_history, reasoning_switch
from server.schemas.messages import (
    AnthropicTool,
    Block,
    ChangedTool,
    ClientTool,
    CompactionBlock,
    CountTokensRequest,
    DocumentBlock,
    HostedBlock,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolAdditionBlock,
    ToolChoice,
    ToolDefinition,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.sealing import Changed, Foreign, Kind

Message: TypeAlias = dict[str, Any]

OpenSeal: TypeAlias = Callable[[Kind, str], str]
"""Decrypts a sealed text. Raises `Foreign` and `Changed`."""

MAX_STOP_SEQUENCES = 64
"""Most stop sequences, unless `max_stop_strings` is more. Anthropic's API has no limit, but each costs time at each
token."""

BILLING_LINE = "x-anthropic-billing-header:"
"""Prefix of the first line of Claude Code's system prompt, which differs between conversations."""

NO_IMAGE = "[an image is left out here: this model reads text only]"
NO_DOCUMENT = "[a document is left out here: this model reads text only]"
"""Replacements in the prompt for an image, or for a document that is not text, in a tool's result."""

_FAILED = "The tool failed:\n"

_FOREIGN_SIGNATURE = re.compile(r"(a2Fvbj|E)[A-Za-z0-9+/_-]{40,}=*")
"""Matches signatures of other Kaon servers and of Anthropic's, whose conversations may be continued here."""
_SHARED = ("seed", "priority", "timeout", "cache_salt", "temperature", "top_p", "top_k")

_NAMES = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop holds": "stop_sequences holds",
}
"""Names of fields in messages, by their names in chats."""
_FUNCTION = re.compile(r"tools\[(\d+)\]\.function(\.parameters)?\b")


async def prepare(
    request: MessagesRequest, frontend: Frontend, owner: Owner, open_seal: OpenSeal
) -> tuple[ChatCompletionRequest, PreparedChat]:
    """Convert `request` to a chat, and prepare it. `open_seal` decrypts texts that were sealed for the owner.

    Raises `BadRequest`.
    """
    convert = partial(to_chat, request, frontend, open_seal)
    chat, paths = await frontend.jobs.of(owner).text(convert, is_large=_is_large(request))
    try:
        check_request_limits(chat, frontend, least_stop_strings=MAX_STOP_SEQUENCES)
        return chat, await prepare_chat(chat, frontend, owner)
    except BadRequest as error:
        raise _renamed(error, paths) from error


async def count_tokens(request: CountTokensRequest, frontend: Frontend, owner: Owner, open_seal: OpenSeal) -> int:
    """Return the number of tokens in the prompt of `request`. Raises `BadRequest`."""
    model = frontend.loaded

    def count() -> int:
        chat, paths = to_chat(request, frontend, open_seal)
        try:
            return len(model.processor.tokenize(render_prompt(chat, model, frontend), chat.add_special_tokens))
        except InvalidRequest as error:
            renamed = refusal(error)
            renamed.__cause__ = error
            raise _renamed(renamed, paths) from error

    return await frontend.jobs.of(owner).text(count, is_large=_is_large(request))


def _is_large(request: CountTokensRequest) -> bool:
    return sum(1 + len(message.content) for message in request.messages) > MANY_PARTS


def _renamed(error: BadRequest, paths: Sequence[str]) -> BadRequest:
    """Convert `error` of a chat to the names of a message's fields. Errors of length get the words of Anthropic's API,
    by which clients recognise that a conversation is too long. `paths` are those of the chat's tools.
    """
    cause = error.__cause__
    if isinstance(cause, DoesNotFit):
        if cause.completion_tokens:
            return ContextLengthExceeded(
                f"input length and `max_tokens` exceed context limit: {cause.prompt_tokens} + "
                f"{cause.completion_tokens} > {cause.limit}, decrease input length or `max_tokens` and try again"
            )
        return ContextLengthExceeded(
            f"prompt is too long: {cause.prompt_tokens} tokens > {cause.limit} maximum; shorten the conversation"
        )
    text, param = str(error), error.param
    if param == "continue_final_message":
        text = (
            "the last message is the assistant's, and the model's chat template changes its content; "
            "end messages with a message of the role user"
        )
    text = _FUNCTION.sub(lambda match: f"{paths[int(match[1])]}{'.input_schema' if match[2] else ''}", text)
    for chat, message in _NAMES.items():
        text = text.replace(chat, message)
    return BadRequest(text)


def to_chat(
    request: CountTokensRequest, frontend: Frontend, open_seal: OpenSeal
) -> tuple[ChatCompletionRequest, list[str]]:
    """Convert `request` to a chat request, and return it with the path in `request` of each of its tools.

    Call it in a thread: messages may have many blocks. Raises `BadRequest` if the conversion is impossible.
    """
    if isinstance(request, MessagesRequest) and request.thread is not None:
        raise ThreadUnsupported("thread is set, but this server stores no conversations; send all messages without it")
    if isinstance(request, MessagesRequest) and request.compaction is not None:
        raise BadRequest(
            "compaction is set, but this server summarizes no conversations; ask for a summary in a message of the "
            "role user, and send it in place of the messages that it summarizes"
        )
    tools = _ToolTable(request)
    conversation = _Conversation(open_seal)
    if system := _system_text(request.system, frontend.config.server_config.strip_billing_line):
        conversation.messages.append({"role": "system", "content": system})
    for turn in _turns(request):
        conversation.add(turn)
    continues = conversation.end()
    if not conversation.messages:
        raise BadRequest("messages have no content that the model is shown; send a message of the role user")
    format = request.output_config.format or request.output_format
    data: dict[str, Any] = {
        "model": request.model,
        "messages": conversation.messages,
        "tools": tools.chat_tools(),
        "tool_choice": tools.chat_choice(request.tool_choice),
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
        "continue_final_message": continues,
        "chat_template_kwargs": _template_variables(request),
    }
    if request.thinking.is_on:
        data["thinking_budget"] = request.thinking.budget_tokens
    if format is not None:
        data["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": format.schema_},
        }
    if isinstance(request, MessagesRequest):
        data |= {name: value for name in _SHARED if (value := getattr(request, name)) is not None}
        # The prompt is computed in the step that generates the first token.
        data |= {"max_completion_tokens": request.max_tokens or 1, "stop": request.stop_sequences}
        for name in ("container", "fallbacks"):
            if getattr(request, name) is not None:
                ignore(name)
    paths = [path for path, _ in tools.shown.values()]
    try:
        return validate(data, ChatCompletionRequest, allow_unknown=False), paths
    except BadRequest as error:
        raise _renamed(error, paths) from error


def wants_cache(request: CountTokensRequest) -> bool:
    """Return whether any block of the request has `cache_control`."""
    if request.cache_control is not None:
        return True
    blocks = [block for message in request.messages for block in message.content]
    changes = (block.tool for block in blocks if isinstance(block, ToolAdditionBlock))
    defined = (change.definition for change in changes if isinstance(change, ToolDefinition))
    marked: Iterable[Any] = (*request.system, *request.tools, *blocks, *defined)
    return any(getattr(each, "cache_control", None) is not None for each in marked)


def _template_variables(request: CountTokensRequest) -> dict[str, Any]:
    variables = reasoning_switch(request.thinking.is_on)
    # Results of calls continue a turn.
    inputs = (
        index
        for index, each in enumerate(request.messages)
        if each.role == "user" and not all(isinstance(block, ToolResultBlock) for block in each.content)
    )
    last_input = max(inputs, default=0)
    of_turn = [each.output_config.effort for each in request.messages[last_input:] if each.output_config is not None]
    effort = next((effort for effort in reversed(of_turn) if effort is not None), request.output_config.effort)
    if effort is not None:
        variables["reasoning_effort"] = effort
    if request.keeps_thinking:
        variables |= reasoning_history(True)
    return {**variables, **request.chat_template_kwargs}


class _ToolTable:
    """The tools of a request: those of `tools`, and those that its messages define, after all changes."""

    def __init__(self, request: CountTokensRequest) -> None:
        """Raises `BadRequest` for a name that two tools have, and for changes that cannot be followed."""
        self.shown: dict[str, tuple[str, ClientTool]] = {}
        """Path and tool by name, in the order of the prompt."""
        self._removed: set[str] = set()
        self._ignored: dict[str | None, str] = {}
        """Types of the tools that Anthropic defines, by name."""
        for index, tool in enumerate(request.tools):
            self._define(f"tools[{index}]", tool)
        for index, message in enumerate(request.messages):
            for number, block in enumerate(message.content):
                if isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
                    path = f"messages[{index}].content[{number}]"
                    if message.role != "system":
                        raise BadRequest(f"{path} is of type {block.type}, which only the role system has")
                    self._change(path, block)

    def _define(self, path: str, tool: Tool) -> None:
        if isinstance(tool, AnthropicTool):
            ignore(f"{path} ({tool.type})")
            self._ignored[tool.name] = tool.type
            return
        if tool.name in self.shown and tool.name not in self._removed:
            raise BadRequest(
                f"{path}.name is {tool.name}, which {self.shown[tool.name][0]} has too; give each a name of its own"
            )
        self.shown[tool.name] = path, tool
        self._removed.discard(tool.name)
        if len(self.shown) > MAX_ITEMS:
            raise BadRequest(f"{path} is one tool too many; tools and messages may define {MAX_ITEMS} in all")

    def _change(self, path: str, block: ToolAdditionBlock | ToolRemovalBlock) -> None:
        tool = block.tool
        if isinstance(tool, ToolDefinition):
            self._define(f"{path}.tool.definition", tool.definition)
        elif not isinstance(tool, ChangedTool):
            ignore(f"{path} ({tool.type})")
        elif tool.name in self.shown:
            (self._removed.add if isinstance(block, ToolRemovalBlock) else self._removed.discard)(tool.name)
        elif tool.name in self._ignored:
            ignore(f"{path} ({self._ignored[tool.name]})")
        else:
            raise BadRequest(f"{path}.tool.name is {tool.name[:60]!r}, and no tool before it has this name")

    def chat_tools(self) -> list[dict[str, Any]]:
        tools = []
        for _, tool in self.shown.values():
            function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
            if tool.description is not None:
                function["description"] = tool.description
            if tool.strict:
                function["strict"] = True
            tools.append({"type": "function", "function": function})
        return tools

    def chat_choice(self, choice: ToolChoice) -> Any:
        """Return the chat's tool choice. The prompt still shows removed tools, but they cannot be called."""
        if choice.type == "tool":
            if choice.name in self._removed:
                raise BadRequest(f"tool_choice names the tool {choice.name}, which messages have removed")
            return {"type": "function", "function": {"name": choice.name}}
        mode = "required" if choice.type == "any" else choice.type
        if not self._removed or mode == "none":
            return mode
        left = [{"type": "function", "function": {"name": name}} for name in self.shown if name not in self._removed]
        if not left and mode == "required":
            raise BadRequest("tool_choice is any, and messages have removed all tools; send auto, or add a tool")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": left}}


def _system_text(blocks: Sequence[TextBlock], strip_billing_line: bool) -> str:
    texts = []
    for index, block in enumerate(blocks):
        text = block.text
        if strip_billing_line and text.startswith(BILLING_LINE):
            text = text.partition("\n")[2]
            ignore(f"system[{index}] (billing line)")
        texts.append(text)
    return "\n".join(filter(None, texts))


# -- the conversation -------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """Consecutive messages of one role."""

    role: str
    blocks: list[tuple[str, Block]]
    """Content blocks, each with its path in the request."""


def _turns(request: CountTokensRequest) -> list[_Turn]:
    turns: list[_Turn] = []
    last_input = max((index for index, each in enumerate(request.messages) if each.role == "user"), default=0)
    for index, message in enumerate(request.messages):
        is_cleared = message.clear_at == "next_user_message" and index < last_input
        blocks = [
            (f"messages[{index}].content[{number}]", block)
            for number, block in enumerate(message.content)
            if not (is_cleared or isinstance(block, ToolAdditionBlock | ToolRemovalBlock))
        ]
        if message.role == "system" and not blocks:
            continue
        if not turns or turns[-1].role != message.role:
            turns.append(_Turn(message.role, []))
        elif message.role == "assistant" and request.messages[index - 1].role == "system":
            # The message between these answers is not shown, and its model wrote them separately.
            turns[-1].blocks.append(("", TextBlock(type="text", text="\n")))
        turns[-1].blocks.extend(blocks)
    return turns


class _Conversation:
    """Builds the messages of a chat from the turns of a request."""

    def __init__(self, open_seal: OpenSeal) -> None:
        self.messages: list[Message] = []
        self._open_seal = open_seal
        self._names: dict[str, str] = {}
        """Names of tools, by the id of the call."""

    def add(self, turn: _Turn) -> None:
        """Append a turn. Raises `BadRequest` for content that this server does not support."""
        if turn.role == "assistant":
            self._add_answer(turn)
        else:
            self._add_input(turn)

    def end(self) -> bool:
        """Return whether the last message is an answer to continue. Raises `BadRequest` if it has calls."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        last = self.messages[-1]
        if "tool_calls" in last:
            raise BadRequest(
                "messages end with a tool_use block of the assistant that has no result; send a message of "
                "the role user with its tool_result"
            )
        if not last["content"]:
            self.messages.pop()
        return bool(last["content"])

    def _add_input(self, turn: _Turn) -> None:
        """Append a user turn. Tool results come first, as separate messages, because they must follow their calls."""
        texts: list[str] = []
        has_results = any(isinstance(block, ToolResultBlock) for _, block in turn.blocks)
        for path, block in turn.blocks:
            if isinstance(block, ToolResultBlock):
                self.messages.append(self._result(path, block))
            elif has_results and isinstance(block, ImageBlock | DocumentBlock):
                # Claude Code sends the content that a tool read in a separate block next to the result.
                texts.append(_result_text(path, block) or "")
            elif (text := _input_text(path, block)) is not None:
                texts.append(text)
        if texts or not has_results:
            self.messages.append({"role": turn.role, "content": "\n".join(texts)})

    def _result(self, path: str, block: ToolResultBlock) -> Message:
        if block.tool_use_id not in self._names:
            raise BadRequest(
                f"{path}.tool_use_id is {block.tool_use_id[:60]!r}, and no `tool_use` block before it has this id"
            )
        if isinstance(block.content, str):
            text = block.content
        else:
            parts = (_result_text(f"{path}.content[{i}]", part) for i, part in enumerate(block.content))
            text = "\n".join(part for part in parts if part is not None)
        name = self._names[block.tool_use_id]
        content = _FAILED + text if block.is_error else text
        return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}

    def _add_answer(self, turn: _Turn) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for path, block in turn.blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case CompactionBlock():
                    texts.append(block.content)
                case ThinkingBlock() | RedactedThinkingBlock():
                    reasoning.append(self._reasoning(path, block))
                case ToolUseBlock():
                    self._names[block.id] = block.name
                    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case HostedBlock():
                    ignore(f"{path} ({block.type})")
                case _:
                    raise BadRequest(f"{path} is of type {block.type}, which a message of the assistant cannot hold")
        message: Message = {"role": "assistant", "content": "".join(texts)}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _reasoning(self, path: str, block: ThinkingBlock | RedactedThinkingBlock) -> str:
        """Return the reasoning of a block; empty for a block of another server. Raises `BadRequest` if it was
        changed."""
        if isinstance(block, RedactedThinkingBlock):
            field, sealed, kind = "data", block.data, "redacted_thinking"
        else:
            field, sealed, kind = "signature", block.signature, "thinking"
        try:
            # If the answer omitted the thinking, the signature contains it.
            if isinstance(block, RedactedThinkingBlock) or not block.thinking:
                return self._open_seal("reasoning", sealed)
            if self._open_seal("signature", sealed) == digest(block.thinking):
                return block.thinking
        except Foreign:
            if _FOREIGN_SIGNATURE.fullmatch(sealed):
                ignore(f"{path} ({kind} of another server)")
                return ""
        except Changed:
            pass
        raise BadRequest(f"{path}: Invalid `{field}` in `{kind}` block; send the block as it was received")


def digest(thinking: str) -> str:
    """Return the digest of a block's text that its signature contains."""
    return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def _input_text(path: str, block: Block) -> str | None:
    """Return the text of a block in a user's message; None if the block is ignored."""
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            return _document_text(path, block)
        case SearchResultBlock():
            return _search_result_text(block)
        case CompactionBlock():
            return block.content
        case HostedBlock():
            ignore(f"{path} ({block.type})")
            return None
        case ImageBlock():
            raise BadRequest(
                f"{path} is of type image; this server reads text only, so leave it out or describe it in text"
            )
    raise BadRequest(f"{path} is of type {block.type}, which only a message of the assistant can hold")


def _result_text(path: str, block: ResultBlock) -> str | None:
    """Return the text of a block in a tool's result; None if the block is ignored.

    Other media are replaced by a remark: an agent whose tool reads an image or a PDF could otherwise never continue.
    """
    match block:
        case TextBlock():
            return block.text
        case ImageBlock():
            ignore(f"{path} (image)")
            return NO_IMAGE
        case DocumentBlock():
            try:
                return _document_text(path, block)
            except BadRequest:
                ignore(f"{path} (document)")
                return NO_DOCUMENT
        case SearchResultBlock():
            return _search_result_text(block)
        case ToolReferenceBlock():
            return f"tool: {block.tool_name}"
        case HostedBlock():
            ignore(f"{path} ({block.type})")
            return None


def _document_text(path: str, block: DocumentBlock) -> str:
    source = block.source
    text = source.get("data") if source.get("type") == "text" else source.get("content")
    if isinstance(text, list):
        parts = [part.get("text") for part in text if isinstance(part, dict) and part.get("type") == "text"]
        text = "\n".join(part for part in parts if isinstance(part, str)) if len(parts) == len(text) else None
    if source.get("type") not in ("text", "content") or not isinstance(text, str):
        raise BadRequest(
            f"{path}.source is of type {str(source.get('type'))[:60]}; this server reads documents whose source is of "
            "type text, or of type content with text"
        )
    return "\n".join(filter(None, (block.title, block.context, text)))


def _search_result_text(block: SearchResultBlock) -> str:
    return "\n".join((block.title, block.source, *(part.text for part in block.content)))
