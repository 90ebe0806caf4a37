"""MiniMax-M3: `<tool_call><invoke name="f"><key>value</key></invoke></tool_call>`, each tag after `]<]minimax[>[`.

A tag has the name of its argument. Members of objects, and items of lists, whose name is `item`, are nested tags.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.parsing.grammar import FreeText, Function, LarkWriter, argument_sequence, bare_value
from server.parsing.json_repair import resolved, schema_types
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat import ToolUse

PREFIX = "]<]minimax[>["
BEGIN, END = f"{PREFIX}<tool_call>", f"{PREFIX}</tool_call>"
INVOKE = f'{PREFIX}<invoke name="'
OPENING, CLOSING = f"{PREFIX}<", f"{PREFIX}</"
ITEM = "item"
_BEGIN, _CLOSING = Markers(BEGIN, INVOKE), Markers(CLOSING)
_FUNCTION, _NAME = re.compile(r'[^"<>]*'), re.compile(r"[^\s<>]*")
_SPACE = " \t\r\n"
_STRING = frozenset({"string"})
_KEYS = r"[^\s<>/][^\s<>]*"
_DEPTH = 8
"""Most nested references, unions and levels that are resolved: a schema may refer to itself."""


class MiniMaxM3Parser(ToolCallParser):
    """The tool's schema decides whether nested tags are members or items. Without a schema, `item` is an item.

    A closing tag closes the innermost open tag, whatever its name. The tags around all calls may be missing.
    """

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._root: Mapping[str, Any] = {}
        """The schema of the call that is being read."""

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while begin := (yield from self._content_until(_BEGIN)):
            if begin == BEGIN:
                yield from feed.skip_whitespace()
                if not (yield from feed.take_marker(INVOKE)):
                    self._record_is_content()
                    continue
            while (yield from self._read_call()):
                feed.begin_record()
                yield from feed.skip_whitespace()
                if (yield from feed.take_marker(INVOKE)):
                    continue
                if begin == BEGIN and (yield from feed.take_marker(END)):
                    feed.end_record()
                elif not (yield from self._cut_off(END, INVOKE)):
                    self._record_is_content()
                break

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its tag's name. Returns whether it was complete."""
        name = yield from self._feed.take_word(_FUNCTION)
        if not name or not (yield from self._feed.take_marker('">')):
            self._record_is_content()
            return False
        self._begin_call(name)
        self._root = self._schemas.get(name, {})
        return (yield from self._read_tags())

    def _read_tags(self) -> Waiting[bool]:
        """Read the tags of a call's arguments up to the end of the call. Returns whether it was complete."""
        feed = self._feed
        # The open objects and lists: the closing bracket of each, and the schema of its value.
        opened: list[tuple[str, Any]] = [("}", self._root)]
        before, separator = "{", ""
        while opened:
            bracket, schema = opened[-1]
            feed.begin_record()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(CLOSING)):
                if not (yield from self._end_tag(opened, before)):
                    return False
                feed.end_record()
                opened.pop()
                self._add_arguments(before + bracket)
                before, separator = "", ", "
                continue
            name = yield from self._begin_tag(opened, before)
            if not name:
                return False
            before += separator
            if bracket == "}":
                before += f"{json.dumps(name, ensure_ascii=False)}: "
            part = _part(schema, self._root, name if bracket == "}" else None, _DEPTH)
            types = schema_types(part, self._root)
            space = ""
            if types != _STRING:
                space = yield from feed.skip(_SPACE)
                if (yield from self._comes(OPENING)) and not (yield from self._comes(CLOSING)):
                    is_list = yield from self._opens_list(types)
                    self._add_arguments(before + ("[" if is_list else "{"))
                    opened.append(("]" if is_list else "}", part))
                    before, separator = "", ""
                    continue
            self._add_arguments(before)
            before, separator = "", ", "
            empty = _empty(types)
            if empty and (yield from self._comes(CLOSING)):
                feed.take(len(CLOSING))
                self._add_arguments(empty)
            elif not (yield from self._stream_typed(types, _CLOSING, lead=space)):
                return False
            feed.begin_record()
            if not (yield from self._end_tag(opened, before, spelled=CLOSING)):
                return False
            feed.end_record()
        return True

    def _begin_tag(self, opened: Sequence[tuple[str, Any]], before: str) -> Waiting[str]:
        """Read an opening tag, which is being recorded. Returns its name; empty if the arguments end here."""
        feed = self._feed
        if not (yield from feed.take_marker(OPENING)):
            if not (yield from self._cut_off(CLOSING)):
                self._fail_arguments(opened, before)
            return ""
        name = yield from feed.take_word(_NAME)
        if name and (yield from feed.take_marker(">")):
            feed.end_record()
            return name
        if (yield from feed.next_character()):
            self._fail_arguments(opened, before)
        else:
            feed.end_record()
        return ""

    def _end_tag(self, opened: Sequence[tuple[str, Any]], before: str, spelled: str = "") -> Waiting[bool]:
        """Read the rest of a closing tag. Returns whether it was complete. `spelled` is its part that is not
        recorded."""
        feed = self._feed
        yield from feed.take_word(_NAME)
        if (yield from feed.take_marker(">")):
            return True
        if (yield from feed.next_character()):
            self._fail_arguments(opened, before, spelled)
        else:
            feed.end_record()
        return False

    def _opens_list(self, types: frozenset[str]) -> Waiting[bool]:
        """Return whether the next tag is an item of a list."""
        if ("array" in types) != ("object" in types):
            return "array" in types
        return (yield from self._comes(f"{OPENING}{ITEM}>"))

    def _fail_arguments(self, opened: Sequence[tuple[str, Any]], before: str, spelled: str = "") -> None:
        """Close all open brackets of invalid arguments. `spelled` and the recorded text are content."""
        self._add_arguments(before + "".join(bracket for bracket, _ in reversed(opened)))
        self._add_content(spelled)
        self._record_is_content()


def _part(schema: Any, root: Mapping[str, Any], key: str | None, depth: int) -> Any:
    """Return the schema of the member `key` of an object of `schema`; for None, that of the items of a list."""
    if not isinstance(schema, dict) or not depth:
        return None
    if isinstance(schema.get("$ref"), str):
        return _part(resolved(schema["$ref"], root), root, key, depth - 1)
    if key is None:
        found = schema.get("items")
    else:
        properties = schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        found = schema.get("additionalProperties") if found is None else found
    if isinstance(found, dict):
        return found
    for union in ("anyOf", "oneOf", "allOf"):
        members = schema.get(union)
        for member in members if isinstance(members, list) else ():
            found = _part(member, root, key, depth - 1)
            if found is not None:
                return found
    return None


def _empty(types: frozenset[str]) -> str:
    """Return the JSON value of an empty tag: an empty list or object, or an empty text for other types."""
    if "string" in types:
        return ""
    return "[]" if "array" in types else "{}" if "object" in types else ""


# The grammar: a value of its schema, followed by the beginning of its closing tag.


class _Tags:
    """Writes expressions of arguments, for one function's schema."""

    def __init__(self, lark: LarkWriter, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root

    def members(self, schema: Mapping[str, Any], depth: int = _DEPTH) -> str:
        return argument_sequence(self._lark, schema, lambda key, value: self._tag(key, value, depth))

    def _tag(self, key: str, schema: Any, depth: int) -> str:
        begin, end = self._lark.spelled(OPENING), self._lark.spelled(">")
        return f"{begin} {key} {end} {self._value(schema, depth - 1)} {key} {end}"

    def _value(self, schema: Any, depth: int) -> str:
        lark = self._lark
        if isinstance(schema, FreeText) or not isinstance(schema, dict) or not depth:
            return bare_value(lark, schema, self._root, CLOSING)
        if isinstance(schema.get("$ref"), str):
            return self._value(resolved(schema["$ref"], self._root), depth - 1)
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list) and schema[union]:
                return lark.any_of(self._value(member, depth - 1) for member in schema[union])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return lark.any_of(self._value({**schema, "type": kind}, depth - 1) for kind in kinds)
        if "const" not in schema and "enum" not in schema:
            if kinds == "object" and self._are_tags(schema):
                return f"{lark.rule(self.members(schema, depth))} {lark.spelled(CLOSING)}"
            if kinds == "array":
                return f"{lark.rule(self._items(schema, depth))} {lark.spelled(CLOSING)}"
        return bare_value(lark, schema, self._root, CLOSING)

    def _are_tags(self, schema: Mapping[str, Any]) -> bool:
        """Return whether the names of all members are valid names of tags."""
        properties = schema.get("properties")
        return all(re.fullmatch(_KEYS, key) for key in properties) if isinstance(properties, dict) else True

    def _items(self, schema: Mapping[str, Any], depth: int) -> str:
        lark = self._lark
        item = lark.rule(self._tag(lark.spelled(ITEM), schema.get("items", True), depth))
        high = schema.get("maxItems")
        return f"{item}{{{schema.get('minItems', 0)},{'' if high is None else high}}}"


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a block's calls after its opening tag."""

    def one(function: Function) -> str:
        begin, end = lark.spelled(f"{_LINE}{INVOKE}{function.name}{_QUOTED}"), lark.spelled(f"{CLOSING}invoke>")
        return f"{begin} {_Tags(lark, function.schema).members(function.schema)} {end}"

    call = lark.any_of(map(one, functions))
    return f"{call if once else f'{call}+'} {lark.spelled(_LINE + END)}"


_LINE, _QUOTED = "\n", '">'

TOOL_DIALECTS.register("minimax_m3")(
    ToolDialect(
        MiniMaxM3Parser,
        calls,
        detect=lambda signs: PREFIX in signs.template,
        trigger=BEGIN,
        keys=_KEYS,
        writes_bare_text=True,
        markers=(PREFIX, "<tool_call>", "</tool_call>"),
    )
)
