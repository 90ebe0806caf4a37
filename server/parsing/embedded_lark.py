"""`embeddable`: a client's Lark grammar as rules that can stand among others, where a line break ends what it matches.

A grammar of a custom tool's input is written into that of a call by `LarkWriter.embedded`.
"""

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<alias>->[ \t]*\w+)
    | (?P<imported>%import[ \t]+common\.(?P<terminal>[A-Z_]+)[ \t]*(?=\n|$))
    | (?P<name>[A-Za-z_]\w*)
    | (?P<repeated>\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    | (?P<plain>[\s:|()\[\]*+?!~0-9]+)
    """,
    re.VERBOSE,
)
_RULE = re.compile(r"[ \t]*[?!]?(\w+)[ \t]*:")
_ONE_LINE = frozenset({"LF", "DIGIT", "INT", "NUMBER", "LETTER", "WORD", "CNAME", "HEXDIGIT", "WS_INLINE"})
"""Terminals of Lark's library that match no line break, or nothing else."""
_MANY_LINES = re.compile(r"\\[nrsDWSpPx]|\[\^|\(\?[a-z-]*s|\n")
"""Found in a regular expression that may match a line break with other characters."""


class Embeddable(NamedTuple):
    """A grammar whose names are still its own."""

    pieces: tuple[tuple[str, str], ...]
    """Kind and text of its tokens."""
    imports: frozenset[str]


def embeddable(lark: str) -> Embeddable | None:
    """The grammar's parts; None if it uses what cannot stand among other rules.

    Terminals are matched as far as they go. One that may match line breaks among other characters would run over the
    marker behind the input, which begins with a line break: a call could not end.
    """
    pieces: list[tuple[str, str]] = []
    imports: set[str] = set()
    at = 0
    while at < len(lark):
        match = _TOKEN.match(lark, at)
        if match is None or match.end() == at:
            return None
        kind, text, at = str(match.lastgroup), match[0], match.end()
        if match["imported"]:
            imports.add(match["terminal"])
        elif kind == "regex" and (_MANY_LINES.search(text) or "s" in text.rpartition("/")[2]):
            return None
        elif kind not in ("comment", "alias"):
            pieces.append((kind, text))
    heads = {match[1] for match in map(_RULE.match, lark.splitlines()) if match}
    if "start" not in heads or not imports <= _ONE_LINE:
        return None
    return Embeddable(tuple(pieces), frozenset(imports))


def renamed(grammar: Embeddable, prefix: str) -> str:
    """The rules of `grammar`, with `prefix` before its names: in capitals before those of terminals."""

    def rename(name: str) -> str:
        if name in grammar.imports:
            return name
        return f"{prefix.upper() if name.isupper() else prefix}{name}"

    return "".join(rename(text) if kind == "name" else text for kind, text in grammar.pieces)
