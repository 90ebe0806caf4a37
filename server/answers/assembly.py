"""`AnswerInParts`: one choice's answer as its parser takes it apart, counted and put together.

Used by the renderers of chat completions.
"""

import msgspec

from engine.request_state import RequestState
from server.answers.parts import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.protocol.chat import AnsweredToolCall, AssistantMessage, CalledFunction


class AnswerInParts:
    """Collects what a parser finds."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[tuple[ToolCallPart, list[str]]] = []
        """The calls so far, each with the pieces of its arguments."""
        self.reasoning_tokens = 0
        """Tokens of the reasoning: those that came while the latest part was one."""

    def push(self, text: str, num_tokens: int, *, last: bool = False) -> list[Part]:
        """The parts that `text`, which `num_tokens` tokens wrote, brings; with `last`, all that is left."""
        parts = self._parser.push(text)
        if last:
            parts = [*parts, *self._parser.finish()]
        for part in parts:
            match part:
                case TextPart():
                    self._text.append(part.text)
                case ReasoningPart():
                    self._reasoning.append(part.text)
                case ToolCallPart():
                    self.calls.append((part, []))
                case ArgumentsPart():
                    self.calls[part.index][1].append(part.json)
        if self._reasoning and not self._text and not self.calls:
            self.reasoning_tokens += num_tokens
        return parts

    def push_all(self, state: RequestState) -> None:
        """All that a finished sequence wrote, step by step, so that the counts are those of a stream."""
        for text, num_tokens in state.steps:
            self.push(text, num_tokens)
        self.push("", 0, last=True)

    def message(self, echo: str) -> AssistantMessage:
        """The answer as a whole; `echo` begins its content."""
        content = echo + "".join(self._text)
        calls = [
            AnsweredToolCall(call.id, CalledFunction(call.name, "".join(arguments))) for call, arguments in self.calls
        ]
        reasoning = "".join(self._reasoning) or msgspec.UNSET
        return AssistantMessage(
            content=content or (None if calls else ""),
            tool_calls=calls or msgspec.UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )
