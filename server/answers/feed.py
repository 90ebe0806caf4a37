"""`Feed`: text as it comes, read by parsers that are written as if all of it were there.

A parser is a generator that yields wherever it needs more text; `FedParser` runs it. Used by every dialect.
"""

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from server.answers.parts import ArgumentsPart, Part, ReasoningPart, TextPart

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
