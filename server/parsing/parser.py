"""Parses a model's text into the parts of an answer: content, reasoning, calls and their arguments.

In this order: the parts; `Feed` and `FedParser`, the base of all dialects' parsers; parsers that combine others; and
`AnswerInParts`, the answer of one choice, which the renderers of chat completions and responses use.
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

_LONGEST_WORD = 256
"""Most characters of a name that `Feed.take_word` reads."""


class TextPart(msgspec.Struct, frozen=True):
    """A further piece of the answer's content."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True):
    """A further piece of the model's reasoning."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True):
    """The beginning of tool call number `index`, counted from 0."""

    index: int
    id: str
    name: str


class ArgumentsPart(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of call `index`'s arguments."""

    index: int
    json: str


Part: TypeAlias = TextPart | ReasoningPart | ToolCallPart | ArgumentsPart


class AnswerParser(Protocol):
    """Parses one choice's text incrementally. Apart from where parts are cut, the result does not depend on how the
    text is divided into pushes."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` adds. Only text that may become a marker is held back."""

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        """Return the parts that were held back, at the end of the text, which may be anywhere.

        `cut_off`: the model did not end the text itself. A call is then left out if the text ends before its name is
        known.
        """


# A parser is a generator that is written as if all text were available; it yields where it needs more text.
# `FedParser` runs it over a `Feed`.

Result = TypeVar("Result")
Waiting: TypeAlias = Generator[None, None, Result]
"""A generator that waits for text with each `yield`, and returns a result."""

_WHITESPACE = re.compile(r"\s*")


class Markers:
    """Strings to search for in a growing text. No marker may be a prefix of another."""

    def __init__(self, *markers: str) -> None:
        self.find = re.compile("|".join(map(re.escape, markers))).search
        self._longest = max(map(len, markers)) - 1
        self._openings = frozenset(marker[0] for marker in markers)
        self._beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))

    def held(self, text: str, at: int) -> int:
        """Return the length of the longest suffix of `text[at:]` that is a proper prefix of a marker."""
        tail = text[max(at, len(text) - self._longest) :] if self._longest else ""
        if self._openings.isdisjoint(tail):
            return 0
        return next((len(tail) - skip for skip in range(len(tail)) if tail[skip:] in self._beginnings), 0)


class Feed:
    """The received text. `text[at:]` is not read yet.

    Each character is examined a bounded number of times, however the text is divided: a generator that waits for more
    text continues where it was, and only words of bounded length are examined again.
    """

    __slots__ = ("_record", "at", "cut_off", "ended", "in_marker", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut_off = False
        """Whether the text has ended and the model did not end it itself."""
        self.in_marker = False
        """Whether the text has ended within a marker that was expected."""
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def more(self) -> Waiting[bool]:
        """Wait for more text. Returns False at the end of the text."""
        if self.ended:
            return False
        yield
        return True

    def take(self, length: int) -> str:
        taken = self.text[self.at : self.at + length]
        self.at += length
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_all(self) -> str:
        return self.take(len(self.text) - self.at)

    def begin_record(self) -> None:
        """Record the text that is read from now on, because it is content if it proves not to be a call."""
        self._record = []

    def end_record(self) -> str:
        """Stop recording, and return the text that was read since `begin_record`."""
        kept, self._record = "".join(self._record or ()), None
        return kept

    def next_character(self) -> Waiting[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_whitespace(self) -> Waiting[str]:
        """Read white space, and return the next character without reading it."""
        while True:
            match = _WHITESPACE.match(self.text, self.at)
            assert match is not None
            self.take(match.end() - self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def skip(self, characters: str) -> Waiting[str]:
        """Read the longest run of `characters`, and return it."""
        skipped = []
        while (character := (yield from self.next_character())) and character in characters:
            skipped.append(self.take(1))
        return "".join(skipped)

    def take_marker(self, marker: str) -> Waiting[bool]:
        """Read `marker` if it follows. Returns whether it did."""
        if not (yield from self.comes(marker)):
            return False
        self.take(len(marker))
        return True

    def comes(self, marker: str) -> Waiting[bool]:
        """Return whether `marker` follows. It is not read."""
        while not self.text.startswith(marker, self.at):
            if not marker.startswith(self.text[self.at :]):
                return False
            if not (yield from self.more()):
                self.in_marker = True
                return False
        return True

    def take_word(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Read and return the longest match of `pattern`, a repeated class of characters; empty if it is longer than
        `_LONGEST_WORD`."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match is not None else self.at
            if end - self.at > _LONGEST_WORD:
                return ""
            if end < len(self.text) or not (yield from self.more()):
                return self.take(end - self.at)

    def take_until(self, markers: Markers, pieces: list[str]) -> Waiting[str]:
        """Read up to and including a marker; append the text to `pieces`. Returns the marker; empty at the end of the
        text."""
        while True:
            piece, marker = self.step_until(markers)
            if piece:
                pieces.append(piece)
            if marker or not (yield from self.more()):
                pieces.append("" if marker else self.take_all())
                return marker

    def step_until(self, markers: Markers) -> tuple[str, str]:
        """Read the available text up to and including a marker. Returns the text, and the marker or an empty
        string."""
        match = markers.find(self.text, self.at)
        if match is not None:
            return self.take(match.start() - self.at), self.take(match.end() - match.start())
        return self.take(len(self.text) - self.at - markers.held(self.text, self.at)), ""


class FedParser:
    """Base of parsers: runs `_read` on the text as it is pushed, and returns the parts that it appends to `_parts`."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._parts: list[Part] = []
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        self._feed.add(text)
        return self._advance()

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        self._feed.ended = True
        self._feed.cut_off = cut_off
        return self._advance()

    def _read(self) -> Waiting[None]:
        """Parse the whole text. Returns only at the end of the text."""
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
    """Join consecutive parts of the same kind."""
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


# Parsers that combine other parsers.


class ChainedParsers:
    """Passes the content that `outer` finds to `inner`, which searches it for calls."""

    def __init__(self, outer: AnswerParser, inner: AnswerParser) -> None:
        self._outer = outer
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        return self._pass_on(self._outer.push(text))

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        return [*self._pass_on(self._outer.finish(cut_off=cut_off)), *self._inner.finish(cut_off=cut_off)]

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        passed: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart):
                passed += self._inner.push(part.text)
            else:
                passed.append(part)
        return passed


class FirstCall:
    """Drops every call of `parser` but the first, for a request that allows only one."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Part]:
        return _without_later_calls(self._parser.push(text))

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        return _without_later_calls(self._parser.finish(cut_off=cut_off))


def _without_later_calls(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, ToolCallPart | ArgumentsPart) and part.index)]


# The answer of one choice, assembled from its parts.


class ReasoningTokens:
    """Counts reasoning tokens. Tokens whose text is held back are counted once it proves to be reasoning."""

    def __init__(self) -> None:
        self.count = 0
        self._inside = False
        self._waiting = 0

    def add(self, parts: Sequence[Part], num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens that added `parts`."""
        if parts:
            if isinstance(parts[0], ReasoningPart):
                self.count += self._waiting + num_tokens
            self._inside = isinstance(parts[-1], ReasoningPart)
            self._waiting = 0
        elif self._inside:
            self._waiting += num_tokens


class AnswerInParts:
    """Collects the parts that a parser finds."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[tuple[ToolCallPart, list[str]]] = []
        """Calls so far, each with the pieces of its arguments."""
        self._reasoning_tokens = ReasoningTokens()

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._reasoning_tokens.count

    def push(self, steps: Iterable[tuple[str, int]], *, last: bool = False, cut_off: bool = False) -> list[Part]:
        """Return the parts that `steps` add. A step is a text and its number of tokens. `last` adds the held-back
        text; `cut_off` says that the model did not end it itself."""
        parts: list[Part] = []
        for text, num_tokens in steps:
            brought = self._parser.push(text)
            self._reasoning_tokens.add(brought, num_tokens)
            parts += brought
        if last:
            left = self._parser.finish(cut_off=cut_off)
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
        """Push all output of an ended sequence step by step, so that the counts equal those of a stream."""
        self.push(state.steps, last=True, cut_off=state.finish_reason == "length")

    def message(self, echo: str, custom_tools: Collection[str] = ()) -> AssistantMessage:
        """Return the complete message. Its content begins with `echo`. `custom_tools` are names of tools with free
        text."""
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
