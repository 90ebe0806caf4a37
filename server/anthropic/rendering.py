"""`MessagesRenderer`: renders answers of `/v1/messages`, complete or as Anthropic's typed events.

It passes the parts that the parser finds to `ContentWriter`, which opens and closes content blocks.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json
from sse_starlette import ServerSentEvent

from engine.text.request_state import RequestDelta, RequestState
from server.anthropic.conversion import digest
from server.errors import ApiError
from server.parsing.parser import (
    AnswerParser,
    ArgumentsPart,
    Part,
    ReasoningPart,
    ReasoningTokens,
    TextPart,
    ToolCallPart,
)
from server.schemas.generation import AnswerHead, Usage
from server.schemas.messages import (
    AppliedEdits,
    Content,
    MessageAnswer,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TextContent,
    ThinkingConfig,
    ThinkingContent,
    ToolUseContent,
)
from server.sealing import Kind
from server.streaming.sse import Renderer, encode

SealText: TypeAlias = Callable[[Kind, str], str]
"""Encrypts a text for the owner of a request."""

PING = ServerSentEvent(event="ping", data='{"type": "ping"}', sep="\n")


def event(kind: str, fields: Mapping[str, object]) -> bytes:
    """Encode one event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


class ContentWriter:
    """The content of an answer. A part of another kind closes the open block and opens a new one."""

    def __init__(self, parser: AnswerParser | None, seal: SealText, thinking: ThinkingConfig) -> None:
        """Without a parser, all text is content. Reasoning is shown only if `thinking` is enabled."""
        self._parser = parser
        self._seal = seal
        self._thinking = thinking
        self._reasoning_tokens = ReasoningTokens()
        self.content: list[Content] = []
        """The blocks so far. The text of the open block is in `_texts`."""
        self._is_open = False
        self._texts: list[str] = []
        self._delta = b""
        """Bytes that precede the text in the open block's events."""
        self._blank = ""
        """White space that waits for other text: no block is opened for white space alone."""

    @property
    def thinking_tokens(self) -> int:
        return self._reasoning_tokens.count

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseContent) for block in self.content)

    def push(self, text: str, num_tokens: int) -> bytes:
        """Return the events for `text`, which has `num_tokens` tokens."""
        if self._parser is None:
            return self._add_text(text) if text else b""
        parts = self._parser.push(text)
        self._reasoning_tokens.add(parts, num_tokens)
        return self._take(parts)

    def finish(self, *, cut_off: bool) -> bytes:
        """Return the events after the last text. `cut_off`: the model did not end it itself."""
        events = b""
        if self._parser is not None:
            parts = self._parser.finish(cut_off=cut_off)
            self._reasoning_tokens.add(parts, 0)
            events = self._take(parts)
        return events + self._close()

    def _take(self, parts: Iterable[Part]) -> bytes:
        return b"".join([self._event(part) for part in parts])

    def _event(self, part: Part) -> bytes:
        match part:
            case TextPart():
                return self._add_text(part.text)
            case ReasoningPart():
                return self._add_reasoning(part.text) if self._thinking.is_on else b""
            case ToolCallPart():
                # Some dialects have ids of another form, which their chat templates need in the next turn.
                id = f"toolu_{part.id.removeprefix('call_')}" if part.id.startswith("call_") else part.id
                return self._begin(ToolUseContent(id, part.name, {}), "input_json_delta", "partial_json")
            case ArgumentsPart():
                return self._add(part.json)

    def _add_text(self, text: str) -> bytes:
        if self._is_open and isinstance(self.content[-1], TextContent):
            return self._add(text)
        text = self._blank + text
        if text.isspace():
            self._blank = text
            return b""
        return self._begin(TextContent(""), "text_delta", "text") + self._add(text)

    def _add_reasoning(self, text: str) -> bytes:
        begun = b""
        if not (self._is_open and isinstance(self.content[-1], ThinkingContent)):
            begun = self._begin(ThinkingContent("", ""), "thinking_delta", "thinking")
        added = self._add(text)
        return begun if self._thinking.display == "omitted" else begun + added

    def _begin(self, block: Content, delta: str, field: str) -> bytes:
        closing = self._close()
        position = {"index": len(self.content)}
        self.content.append(block)
        self._is_open = True
        opening = {"type": "content_block_delta", **position, "delta": {"type": delta, field: ""}}
        self._delta = b"event: content_block_delta\ndata: " + encode(opening).removesuffix(b'""}}')
        return closing + event("content_block_start", {**position, "content_block": block})

    def _add(self, text: str) -> bytes:
        self._texts.append(text)
        return b"%b%b}}\n\n" % (self._delta, encode(text))

    def _close(self) -> bytes:
        """Close the open block: store its text and, for reasoning, its signature."""
        self._blank = ""
        if not self._is_open:
            return b""
        self._is_open = False
        text = "".join(self._texts)
        self._texts.clear()
        position, block = {"index": len(self.content) - 1}, self.content[-1]
        signed = b""
        match block:
            case TextContent():
                block.text = text
            case ToolUseContent():
                block.input = _as_object(text)
            case ThinkingContent():
                if self._thinking.display == "omitted":
                    block.signature = self._seal("reasoning", text)
                else:
                    block.thinking, block.signature = text, self._seal("signature", digest(text))
                delta = {"type": "signature_delta", "signature": block.signature}
                signed = event("content_block_delta", {**position, "delta": delta})
        return signed + event("content_block_stop", position)


def _as_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call, which may be incomplete."""
    try:
        parsed = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


class MessagesRenderer(Renderer):
    """Renders one message."""

    ping = PING

    def __init__(
        self,
        request: MessagesRequest,
        num_prompt_tokens: int,
        fingerprint: str,
        parser: AnswerParser | None,
        seal: SealText,
        *,
        is_clipped: bool = False,
        cache_block_size: int | None = None,
        request_id: str | None = None,
    ) -> None:
        """`is_clipped`: whether the context has less room than the request's `max_tokens`. `cache_block_size` is the
        number of tokens in a block of the prefix cache; None: no tokens are reported as newly cached.
        """
        self._answer = MessageAnswer(
            id=f"msg_{uuid.uuid4().hex}",
            model=request.model,
            usage=MessageUsage(input_tokens=num_prompt_tokens, output_tokens=0),
        )
        if request.context_management is not None:
            self._answer.context_management = AppliedEdits()
        self.head = AnswerHead(self._answer.id, int(time.time()), request.model, fingerprint)
        self._writer = ContentWriter(parser, seal, request.thinking)
        self._is_clipped = is_clipped
        self._only_caches = request.max_tokens == 0
        """Whether `max_tokens` is 0. The engine samples one token, because the step that completes a prompt samples
        one; it is left out of the answer."""
        self._cache_block_size = cache_block_size
        self._request_id = request_id

    def opening(self) -> bytes:
        return event("message_start", {"message": self._answer}) + PING.encode()

    def chunk(self, index: int, delta: RequestDelta) -> bytes:
        events = self._push(delta.steps)
        if delta.finished:
            events += self._finish(delta.finish_reason, delta.stop_reason)
        return events

    def closing(self, usage: Usage) -> bytes:
        self._answer.usage = self._usage(usage)
        fields: dict[str, object] = {
            "delta": {"stop_reason": self._answer.stop_reason, "stop_sequence": self._answer.stop_sequence},
            "usage": self._answer.usage,
        }
        if isinstance(self._answer.context_management, AppliedEdits):
            fields["context_management"] = self._answer.context_management
        return event("message_delta", fields) + event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.anthropic_body(self._request_id)

    def whole(self, states: Sequence[RequestState], usage: Usage) -> MessageAnswer:
        (state,) = states
        self._push(state.steps)
        self._finish(state.finish_reason, state.stop_reason)
        self._answer.content = self._writer.content
        self._answer.usage = self._usage(usage)
        return self._answer

    def _push(self, steps: Iterable[tuple[str, int]]) -> bytes:
        if self._only_caches:
            return b""
        return b"".join([self._writer.push(text, num_tokens) for text, num_tokens in steps])

    def _finish(self, reason: str | None, stop: int | str | None) -> bytes:
        if self._only_caches:
            self._answer.stop_reason = "max_tokens"
            return b""
        events = self._writer.finish(cut_off=reason == "length")
        self._answer.stop_reason = self._stop_reason(reason, stop)
        if self._answer.stop_reason == "stop_sequence" and isinstance(stop, str):
            self._answer.stop_sequence = stop
        return events

    def _stop_reason(self, reason: str | None, stop: int | str | None) -> StopReason:
        if reason == "length":
            return "model_context_window_exceeded" if self._is_clipped else "max_tokens"
        if isinstance(stop, str):
            return "stop_sequence"
        return "tool_use" if self._writer.has_calls else "end_turn"

    def _usage(self, usage: Usage) -> MessageUsage:
        prompt, cached, created = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, 0
        # The last token is always computed. Clients interpret 0 input tokens as a missing count, and would add the
        # count of `message_start`.
        cached = min(cached, prompt - 1)
        if self._cache_block_size is not None:
            created = max(0, (prompt - 1) // self._cache_block_size * self._cache_block_size - cached)
        return MessageUsage(
            input_tokens=prompt - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=0 if self._only_caches else usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._writer.thinking_tokens),
        )
