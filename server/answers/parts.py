"""The parts of a chat answer, in the order the model writes them; `AnswerParser` finds them in its text.

Used by the renderers of chat completions and responses.
"""

from typing import Protocol, TypeAlias

import msgspec


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
