"""From a model's text to the parts of an answer: content, reasoning, calls and their arguments.

In this order: the parts; `Feed` and `FedParser`, on which all dialects' parsers are built; parsers that combine
others; and `AnswerInParts`, the answer of one choice, which the renderers of chat completions and responses read.
"""

import re
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from engine.text.request_state import RequestState
from server.parsing.freeform import FreeformInput
from server.schemas.chat import (
    AnsweredCustomCall,
    AnsweredToolCall,
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
)


class TextPart(msgspec.Struct, frozen=True):
    """More of the answer's content."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True):
    """A tool call begins: number `index` of the answer, counted from 0."""

    index: int
    id: str
    name: str


class ArgumentsPart(msgspec.Struct, frozen=True):
    """More of the JSON text of call `index`'s arguments."""

    index: int
    json: str


Part: TypeAlias = TextPart | ReasoningPart | ToolCallPart | ArgumentsPart


class AnswerParser(Protocol):
    """Takes one choice's text apart as it grows. How the text is cut into pushes changes nothing but the cuts."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` brings. Held back is only what may yet turn out to be a marker."""

    def finish(self) -> list[Part]:
        """The parts that were held back, once the text is at its end, wherever that is."""


# A parser is a generator that is written as if the whole text were there, and yields where it needs more of it.
# `FedParser` runs it over a `Feed`.

Result = TypeVar("Result")
Waiting: TypeAlias = Generator[None, None, Result]
"""What waits for text with every `yield`, and returns a result."""

_WHITESPACE = re.compile(r"\s*")


class Markers:
    """Strings to look for in a growing text. None may begin another."""

    def __init__(self, *markers: str) -> None:
        self.find = re.compile("|".join(map(re.escape, markers))).search
        self._longest = max(map(len, markers)) - 1
        self._openings = frozenset(marker[0] for marker in markers)
        self._beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))

    def held(self, text: str, at: int) -> int:
        """Characters at the end of `text[at:]` that may be the beginning of a marker."""
        tail = text[max(at, len(text) - self._longest) :] if self._longest else ""
        if self._openings.isdisjoint(tail):
            return 0
        return next((len(tail) - skip for skip in range(len(tail)) if tail[skip:] in self._beginnings), 0)


class Feed:
    """The text that is there and not yet read: `text[at:]`.

    Every character is looked at a bounded number of times, however the text is cut: what waits for more keeps its
    place, and only words of bounded length are read again.
    """

    __slots__ = ("_kept", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def more(self) -> Waiting[bool]:
        """Wait for more text; False once it is at its end."""
        if self.ended:
            return False
        yield
        return True

    def take(self, length: int) -> str:
        taken = self.text[self.at : self.at + length]
        self.at += length
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def take_all(self) -> str:
        return self.take(len(self.text) - self.at)

    def keep(self) -> None:
        """Remember what is read from here on, in case it turns out to be no call."""
        self._kept = []

    def forget(self) -> str:
        """Stop remembering; what was read since `keep`."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def next_character(self) -> Waiting[str]:
        """The next character, left unread; empty at the end of the text."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_whitespace(self) -> Waiting[str]:
        """Read whitespace; the character behind it, left unread."""
        while True:
            match = _WHITESPACE.match(self.text, self.at)
            assert match is not None
            self.take(match.end() - self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def skip(self, characters: str) -> Waiting[str]:
        """Read any of `characters` for as long as they come; what was read."""
        skipped = []
        while (character := (yield from self.next_character())) and character in characters:
            skipped.append(self.take(1))
        return "".join(skipped)

    def take_marker(self, marker: str) -> Waiting[bool]:
        """Read `marker` if it comes next."""
        while not self.text.startswith(marker, self.at):
            if not marker.startswith(self.text[self.at :]) or not (yield from self.more()):
                return False
        self.take(len(marker))
        return True

    def take_word(self, pattern: re.Pattern[str], longest: int = 256) -> Waiting[str]:
        """Read what `pattern` matches, a class of characters repeated; nothing if that is longer than `longest`."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match is not None else self.at
            if end - self.at > longest:
                return ""
            if end < len(self.text) or not (yield from self.more()):
                return self.take(end - self.at)

    def take_until(self, markers: Markers, pieces: list[str]) -> Waiting[str]:
        """Read up to a marker and over it, into `pieces`; the marker, or nothing if the text ends before one."""
        while True:
            piece, marker = self.step_until(markers)
            if piece:
                pieces.append(piece)
            if marker or not (yield from self.more()):
                pieces.append("" if marker else self.take_all())
                return marker

    def step_until(self, markers: Markers) -> tuple[str, str]:
        """Read what is there up to a marker and over it: the text and the marker, which is empty if none came yet."""
        match = markers.find(self.text, self.at)
        if match is not None:
            return self.take(match.start() - self.at), self.take(match.end() - match.start())
        return self.take(len(self.text) - self.at - markers.held(self.text, self.at)), ""


class FedParser:
    """Base of parsers: runs `_read` on the text as it comes and collects the parts that it appends to `_parts`."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._parts: list[Part] = []
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        self._feed.add(text)
        return self._advance()

    def finish(self) -> list[Part]:
        self._feed.ended = True
        return self._advance()

    def _read(self) -> Waiting[None]:
        """Take the whole text apart; ends only when the text does."""
        raise NotImplementedError

    def _advance(self) -> list[Part]:
        next(self._reading, None)
        parts = self._parts
        if parts:
            self._parts = []
            if len(parts) > 1:
                return merged(parts)
        return parts


def merged(parts: list[Part]) -> list[Part]:
    """`parts` with neighbours of a kind joined."""
    joined: list[Part] = []
    run: list[Part] = []
    for part in parts:
        if run and not _continues(run[-1], part):
            joined.append(_join(run))
            run = []
        run.append(part)
    return [*joined, _join(run)] if run else joined


def _continues(part: Part, other: Part) -> bool:
    if isinstance(part, ArgumentsPart):
        return isinstance(other, ArgumentsPart) and part.index == other.index
    return isinstance(part, TextPart | ReasoningPart) and type(part) is type(other)


def _join(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, ArgumentsPart):
        return ArgumentsPart(first.index, "".join(part.json for part in run if isinstance(part, ArgumentsPart)))
    text = "".join(part.text for part in run if isinstance(part, TextPart | ReasoningPart))
    return TextPart(text) if isinstance(first, TextPart) else ReasoningPart(text)


# Parsers over parsers.


class Behind:
    """Gives the content that `outer` finds to `inner`, which looks for calls in it."""

    def __init__(self, outer: AnswerParser, inner: AnswerParser) -> None:
        self._outer = outer
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        return self._pass_on(self._outer.push(text))

    def finish(self) -> list[Part]:
        return [*self._pass_on(self._outer.finish()), *self._inner.finish()]

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        passed: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart):
                passed += self._inner.push(part.text)
            else:
                passed.append(part)
        return passed


class FirstCall:
    """Leaves out every call of `parser` but the first, for a request that allows one."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        return _without_later_calls(self._parser.push(text))

    def finish(self) -> list[Part]:
        return _without_later_calls(self._parser.finish())


def _without_later_calls(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, ToolCallPart | ArgumentsPart) and part.index)]


# One choice's answer, put together from its parts and counted.


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

    def message(self, echo: str, custom_tools: Collection[str] = ()) -> AssistantMessage:
        """The answer as a whole; `echo` begins its content. `custom_tools`: names of tools that take free text."""
        content = echo + "".join(self._text)
        calls = [
            _custom_call(call, arguments)
            if call.name in custom_tools
            else AnsweredToolCall(call.id, CalledFunction(call.name, "".join(arguments)))
            for call, arguments in self.calls
        ]
        reasoning = "".join(self._reasoning) or msgspec.UNSET
        return AssistantMessage(
            content=content or (None if calls else ""),
            tool_calls=calls or msgspec.UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )


def _custom_call(call: ToolCallPart, arguments: Iterable[str]) -> AnsweredCustomCall:
    read = FreeformInput()
    text = "".join(map(read.push, arguments)) + read.finish()
    return AnsweredCustomCall(call.id, CalledCustomTool(call.name, text))
