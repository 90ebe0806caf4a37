"""MiniMax-M3: `<tool_call><invoke name="f"><key>value</key></invoke></tool_call>`, each tag after `]<]minimax[>[`.

A tag has the name of its argument. Members of objects, and items of lists, whose name is `item`, are nested tags.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.parsing.grammar import FreeText, Function, LarkWriter, Written, argument_sequence, bare_value
from server.parsing.json_repair import resolved, schema_types
from server.parsing.parser import Markers, Part, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat_tools import ToolUse

PREFIX = "]<]minimax[>["
BEGIN, END = f"{PREFIX}<tool_call>", f"{PREFIX}</tool_call>"
INVOKE = f'{PREFIX}<invoke name="'
OPENING, CLOSING = f"{PREFIX}<", f"{PREFIX}</"
ITEM = "item"
_BEGIN, _PREFIX, _CLOSING = Markers(BEGIN, INVOKE), Markers(PREFIX), Markers(CLOSING)
_FUNCTION, _NAME = re.compile(r'[^"<>]*'), re.compile(r"[^<>]*")
_SPACE = " \t\r\n"
_SPACED = re.compile(re.escape(PREFIX) + r"\s{1,8}(?=<)")
_SPACED_END = re.compile(re.escape(PREFIX) + r"\s{0,8}$")
_STRING = frozenset({"string"})
_KEYS = r"[^\s<>/]([^<>]*[^\s<>])?"
_DEPTH = 8
"""Most nested references, unions and levels that are resolved: a schema may refer to itself."""


@dataclass(slots=True)
class _Open:
    """An object or list that is being read."""

    tag: str
    bracket: str
    """The closing bracket."""
    schema: Any
    num_items: int = 0


class MiniMaxM3Parser(ToolCallParser):
    """The tool's schema decides whether nested tags are members or items. Without a schema, `item` is an item.

    Text up to the closing tag of its own argument is a string, whatever tags it has. A closing tag also closes the
    tags inside it that are open, and the end of the block closes all; a closing tag of a name that is not open closes
    the innermost. The tags around all calls may be missing, and white space may separate the prefix from its tag.
    """

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._root: Mapping[str, Any] = {}
        """The schema of the call that is being read."""
        self._held = ""
        """The end of the text so far, if it is a prefix whose tag has not come yet."""

    def push(self, text: str) -> list[Part]:
        text = _SPACED.sub(PREFIX, self._held + text)
        match = _SPACED_END.search(text, max(0, len(text) - len(PREFIX) - 8))
        end = match.start() if match is not None else len(text) - _PREFIX.held(text, 0)
        self._held = text[end:]
        return super().push(text[:end])

    def finish(self, *, cut_off: bool = False) -> list[Part]:
        self._feed.add(self._held)
        return super().finish(cut_off=cut_off)

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
        opened = [_Open("invoke", "}", self._root)]
        before, separator = "{", ""
        while opened:
            innermost = opened[-1]
            feed.begin_record()
            yield from feed.skip_whitespace()
            if (yield from self._feed.comes(END)) and all(each.tag != "tool_call" for each in opened):
                feed.end_record()
                self._add_arguments(before + _brackets(opened))
                return True
            if (yield from feed.take_marker(CLOSING)):
                name = yield from self._end_tag(opened, before)
                if name is None:
                    return False
                feed.end_record()
                closed = _closed_by(name, opened)
                self._add_arguments(before + _brackets(closed))
                del opened[-len(closed) :]
                before, separator = "", ", "
                continue
            name = yield from self._begin_tag(opened, before)
            if not name:
                return False
            before += separator
            if innermost.bracket == "}":
                before += f"{json.dumps(name, ensure_ascii=False)}: "
                part = _part(innermost.schema, self._root, name)
            else:
                part = _part(innermost.schema, self._root, innermost.num_items)
                innermost.num_items += 1
            types = schema_types(part, self._root)
            space = ""
            if types != _STRING:
                space = yield from feed.skip(_SPACE)
                if (yield from self._feed.comes(OPENING)) and not (yield from self._feed.comes(CLOSING)):
                    is_list = yield from self._opens_list(types)
                    self._add_arguments(before + ("[" if is_list else "{"))
                    opened.append(_Open(name, "]" if is_list else "}", part))
                    before, separator = "", ""
                    continue
            self._add_arguments(before)
            before, separator = "", ", "
            end = Markers(f"{CLOSING}{name}>") if "string" in types else _CLOSING
            if not (yield from self._stream_typed(types, end, lead=space)):
                return False
            if end is _CLOSING:
                feed.begin_record()
                if (yield from self._end_tag(opened, before, spelled=CLOSING)) is None:
                    return False
                feed.end_record()
        return True

    def _begin_tag(self, opened: Sequence[_Open], before: str) -> Waiting[str]:
        """Read an opening tag, which is being recorded. Returns its name; empty if the arguments end here."""
        feed = self._feed
        if not (yield from feed.take_marker(OPENING)):
            if not (yield from self._cut_off(CLOSING)):
                self._fail_arguments(opened, before)
            return ""
        name = (yield from feed.take_word(_NAME)).strip()
        if name and (yield from feed.take_marker(">")):
            feed.end_record()
            return name
        if (yield from feed.next_character()):
            self._fail_arguments(opened, before)
        else:
            feed.end_record()
        return ""

    def _end_tag(self, opened: Sequence[_Open], before: str, spelled: str = "") -> Waiting[str | None]:
        """Read the rest of a closing tag. Returns its name; None if it is incomplete. `spelled` is its part that is
        not recorded."""
        feed = self._feed
        name = yield from feed.take_word(_NAME)
        if (yield from feed.take_marker(">")):
            return name.strip()
        if (yield from feed.next_character()):
            self._fail_arguments(opened, before, spelled)
        else:
            feed.end_record()
        return None

    def _opens_list(self, types: frozenset[str]) -> Waiting[bool]:
        """Return whether the next tag is an item of a list."""
        if ("array" in types) != ("object" in types):
            return "array" in types
        return (yield from self._feed.comes(f"{OPENING}{ITEM}>"))

    def _fail_arguments(self, opened: Sequence[_Open], before: str, spelled: str = "") -> None:
        """Close all open brackets of invalid arguments. `spelled` and the recorded text are content."""
        self._add_arguments(before + _brackets(opened))
        self._add_content(spelled)
        self._record_is_content()


def _brackets(opened: Sequence[_Open]) -> str:
    """Return the brackets that close `opened`."""
    return "".join(each.bracket for each in reversed(opened))


def _closed_by(name: str, opened: Sequence[_Open]) -> Sequence[_Open]:
    """Return the open objects and lists that a closing tag `name` closes: up to the innermost of that name."""
    index = next((index for index in reversed(range(len(opened))) if opened[index].tag == name), len(opened) - 1)
    return opened[index:]


def _part(schema: Any, root: Mapping[str, Any], key: str | int, depth: int = _DEPTH) -> Any:
    """Return the schema of the member `key` of an object of `schema`, or of item `key` of a list; None if it has
    none."""
    found = list(_parts(schema, root, key, set(), depth))
    return found[0] if len(found) == 1 else {"anyOf": found} if found else None


def _parts(schema: Any, root: Mapping[str, Any], key: str | int, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the schemas that `schema` and the members of its unions have for `key`. `seen` has the visited ones."""
    if not isinstance(schema, dict) or id(schema) in seen or not depth:
        return
    seen.add(id(schema))
    if isinstance(schema.get("$ref"), str):
        yield from _parts(resolved(schema["$ref"], root), root, key, seen, depth - 1)
    if isinstance(key, str):
        properties = schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        found = schema.get("additionalProperties") if found is None else found
    else:
        first = schema.get("prefixItems")
        found = first[key] if isinstance(first, list) and key < len(first) else schema.get("items")
    if isinstance(found, dict):
        yield found
    for union in ("anyOf", "oneOf", "allOf"):
        members = schema.get(union)
        for member in members if isinstance(members, list) else ():
            yield from _parts(member, root, key, seen, depth - 1)


# The grammar: a value of its schema, followed by the beginning of its closing tag.


class _Tags:
    """Writes expressions of arguments, for one function's schema."""

    def __init__(self, lark: LarkWriter, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root
        self._written = Written()

    def members(self, schema: Mapping[str, Any], depth: int = _DEPTH) -> str:
        return argument_sequence(self._lark, schema, lambda key, value: self._tag(key, value, depth))

    def _tag(self, key: str, schema: Any, depth: int) -> str:
        begin, end = self._lark.spelled(OPENING), self._lark.spelled(">")
        return f"{begin} {key} {end} {self._value(schema, depth - 1)} {key} {end}"

    def _value(self, schema: Any, depth: int) -> str:
        return self._written.once(schema, depth, lambda: self._lark.rule(self._written_value(schema, depth)))

    def _written_value(self, schema: Any, depth: int) -> str:
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
