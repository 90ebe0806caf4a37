"""`LarkWriter`: writes the llguidance grammars of dialects. Used by the dialects' `calls` and by `AnswerFormat`."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

ANY_TEXT = "/(?s:.*)/"

_WHITESPACE = {"whitespace_pattern": r"[ \n]{0,2}"}
"""Between the tokens of JSON: enough for every usual style, and no room to stay in for ever."""


class LarkWriter:
    """A grammar under construction: rules are added, and referred to by the names that are returned.

    Markers that are special tokens of the model's vocabulary are written as tokens, for text never spells those; all
    others as text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the markers that are special tokens."""
        self._special = special
        self._split = re.compile("|".join(map(re.escape, special))) if special else None
        self._rules: list[str] = []

    def spelled(self, text: str) -> str:
        """An expression that matches `text` and nothing else."""
        if self._split is None:
            return _literal(text)
        pieces = []
        at = 0
        for match in self._split.finditer(text):
            pieces += [_literal(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(filter(None, [*pieces, _literal(text[at:])]))

    def until(self, marker: str, text: str = ANY_TEXT) -> str:
        """What matches `text`, a terminal's body, up to the first `marker` and over it."""
        if marker in self._special:
            return f"{self.terminal(text)} {self.spelled(marker)}"
        return self.rule(f"{text} {_literal(marker)}", "[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression for the JSON values that `schema` allows."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _WHITESPACE}))

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def terminal(self, body: str) -> str:
        """The name of a new terminal, which is matched as a whole."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def grammar(self, start: str) -> str:
        """The grammar's text."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def literal_pattern(text: str) -> str:
    """A regular expression that matches `text` and nothing else."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _literal(text: str) -> str:
    # Lark's strings are JSON's, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f") if text else ""
