"""`AnswerInParts`: one choice's answer as its parser takes it apart, counted and put together.

Used by the renderers of chat completions; `ReasoningTokens` by those of responses too.
"""

from collections.abc import Iterable, Sequence

import msgspec

from engine.request_state import RequestState
from server.answers.parts import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.protocol.chat import AnsweredToolCall, AssistantMessage, CalledFunction


class ReasoningTokens:
    """Counts the tokens that wrote reasoning; those of text that is held back count once it turns out to be some."""

    def __init__(self) -> None:
        self.count = 0
        self._inside = False
        self._waiting = 0

    def add(self, parts: Sequence[Part], num_tokens: int) -> None:
        """Take a step of `num_tokens` tokens, which brought `parts`."""
        if parts:
            if isinstance(parts[0], ReasoningPart):
                self.count += self._waiting + num_tokens
            self._inside = isinstance(parts[-1], ReasoningPart)
            self._waiting = 0
        elif self._inside:
            self._waiting += num_tokens


class AnswerInParts:
    """Collects what a parser finds."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[tuple[ToolCallPart, list[str]]] = []
        """The calls so far, each with the pieces of its arguments."""
        self._reasoning_tokens = ReasoningTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self._reasoning_tokens.count

    def push(self, steps: Iterable[tuple[str, int]], *, last: bool = False) -> list[Part]:
        """The parts that steps, each a text and the number of its tokens, bring; with `last`, all that is left."""
        parts: list[Part] = []
        for text, num_tokens in steps:
            brought = self._parser.push(text)
            self._reasoning_tokens.add(brought, num_tokens)
            parts += brought
        if last:
            left = self._parser.finish()
            self._reasoning_tokens.add(left, 0)
            parts += left
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
        return parts

    def push_all(self, state: RequestState) -> None:
        """All that a finished sequence wrote, step by step, so that the counts are those of a stream."""
        self.push(state.steps, last=True)

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
