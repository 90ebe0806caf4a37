"""`ChatFrames`: chunks of a streamed chat answer, rendered from prepared bytes. Hot: one call a streamed chunk."""

from collections.abc import Iterable

import msgspec

from server.answers.parts import ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.sse import PreparedFrames, encode, ending


class ChatFrames(PreparedFrames):
    """Chunks of `/v1/chat/completions`: a choice's first one names its role, its last one is empty but for the end.

    Where each chunk tells the usage so far, the end goes with the last text.
    """

    object = "chat.completion.chunk"
    plain = b'},"logprobs":null,"finish_reason":null}'

    def delta(
        self,
        index: int,
        text: str,
        logprobs: msgspec.Struct | None,
        finish_reason: str | None,
        members: bytes = b"",
        stop_reason: int | str | None = None,
    ) -> bytes:
        """The events that tell what choice `index` gained, if all that it writes is its content.

        `members` are further ones of the choice, each with a comma in front.
        """
        opening = self._open.get(index)
        if opening is not None and logprobs is None and finish_reason is None and not members:
            return b"".join((opening, b'"content":', encode(text), self._plain_end))
        events = [] if opening is not None else [self.begin(index, b'""')]
        gained = bool(text) or logprobs is not None or bool(members)
        if gained and finish_reason is not None and self._prompt_tokens is not None:
            stopped = members + _stopped(stop_reason)
            return b"".join(
                (*events, self._event(index, b'"content":' + encode(text), logprobs, stopped, finish_reason))
            )
        if gained:
            events.append(self._event(index, b'"content":' + encode(text), logprobs, members))
        if finish_reason is not None:
            events.append(self.end(index, finish_reason, stop_reason))
        return b"".join(events)

    def parts(self, index: int, parts: Iterable[Part], logprobs: msgspec.Struct | None, members: bytes = b"") -> bytes:
        """The events that tell the parts that choice `index` gained; `logprobs` and `members` go with the first."""
        events = []
        for part in parts:
            if index not in self._open:
                events.append(self.begin(index, b'""' if isinstance(part, TextPart) else b"null"))
            events.append(self._event(index, _member(part), logprobs, members))
            logprobs, members = None, b""
        if logprobs is not None or members:
            if index not in self._open:
                events.append(self.begin(index, b'""'))
            events.append(self._event(index, b"", logprobs, members))
        return b"".join(events)

    def begin(self, index: int, content: bytes) -> bytes:
        """A choice's first event. `content` is `""`, or `null` where something else comes before any."""
        self._open[index] = opening = self._head + b'{"index":%d,"delta":{' % index
        return b"".join((opening, b'"role":"assistant","content":', content, b',"refusal":null', self._plain_before))

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None = None) -> bytes:
        """A choice's last event."""
        begun = b"" if index in self._open else self.begin(index, b'""')
        return b"".join(
            (begun, self._open[index], b"}", _stopped(stop_reason), ending(None, finish_reason), self._close)
        )

    def of_prompt(self, members: bytes) -> bytes:
        """An event without choices, whose `members` tell of the prompt."""
        return b"".join((self._head, b"]", members, self._close.removeprefix(b"]")))

    def _event(
        self,
        index: int,
        member: bytes,
        logprobs: msgspec.Struct | None,
        members: bytes,
        finish_reason: str | None = None,
    ) -> bytes:
        if logprobs is None and not members and finish_reason is None:
            return b"".join((self._open[index], member, self._plain_end))
        return b"".join((self._open[index], member, b"}", members, ending(logprobs, finish_reason), self._close))


def _stopped(stop_reason: int | str | None) -> bytes:
    return b"" if stop_reason is None else b',"stop_reason":' + encode(stop_reason)


def _member(part: Part) -> bytes:
    """The part as the member of a delta that tells it."""
    match part:
        case TextPart():
            return b'"content":' + encode(part.text)
        case ReasoningPart():
            text = encode(part.text)
            return b'"reasoning_content":%b,"reasoning":%b' % (text, text)
        case ToolCallPart():
            call = {"index": part.index, "id": part.id, "type": "function"}
            return b'"tool_calls":[%b]' % encode({**call, "function": {"name": part.name, "arguments": ""}})
        case ArgumentsPart():
            return b'"tool_calls":[%b]' % encode({"index": part.index, "function": {"arguments": part.json}})
