"""`LarkWriter`: writes the llguidance grammars of dialects. Used by the dialects' `calls` and by `AnswerFormat`."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from server.parsing.embedded_lark import TextGrammar
from server.parsing.json_repair import resolved
from server.schemas.chat import Tool, ToolUse

ANY_TEXT = "/(?s:.*)/"

_GAP = r"[ \n]{0,2}"
_WHITESPACE = {"whitespace_pattern": _GAP}
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
        self._imports: set[str] = set()

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
        token = self._split.search(marker) if self._split is not None else None
        if token is None:
            return self.rule(f"{text} {_literal(marker)}", "[lazy]")
        return self.ended(text, marker)

    def ended(self, text: str, end: str) -> str:
        """An expression for `text`, a terminal's body that excludes `end`, followed by `end`."""
        token = self._split.search(end) if self._split is not None else None
        if token is None or not token.start():
            return f"{self.terminal(text)} {self.spelled(end)}"
        # The terminal includes the part of `end` before the token; otherwise it would match that part as text.
        return f"{self.terminal(f'({text}) {_literal(end[: token.start()])}')} {self.spelled(end[token.start() :])}"

    def recursive(self, body: Callable[[str], str]) -> str:
        """The name of a new rule whose `body`, made from that name, may refer to it."""
        name = f"r{len(self._rules)}"
        self._rules.append("")
        self._rules[int(name[1:])] = f"{name}: {body(name)}"
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression for the JSON values that `schema` allows."""
        if isinstance(schema, FreeText):
            return self.terminal(f'"\\"" {self.text(schema.grammar, escaped=True)} "\\""')
        properties = schema.get("properties")
        if isinstance(properties, dict) and len(properties) == 1:
            [(key, value)] = properties.items()
            if isinstance(value, FreeText):
                opening = f"/\\{{{_GAP}{literal_pattern(json.dumps(key))}{_GAP}:{_GAP}/"
                return self.rule(f"{opening} {self.json(value)} /{_GAP}\\}}/")
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _WHITESPACE}))

    def text(self, grammar: TextGrammar, *, escaped: bool) -> str:
        """The name of a new terminal for the texts of a client's grammar; `escaped`: as a JSON string holds them."""
        prefix = f"G{len(self._rules)}_"
        self._rules.append(grammar.terminals(prefix, escaped=escaped))
        return f"{prefix}START"

    def embedded(self, grammar: TextGrammar) -> str:
        """An expression for the texts of a client's grammar whose rules may refer to themselves."""
        prefix = f"g{len(self._rules)}_"
        self._rules.append(grammar.rules(prefix))
        self._imports |= grammar.imports
        return f"{prefix}start"

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
        imports = [f"%import common.{name}" for name in sorted(self._imports)]
        return "\n".join([f"start: {start}", *self._rules, *imports, ""])


def literal_pattern(text: str) -> str:
    """A regular expression that matches `text` and nothing else."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _literal(text: str) -> str:
    # Lark's strings are JSON's, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f") if text else ""


# Calls as the dialects' grammars need them: functions, and arguments one by one.

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
_DEPTH = 8
"""References and unions followed inside one another."""


class FreeText(dict[str, Any]):
    """The schema of a string that is free text after a client's grammar."""

    def __init__(self, lark: str) -> None:
        super().__init__(type="string")
        self._lark = lark

    @cached_property
    def grammar(self) -> TextGrammar:
        """The grammar, which is read where it is written into another: that may take long."""
        return TextGrammar.read(self._lark)


class Function(msgspec.Struct, frozen=True):
    """A function that a grammar allows to be called."""

    name: str
    schema: dict[str, Any]
    """Schema of its arguments, an object."""


def enforced_functions(use: ToolUse) -> list[Function] | None:
    """The functions that may be called and what their arguments are held to; None where nothing is promised."""
    promised = any(_is_strict(tool) or tool.function.name in use.free_texts for tool in use.tools)
    if not (use.forced or promised or (use.restricted and use.tools)):
        return None
    return allowed_functions(use)


def allowed_functions(use: ToolUse) -> list[Function]:
    """The functions that may be called; arguments of those that are neither forced nor strict are any object."""
    return [_allowed(tool, use) for tool in use.tools]


def _allowed(tool: Tool, use: ToolUse) -> Function:
    name = tool.function.name
    if (lark := use.free_texts.get(name)) is not None:
        (argument,) = (tool.function.parameters or {}).get("properties", {})
        schema = {"properties": {argument: FreeText(lark)}, "required": [argument], "additionalProperties": False}
        return Function(name, {"type": "object", **schema})
    return _enforced(tool) if use.forced or _is_strict(tool) else Function(name, ANY_OBJECT)


def _is_strict(tool: Tool) -> bool:
    return tool.function.strict is True


def _enforced(tool: Tool) -> Function:
    """`tool` with the schema that its arguments are held to: what that does not name is left out."""
    schema = tool.function.parameters
    if schema is None:
        return Function(tool.function.name, {"type": "object", "properties": {}, "additionalProperties": False})
    schema = {**schema, "type": "object"}
    if "properties" in schema and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    return Function(tool.function.name, schema)


def part_of(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, a part of `root`, as one that stands alone."""
    if isinstance(schema, FreeText):
        return schema
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**definitions, **schema} if isinstance(schema, dict) else definitions


def argument_sequence(
    lark: LarkWriter,
    schema: Mapping[str, Any],
    argument: Callable[[str, Any], str],
    separator: str = "",
) -> str:
    """An expression for arguments one by one, in the schema's order; those not required may be missing.

    `argument` gives the expression of one, from an expression of its key and its schema. Where the schema names no
    arguments, any may come.
    """
    properties = schema.get("properties")
    properties = dict(properties) if isinstance(properties, dict) else {}
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    properties |= {key: True for key in required if key not in properties}
    gap = lark.spelled(separator)
    if not properties:
        if schema.get("additionalProperties") is False or "properties" in schema:
            return ""
        any_argument = lark.rule(argument(lark.rule(_ANY_KEY), True))
        return f"({any_argument} ({gap} {any_argument})*)?"
    # From the last argument to the first: what may follow where some came before, and where none did.
    behind, alone = "", ""
    for key in reversed(properties):
        one = lark.rule(argument(lark.spelled(key), properties[key]))
        first = lark.rule(f"{one} {behind}")
        if key in required:
            behind, alone = lark.rule(f"{gap} {one} {behind}"), first
        else:
            alone = lark.rule(f"{first} | {alone or _NOTHING}")
            behind = lark.rule(f"({gap} {one})? {behind}")
    return alone


_NOTHING = '""'


def bare_value(
    lark: LarkWriter,
    schema: Any,
    root: Mapping[str, Any],
    end: str,
    before: str = "",
    openings: tuple[str, str] = ("", ""),
) -> str:
    """An expression for a value that is written as bare text if it is a string and as JSON if not, and for `end`.

    `end` is the marker after the value, `before` the text between the two. `openings` are the texts before a
    string, and before any other value.
    """
    return lark.any_of(_bare_values(lark, schema, root, end, before, openings, _DEPTH))


def _bare_values(
    lark: LarkWriter,
    schema: Any,
    root: Mapping[str, Any],
    end: str,
    before: str,
    openings: tuple[str, str],
    depth: int,
) -> list[str]:
    of_text, of_json = (lark.spelled(opening) for opening in openings)

    def members(schemas: Iterable[Any]) -> list[str]:
        return [
            value for schema in schemas for value in _bare_values(lark, schema, root, end, before, openings, depth - 1)
        ]

    if isinstance(schema, FreeText):
        if schema.grammar.is_recursive:
            return [f"{of_text} {lark.embedded(schema.grammar)} {lark.spelled(before + end)}"]
        text = lark.text(schema.grammar, escaped=False)
        return [f"{of_text} {lark.until(end, f'{text} {json.dumps(before)}' if before else text)}"]

    def as_json() -> str:
        return f"{of_json} {lark.json(part_of(schema, root))} {lark.spelled(before + end)}"

    if schema is True or schema == {}:
        as_text = f"{of_text} {bare_string(lark, {}, end, before)}"
        return [as_text] if of_text == of_json else [as_text, as_json()]
    if isinstance(schema, dict) and depth:
        if isinstance(schema.get("$ref"), str):
            return members([resolved(schema["$ref"], root)])
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list) and schema[union]:
                return members(schema[union])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return members({**schema, "type": kind} for kind in kinds)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values) and kinds in (None, "string"):
            return [lark.spelled(openings[0] + value + before + end) for value in values]
        if kinds == "string":
            return [f"{of_text} {bare_string(lark, schema, end, before)}"]
    return [as_json()]


def bare_string(lark: LarkWriter, schema: Mapping[str, Any], end: str, before: str = "") -> str:
    """An expression for a string that `schema` allows, as bare text, followed by `before` and the marker `end`."""
    low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    limits = []
    if low or high is not None:
        limits.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
    if isinstance(pattern, str):
        limits.append(f"/{_whole(pattern)}/")
    if not limits:
        return lark.until(end, f"{ANY_TEXT} {json.dumps(before)}" if before else ANY_TEXT)
    limits.append(f"~/(?s:.*){literal_pattern(end)}(?s:.*)/")
    return lark.ended(" & ".join([ANY_TEXT, *limits]), before + end)


def _whole(pattern: str) -> str:
    """`pattern`, which may match anywhere in a string, as one that matches the whole."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not end else inner
    return f"{begin}({inner}){end}".replace("/", "\\/")
