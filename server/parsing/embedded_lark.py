"""`TextGrammar`: converts a client's Lark grammar of free text to rules within the grammar of a tool call.

A grammar without recursive rules becomes one terminal, which every dialect can use: either unchanged, or such that it
matches the text in the escaped form of a JSON string. Escaping replaces each character by itself or by two or more
characters, so the escaped form of a grammar is the grammar with its strings and character classes escaped. It must be
a single terminal, because the lexer of the grammar library looks one byte ahead: with two terminals, it could not
distinguish a line break at the beginning of the second from another escape in the first.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*)
    | (?P<range>"(?P<low>(?:\\.|[^"\\\n])+)"[ \t]*\.\.[ \t]*"(?P<high>(?:\\.|[^"\\\n])+)")
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<alias>->[ \t]*\w+)
    | (?P<imported>%import[ \t]+common\.(?P<terminal>[A-Z_]+)[ \t]*(?=\n|$))
    | (?P<head>[?!]?(?P<defined>[A-Za-z_]\w*)[ \t]*:)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<repeated>\{[ \t]*\d+[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    | (?P<space>\s+)
    | (?P<plain>[|()\[\]*+?])
    """,
    re.VERBOSE,
)
_DIGITS, _EXPONENT = "[0-9]+", "[eE][+-]?[0-9]+"
_DECIMAL = rf"([0-9]+\.[0-9]*|\.[0-9]+)"  # noqa: F541
_FLOAT = f"({_DIGITS}{_EXPONENT}|{_DECIMAL}({_EXPONENT})?)"
_LIBRARY = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": _DIGITS,
    "SIGNED_INT": f"[+-]?{_DIGITS}",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"({_FLOAT}|{_DIGITS})",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|{_DIGITS})",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
"""Terminals of Lark's standard library, as regular expressions."""

_MANY_LINES = re.compile(r"\\[nrsDWSpPx]|\[\^|\(\?[a-z-]*s|\n")
"""Occurs in regular expressions that may match a line break among other characters."""
_LINE_BREAKS = frozenset({"CR", "NEWLINE", "WS"})


class NotEmbeddable(ValueError):
    """Calls cannot be constrained by the grammar. The message is a clause whose subject is the grammar."""


class TextGrammar(NamedTuple):
    """A parsed grammar, before its names are changed."""

    definitions: Mapping[str, tuple[tuple[str, str], ...]]
    """For each rule or terminal (in capitals), kind and text of the tokens of its definition."""
    imports: frozenset[str]

    @classmethod
    def read(cls, lark: str) -> Self:
        """Parse a grammar. Raises `NotEmbeddable` if it uses constructs that cannot be embedded in another grammar."""
        definitions: dict[str, list[tuple[str, str]]] = {}
        imports: set[str] = set()
        body: list[tuple[str, str]] | None = None
        at = 0
        while at < len(lark):
            match = _TOKEN.match(lark, at)
            if match is None or match.end() == at:
                word = lark[at:].split(None, 1)[0] if lark[at:].strip() else "a control character"
                raise NotEmbeddable(f"it uses {word[:20]}")
            kind, text, at = str(match.lastgroup), match[0], match.end()
            if match["imported"]:
                imports.add(match["terminal"])
            elif match["head"]:
                body = definitions[match["defined"]] = []
            elif kind not in ("comment", "alias") and (body is not None or kind != "space"):
                if body is None:
                    raise NotEmbeddable(f"it begins with {text[:20]}")
                body.append((kind, f"/[{_bound(match['low'])}-{_bound(match['high'])}]/" if match["range"] else text))
        if unknown := sorted(imports - _LIBRARY.keys()):
            raise NotEmbeddable(f"it imports {unknown[0]}")
        if "start" not in definitions:
            raise NotEmbeddable("it has no rule `start`")
        return cls({name: tuple(tokens) for name, tokens in definitions.items()}, frozenset(imports))

    @property
    def is_recursive(self) -> bool:
        """Whether a rule that is reachable from `start` refers to itself, directly or indirectly."""
        done: set[str] = set()
        # Depth-first search without recursion: a client's chain of rules may exceed Python's stack.
        path: list[tuple[str, Iterator[str]]] = [("start", self._names_in("start"))]
        on_path = {"start"}
        while path:
            name, names = path[-1]
            following = next((each for each in names if each not in done), None)
            if following is None:
                path.pop()
                on_path.discard(name)
                done.add(name)
            elif following in on_path:
                return True
            else:
                path.append((following, self._names_in(following)))
                on_path.add(following)
        return False

    def _names_in(self, name: str) -> Iterator[str]:
        return (text for kind, text in self.definitions.get(name, ()) if kind == "name")

    @property
    def ends_before_a_line(self) -> bool:
        """Whether a line break after a match can be distinguished from the matched text.

        Terminals match as much as possible. A terminal that may match line breaks among other characters would match
        past a marker that begins with a line break, and the call could not end.
        """
        regexes = [text for tokens in self.definitions.values() for kind, text in tokens if kind == "regex"]
        crosses = any(_MANY_LINES.search(each) or "s" in each.rpartition("/")[2] for each in regexes)
        return not crosses and not self.imports & _LINE_BREAKS

    def rules(self, prefix: str) -> str:
        """Return the rules with `prefix` added to their names, in capitals for terminals.

        They begin with `start`, and include the grammar's imports.
        """

        def rename(name: str) -> str:
            if name in self.imports:
                return name
            return f"{prefix.upper() if name.isupper() else prefix}{name}"

        return "\n".join(
            f"{rename(name)}: {''.join(rename(text) if kind == 'name' else text for kind, text in tokens).strip()}"
            for name, tokens in self.definitions.items()
        )

    def terminals(self, prefix: str, *, escaped: bool) -> str:
        """Return the grammar as terminals. `prefix`, in capitals, is added to their names; `prefix` + START matches a
        text.

        With `escaped`, they match texts in the escaped form of JSON strings. Raises `NotEmbeddable` for recursive
        rules, and for regular expressions whose characters cannot be determined.
        """
        if self.is_recursive:
            raise NotEmbeddable("its rules refer to themselves")
        written = {name: _LIBRARY[name] for name in self.imports if name not in self.definitions}
        lines = [f"{_terminal(prefix, name)}: {_regex(f'/{body}/', escaped)}" for name, body in written.items()]
        lines += [
            f"{_terminal(prefix, name)}: {_with_empty_ones(_body(tokens, prefix, escaped))}"
            for name, tokens in self.definitions.items()
        ]
        return "\n".join(lines)


def _terminal(prefix: str, name: str) -> str:
    """Return the name of the terminal for a rule or terminal. It is unique even if two names differ only in case."""
    if name == "start":
        return f"{prefix}START"
    return f"{prefix}{'T' if name.isupper() else 'R'}_{name.upper()}"


def _body(tokens: tuple[tuple[str, str], ...], prefix: str, escaped: bool) -> str:
    def written(kind: str, text: str) -> str:
        match kind:
            case "name":
                return _terminal(prefix, text)
            case "string":
                return _string(text) if escaped else text
            case "regex" | "range":
                return _regex(text, escaped)
        # In Lark, square brackets enclose optional parts.
        return text.replace("[", "(").replace("]", ")?").replace("\n", " ")

    return "".join(written(kind, text) for kind, text in tokens)


_ALTERNATIVES = re.compile(r"""(?P<whole>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\])+/[a-z]*)|(?P<open>[(|]|^)\s*(?=[|)]|$)""")


def _with_empty_ones(body: str) -> str:
    """Return `body` with an explicit empty string for each empty alternative."""
    return _ALTERNATIVES.sub(lambda match: match["whole"] or f'{match["open"]} ""', body)


# Strings and regular expressions, escaped.

_WIDE = "\x80"
"""Represents all characters beyond ASCII, which a JSON string contains unescaped or as UTF-16 escapes."""
_SPECIAL = frozenset(map(chr, (*range(0x20), 0x22, 0x5C))) | {_WIDE}
"""Characters that JSON strings escape. Those beyond ASCII may also be unescaped."""
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_LONG = _SPECIAL - _SHORT.keys() - {_WIDE}
_HEX = "[0-9a-fA-F]"
_ANY_WIDE = (
    rf"(?-i:\\u)(?:00[89a-fA-F]{_HEX}|0[1-9a-fA-F]{_HEX}{{2}}|[1-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
    rf"|[dD][89abAB]{_HEX}{{2}}(?-i:\\u)[dD][c-fC-F]{_HEX}{{2}})"
)
_ANY_LONG = r"(?-i:\\u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F])"
_NOT_SPECIAL = r"[^\x22\x5c\x00-\x1f]"
_CLASSES = {"d": "", "w": "", "s": "\t\n\v\f\r"}
"""Characters that JSON escapes in each named class."""
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(
    r"\\(?:x\{(?P<braced>[0-9A-Fa-f]{1,6})\}|x(?P<two>[0-9A-Fa-f]{2})|u(?P<four>[0-9A-Fa-f]{4})|(?P<one>.))", re.DOTALL
)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[is]*(?:-[is]+)?)(?P<end>[:)])))?")
_QUANTIFIER = re.compile(r"[*+?|]|\{\d+(?:,\d*)?\}")


def _string(text: str) -> str:
    """Convert a Lark string to an expression that matches its escaped form."""
    content = _decoded(text.removesuffix("i")[1:-1])
    if not content:
        return '""'
    return _slashes("".join(map(_one, content)), "i" if text.endswith("i") else "")


def _decoded(text: str) -> str:
    return _ESCAPE.sub(_escaped_character, text)


def _escaped_character(match: re.Match[str]) -> str:
    """Return the character that an escape sequence denotes."""
    if match["one"] is not None:
        return _CONTROLS.get(match["one"], match["one"])
    code = int(match["braced"] or match["two"] or match["four"], 16)
    return chr(code) if code <= 0x10FFFF else "\ufffd"


def _bound(text: str) -> str:
    """Return the single character at an end of a range. Raises `NotEmbeddable` for a longer text."""
    content = _decoded(text)
    if len(content) != 1:
        raise NotEmbeddable(f"its range has the end {content[:20]}")
    return _character(content)


def _regex(text: str, escaped: bool) -> str:
    """Convert a Lark regular expression to one that matches the escaped form of the same texts."""
    if not escaped:
        return text
    body, _, flags = text[1:].rpartition("/")
    if set(flags) - set("isu"):
        raise NotEmbeddable(f"its regular expression has the flags {flags}")
    return _slashes(_escaped_pattern(body.replace("\\/", "/"), "s" in flags), "i" if "i" in flags else "")


def _slashes(pattern: str, flags: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/{flags}"


def _escaped_pattern(pattern: str, dot_is_all: bool) -> str:
    pieces: list[str] = []
    outer: list[bool] = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if match := _GROUP.match(pattern, at):
            if pattern.startswith("(?", at) and match.end() == at + 1:
                raise NotEmbeddable("its regular expression looks around")
            flags = match["flags"] or ""
            if match["end"] != ")":
                outer.append(dot_is_all)
            on, _, off = flags.partition("-")
            dot_is_all = (dot_is_all or "s" in on) and "s" not in off
            pieces.append(match[0])
            at = match.end()
        elif character == ")":
            dot_is_all = outer.pop() if outer else dot_is_all
            pieces.append(")")
            at += 1
        elif match := _QUANTIFIER.match(pattern, at):
            pieces.append(match[0])
            at = match.end()
        elif character == ".":
            pieces.append(_any_of("(?s:.)", _SPECIAL) if dot_is_all else _any_of(r"[^\n]", _SPECIAL - {"\n"}))
            at += 1
        elif character == "[":
            text, special, at = _class(pattern, at)
            pieces.append(_any_of(text, special))
        elif character == "\\":
            text, special, at = _escape(pattern, at)
            pieces.append(_any_of(text, special) if text[1] == "\\" and text[2] != "x" else _one(_of_class(text)))
        elif character in "^$":
            raise NotEmbeddable(f"its regular expression has the anchor {character}")
        else:
            pieces.append(_one(character))
            at += 1
    return "".join(pieces)


def _any_of(text: str, special: frozenset[str]) -> str:
    """Write an expression for the character class `text`, whose characters in `special` are escaped."""
    plain = text if not special else f"[{text}&&{_NOT_SPECIAL}]" if text.startswith("[") else _NOT_SPECIAL
    if not special:
        return plain
    pieces = [plain]
    if short := special & _SHORT.keys():
        pieces.append(f"(?-i:\\\\[{''.join(_character(_SHORT[each]) for each in sorted(short))}])")
    if _WIDE in special:
        pieces.append(_ANY_WIDE)
    if long := special - _SHORT.keys() - {_WIDE}:
        pieces += [_ANY_LONG] if long == _LONG else map(_one, sorted(long))
    return f"(?:{'|'.join(pieces)})"


def _one(character: str) -> str:
    """Write an expression for the escaped form of one character."""
    if character > "\x7f":
        units = character.encode("utf-16-be", "surrogatepass").hex()
        escape = "".join(f"(?-i:\\\\u)(?i:{units[at : at + 4]})" for at in range(0, len(units), 4))
        return f"(?:{_character(character)}|{escape})"
    if character not in _SPECIAL:
        return _character(character)
    if character in _SHORT:
        return f"(?-i:\\\\{_character(_SHORT[character])})"
    return f"(?-i:\\\\u00)[{ord(character) >> 4:x}](?i:[{ord(character) & 15:x}])"


def _character(character: str) -> str:
    return character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):x}}}"


def _escape(pattern: str, at: int) -> tuple[str, frozenset[str], int]:
    """Parse the escape at index `at`. Returns its class, its special characters, and the index after it."""
    match = _ESCAPE.match(pattern, at)
    if match is None:
        raise NotEmbeddable("its regular expression ends with a backslash")
    one = match["one"] or ""
    if one and one.lower() in _CLASSES:
        special = frozenset(_CLASSES[one.lower()])
        return f"[\\{one}]", special if one.islower() else _SPECIAL - special, match.end()
    if one.isalnum() and one not in _CONTROLS:
        raise NotEmbeddable(f"its regular expression has \\{one}")
    character = _escaped_character(match)
    return f"[{_character(character)}]", frozenset(character) & _SPECIAL, match.end()


def _of_class(text: str) -> str:
    """Return the single character of a class that `_escape` returned for it."""
    return text[1] if len(text) == 3 else chr(int(text[4:-2], 16))


def _class(pattern: str, at: int) -> tuple[str, frozenset[str], int]:
    """Parse the class in brackets at index `at`. Returns it, its special characters, and the index after it."""
    begin = at
    at += 1
    is_negated = pattern.startswith("^", at)
    at += is_negated
    special: set[str] = set()
    highest = ""
    first = True
    while first or not pattern.startswith("]", at):
        first = False
        if at >= len(pattern) or pattern[at] == "[" or pattern.startswith(("&&", "--", "~~"), at):
            raise NotEmbeddable("its regular expression has a class of classes")
        low, named, at = _member(pattern, at)
        special |= named
        highest = max(highest, low or "")
        if low is None or not pattern.startswith("-", at) or pattern.startswith("-]", at):
            continue
        high, _, at = _member(pattern, at + 1)
        if high is None:
            raise NotEmbeddable("its regular expression has a range that ends in a class")
        highest = max(highest, high)
        special |= {each for each in _SPECIAL - {_WIDE} if low <= each <= high}
    if is_negated:
        special = set(_SPECIAL - special)
    if highest > "\x7f":
        # The class has only some characters beyond ASCII: match them unescaped.
        special.discard(_WIDE)
    return pattern[begin : at + 1], frozenset(special), at + 1


def _member(pattern: str, at: int) -> tuple[str | None, frozenset[str], int]:
    """Parse a member of a class. Returns its character, or None for a nested class; its special characters; the index
    after it."""
    if pattern[at] != "\\":
        return pattern[at], frozenset(pattern[at]) & _SPECIAL, at + 1
    text, special, end = _escape(pattern, at)
    if text[1] == "\\" and text[2] != "x":
        return None, special, end
    return _of_class(text), special, end
