"""`LarkWriter`: writes the llguidance grammars of dialects. Used by the dialects' `calls` and by `AnswerFormat`."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from engine.text.structured.spec import MAX_NESTING, InvalidGrammar, encoded_schema
from server.parsing.embedded_lark import TextGrammar
from server.parsing.json_repair import resolved
from server.schemas.chat_tools import Tool, ToolUse

Result = TypeVar("Result")

ANY_TEXT = "/(?s:.*)/"

_GAP = r"[ \n]{0,2}"
_WHITESPACE = {"whitespace_pattern": _GAP}
"""White space allowed between JSON tokens: enough for every usual style, but bounded."""


class LarkWriter:
    """Builds a grammar. Methods that add a rule or terminal return an expression that refers to it.

    Markers that are special tokens of the vocabulary are written as tokens, because text never matches those; all
    other markers are written as text.
    """

    def __init__(self, special: Mapping[str, int], max_bytes: float = math.inf) -> None:
        """`special` has the ids of the markers that are special tokens.

        Methods raise `InvalidGrammar` once the rules have more than `max_bytes` characters: dialects repeat parts of
        a schema, its definitions for each argument, so that a grammar may become very much longer than its schemas.
        """
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._special = special
        self._split = re.compile("|".join(map(re.escape, special))) if special else None
        self._rules: list[str] = []
        self._imports: set[str] = set()

    def spelled(self, text: str) -> str:
        """Return an expression that matches exactly `text`."""
        if self._split is None:
            return _literal(text)
        pieces = []
        at = 0
        for match in self._split.finditer(text):
            pieces += [_literal(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(filter(None, [*pieces, _literal(text[at:])]))

    def until(self, marker: str, text: str = ANY_TEXT) -> str:
        """Return an expression for `text`, a terminal's body, up to and including the first `marker`."""
        token = self._split.search(marker) if self._split is not None else None
        if token is None:
            return self.rule(f"{text} {_literal(marker)}", "[lazy]")
        return self.ended(text, marker)

    def ended(self, text: str, end: str) -> str:
        """Return an expression for `text`, a terminal's body that excludes `end`, followed by `end`."""
        token = self._split.search(end) if self._split is not None else None
        if token is None or not token.start():
            return f"{self.terminal(text)} {self.spelled(end)}"
        # The terminal includes the part of `end` before the token; otherwise it would match that part as text.
        return f"{self.terminal(f'({text}) {_literal(end[: token.start()])}')} {self.spelled(end[token.start() :])}"

    def recursive(self, body: Callable[[str], str]) -> str:
        """Add a rule that may refer to itself: `body` returns its body for its name. Returns the name."""
        name = f"r{len(self._rules)}"
        self._rules.append("")
        self._rules[int(name[1:])] = self._counted(f"{name}: {body(name)}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for the JSON values that `schema` allows."""
        if isinstance(schema, FreeText):
            return self.terminal(f'"\\"" {self.text(schema.grammar, escaped=True)} "\\""')
        properties = schema.get("properties")
        if isinstance(properties, dict) and len(properties) == 1:
            [(key, value)] = properties.items()
            if isinstance(value, FreeText):
                opening = f"/\\{{{_GAP}{literal_pattern(json.dumps(key))}{_GAP}:{_GAP}/"
                return self.rule(f"{opening} {self.json(value)} /{_GAP}\\}}/")
        return self.rule("%json " + encoded_schema({**undescribed(schema), "x-guidance": _WHITESPACE}))

    def text(self, grammar: TextGrammar, *, escaped: bool) -> str:
        """Add a terminal for the texts of a client's grammar, with `escaped` in the form of JSON strings. Returns its
        name."""
        prefix = f"G{len(self._rules)}_"
        self._rules.append(self._counted(grammar.terminals(prefix, escaped=escaped)))
        return f"{prefix}START"

    def embedded(self, grammar: TextGrammar) -> str:
        """Return an expression for the texts of a client's grammar, which may have recursive rules."""
        prefix = f"g{len(self._rules)}_"
        self._rules.append(self._counted(grammar.rules(prefix)))
        self._imports |= grammar.imports
        return f"{prefix}start"

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(dict.fromkeys(expressions)))

    def terminal(self, body: str) -> str:
        """Add a terminal. Returns its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(self._counted(f"{name}: {body}"))
        return name

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(self._counted(f"{name}{options}: {body}"))
        return name

    def _counted(self, rule: str) -> str:
        self._num_bytes += len(rule)
        if self._num_bytes > self._max_bytes:
            raise InvalidGrammar(
                f"in the model's syntax of calls, which repeats definitions for each argument, they have more than "
                f"{self._max_bytes} bytes (max_grammar_bytes); use shorter ones"
            )
        return rule

    def grammar(self, start: str) -> str:
        """Return the text of the grammar."""
        imports = [f"%import common.{name}" for name in sorted(self._imports)]
        return "\n".join([f"start: {start}", *self._rules, *imports, ""])


def literal_pattern(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _literal(text: str) -> str:
    # Lark's strings are JSON's, except for DEL, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f") if text else ""


# Functions and arguments, for the dialects' grammars of calls.

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
_DEPTH = 8
"""Most nested references and unions that are resolved."""


class FreeText(dict[str, Any]):
    """The schema of a string that is free text of a client's grammar."""

    def __init__(self, lark: str) -> None:
        super().__init__(type="string")
        self._lark = lark

    @cached_property
    def grammar(self) -> TextGrammar:
        """The parsed grammar. It is parsed on first use, since that may take long."""
        return TextGrammar.read(self._lark)


_DESCRIPTIONS = frozenset({"description", "title", "$comment"})
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is data and no schema."""


def undescribed(schema: Any, levels: int = MAX_NESTING) -> Any:
    """Return a JSON schema without its descriptions, which are most of it where agents have hundreds of tools.

    What is nested more than `levels` deep stays: such schemas are refused.
    """
    if not levels or not isinstance(schema, dict | list):
        return schema
    levels -= 1
    if isinstance(schema, list):
        return [undescribed(each, levels) for each in schema]
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: undescribed(each, levels) for name, each in value.items()}
        elif not (key in _DESCRIPTIONS and isinstance(value, str)):
            kept[key] = undescribed(value, levels)
    return kept


class Function(msgspec.Struct, frozen=True):
    """A function that a grammar allows to be called."""

    name: str
    schema: dict[str, Any]
    """Schema of the object of its arguments."""


def enforced_functions(use: ToolUse) -> list[Function] | None:
    """Return the functions that may be called, with the schemas to enforce; None if nothing is to be enforced."""
    promised = any(_is_strict(tool) or tool.function.name in use.free_texts for tool in use.tools)
    if not (use.forced or promised or (use.restricted and use.tools)):
        return None
    return allowed_functions(use)


def allowed_functions(use: ToolUse) -> list[Function]:
    """Return the functions that may be called. Unless a function is forced or strict, its arguments are any object."""
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
    """Convert `tool` to a function whose schema allows only the named properties."""
    schema = tool.function.parameters
    if schema is None:
        return Function(tool.function.name, {"type": "object", "properties": {}, "additionalProperties": False})
    schema = {**schema, "type": "object"}
    if "properties" in schema and "patternProperties" not in schema:
        schema.setdefault("additionalProperties", False)
    return Function(tool.function.name, schema)


def part_of(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a part of `root`, with the definitions of `root` that it may refer to."""
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
    """Return an expression for arguments one by one, in the schema's order. Arguments are optional unless required.

    `argument` returns the expression of one argument, from the expression of its key and from its schema. If the
    schema names no arguments, any are allowed.
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
    # From the last argument to the first: `following` matches the rest after an argument, `leading` the rest at the
    # beginning, which has no separator in front.
    following, leading = "", ""
    for key in reversed(properties):
        one = lark.rule(argument(lark.spelled(key), properties[key]))
        first = lark.rule(f"{one} {following}")
        if key in required:
            following, leading = lark.rule(f"{gap} {one} {following}"), first
        else:
            leading = lark.rule(f"{first} | {leading or _NOTHING}")
            following = lark.rule(f"({gap} {one})? {following}")
    return leading


_NOTHING = '""'


def bare_value(
    lark: LarkWriter,
    schema: Any,
    root: Mapping[str, Any],
    end: str,
    before: str = "",
    openings: tuple[str, str] = ("", ""),
) -> str:
    """Return an expression for a value, as bare text if it is a string and else as JSON, and for the marker `end`.

    `before` is the text between value and marker. `openings` are the texts that precede a string, and any other value.
    """
    return lark.any_of(_bare_values(lark, schema, root, end, before, openings, Written(), _DEPTH))


class Written(dict[tuple[int, int], tuple[Any, Any]]):
    """What was written for each schema, by its identity and depth: schemas may refer to one another many times."""

    def once(self, schema: Any, depth: int, write: Callable[[], Result]) -> Result:
        """Return what `write` returned for `schema` at `depth`, and call it the first time."""
        key = (id(schema), depth)
        if key not in self:
            # The schema is kept, so that no other object gets its identity.
            self[key] = schema, write()
        written: Result = self[key][1]
        return written


def _bare_values(
    lark: LarkWriter,
    schema: Any,
    root: Mapping[str, Any],
    end: str,
    before: str,
    openings: tuple[str, str],
    written: Written,
    depth: int,
) -> list[str]:
    of_text, of_json = (lark.spelled(opening) for opening in openings)

    def members(schemas: Iterable[Any]) -> list[str]:
        def of(member: Any) -> list[str]:
            return _bare_values(lark, member, root, end, before, openings, written, depth - 1)

        values = (written.once(member, depth, partial(of, member)) for member in schemas)
        return list(dict.fromkeys(chain.from_iterable(values)))

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
    """Return an expression for a string of `schema` as bare text, followed by `before` and the marker `end`."""
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
    """Extend `pattern`, which may match anywhere in a string, so that it matches the whole string."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not end else inner
    return f"{begin}({inner}){end}".replace("/", "\\/")
