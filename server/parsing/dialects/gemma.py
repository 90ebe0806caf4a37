"""Gemma 4: `<|tool_call>call:f{key:<|"|>text<|"|>,n:3,of:{k:[1,2]}}<tool_call|>`.

Strings are bare text between two markers; keys, numbers and constants are bare. Objects and lists nest. FunctionGemma
writes the same with other markers: `<start_function_call>call:f{key:<escape>text<escape>}<end_function_call>`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from server.parsing.grammar import (
    ANY_TEXT,
    FreeText,
    Function,
    LarkWriter,
    Written,
    argument_sequence,
    bare_string,
    part_of,
)
from server.parsing.json_repair import mend, resolved
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat_tools import ToolUse

CALL = "call:"
_NAME = re.compile(r"[^\s<>{}:,]*")
_WORD = re.compile(r"[^\s<>{}\[\]:,]*")
_CLOSING = {"{": "}", "[": "]"}


class Form(NamedTuple):
    """The markers of one dialect: of a call's beginning and end, and around a string."""

    begin: str
    end: str
    quote: str


GEMMA = Form("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Form("<start_function_call>", "<end_function_call>", "<escape>")


class GemmaParser(ToolCallParser):
    """Reads a call's object bracket by bracket; several calls follow one another, each between its own markers."""

    def __init__(self, use: ToolUse, form: Form) -> None:
        self._form = form
        self._begin, self._quote = Markers(form.begin), Markers(form.quote)
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._content_until(self._begin)):
            yield from feed.skip_whitespace()
            called = yield from feed.take_marker(CALL)
            name = yield from feed.take_word(_NAME)
            character = yield from feed.skip_whitespace()
            if not called or not name or character != "{":
                self._record_is_content()
                continue
            feed.take(1)
            self._begin_call(name)
            self._add_arguments("{")
            if (yield from self._read_object()):
                yield from self._end_call(self._form.end)

    def _read_object(self) -> Waiting[bool]:
        """Read the arguments after their opening bracket; returns whether they were complete.

        If the syntax is wrong, the open brackets are closed, and the unread text is content.
        """
        feed = self._feed
        opened = ["{"]
        comma = ""
        while opened:
            feed.begin_record()
            closing = _CLOSING[opened[-1]]
            character = yield from feed.skip_whitespace()
            if character == "," and comma:
                feed.take(1)
                character = yield from feed.skip_whitespace()
                before = comma
            elif comma and character not in ("", closing):
                return self._fail_arguments(opened)
            else:
                before = ""
            if character == closing:
                feed.take(1)
                feed.end_record()
                opened.pop()
                self._add_arguments(closing)
                comma = ", "
                continue
            if opened[-1] == "{":
                key = yield from self._read_key()
                if key is None:
                    if not (yield from feed.next_character()):
                        feed.end_record()
                        return False
                    return self._fail_arguments(opened)
                before += f"{json.dumps(key, ensure_ascii=False)}: "
            character = yield from feed.skip_whitespace()
            if character in _CLOSING:
                feed.take(1)
                feed.end_record()
                self._add_arguments(before + character)
                opened.append(character)
                comma = ""
                continue
            value = yield from self._read_scalar(before)
            if value is None:
                if not (yield from feed.next_character()):
                    feed.end_record()
                    return False
                return self._fail_arguments(opened)
            if not value:
                return False
            comma = ", "
        return True

    def _fail_arguments(self, opened: list[str]) -> bool:
        self._add_arguments("".join(_CLOSING[each] for each in reversed(opened)))
        self._record_is_content()
        return False

    def _read_key(self) -> Waiting[str | None]:
        """Read a key, bare or between quotes, and its colon."""
        feed = self._feed
        pieces: list[str] = []
        if (yield from feed.take_marker(self._form.quote)):
            if not (yield from feed.take_until(self._quote, pieces)):
                return None
        else:
            pieces.append((yield from feed.take_word(_WORD)).strip("\"'"))
        if (yield from feed.skip_whitespace()) != ":" or not pieces[0]:
            return None
        feed.take(1)
        return "".join(pieces)

    def _read_scalar(self, before: str) -> Waiting[bool | None]:
        """Pass on `before` and the next value; returns whether the value ended, or None if there is none."""
        feed = self._feed
        if (yield from feed.take_marker(self._form.quote)):
            feed.end_record()
            self._add_arguments(before)
            return (yield from self._stream_typed(frozenset({"string"}), self._quote))
        if (yield from feed.next_character()) in ('"', "'"):
            feed.end_record()
            return (yield from self._stream_object(before=before))
        word = yield from feed.take_word(_WORD)
        if not word or not (yield from feed.next_character()):
            # A word that is cut off by the end of the text may be the prefix of another.
            return None
        feed.end_record()
        self._add_arguments(before + (mend(word) or json.dumps(word, ensure_ascii=False)))
        return True


# The grammar: values of a schema, or any value if the schema has no constraint.

_DEPTH = 8
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"


class _Values:
    """Expressions of values, for one function's schema."""

    def __init__(self, lark: LarkWriter, root: Mapping[str, Any], quote: str) -> None:
        self._lark = lark
        self._quote = quote
        self._root = root
        self._any = ""
        self._written = Written()

    def arguments(self, schema: Mapping[str, Any], depth: int = _DEPTH) -> str:
        def argument(key: str, value: Any) -> str:
            return f"{key} {self._lark.spelled(':')} {self.of(value, depth - 1)}"

        members = argument_sequence(self._lark, schema, argument, ",")
        return f"{self._lark.spelled('{')} {members} {self._lark.spelled('}')}"

    def of(self, schema: Any, depth: int) -> str:
        return self._written.once(schema, depth, lambda: self._lark.rule(self._value(schema, depth)))

    def _value(self, schema: Any, depth: int) -> str:
        lark = self._lark
        if isinstance(schema, FreeText):
            return f"{lark.spelled(self._quote)} {lark.until(self._quote, lark.text(schema.grammar, escaped=False))}"
        if not isinstance(schema, dict) or not schema or not depth:
            return self._any_value()
        if isinstance(schema.get("$ref"), str):
            return self.of(resolved(schema["$ref"], self._root), depth - 1)
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list) and schema[union]:
                return lark.any_of(self.of(member, depth - 1) for member in schema[union])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return lark.any_of(self.of({**schema, "type": kind}, depth - 1) for kind in kinds)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return lark.any_of(lark.spelled(_written(value, self._quote)) for value in values)
        match kinds:
            case "string":
                return f"{lark.spelled(self._quote)} {bare_string(lark, schema, self._quote)}"
            case "object":
                return lark.rule(self.arguments(schema, depth))
            case "array":
                return lark.rule(self._list(schema, depth))
            case "integer" | "number" | "boolean" | "null":
                return lark.json(part_of(schema, self._root))
        return self._any_value()

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        lark = self._lark
        item = self.of(schema.get("items"), depth - 1)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        more = f"{max(low - 1, 0)},{'' if high is None else max(high - 1, 0)}"
        items = f"{item} ({lark.spelled(',')} {item}){{{more}}}" if high != 0 else ""
        return f"{lark.spelled('[')} {items if low else f'({items})?' if items else ''} {lark.spelled(']')}"

    def _any_value(self) -> str:
        lark = self._lark
        if not self._any:
            scalar = lark.json({"type": ["number", "boolean", "null"]})
            text = f"{lark.spelled(self._quote)} {lark.until(self._quote, ANY_TEXT)}"

            def body(value: str) -> str:
                member, comma = lark.rule(f'{lark.rule(_ANY_KEY)} ":" {value}'), lark.spelled(",")
                members = f'"{{" ({member} ({comma} {member})*)? "}}"'
                return f'{scalar} | {text} | {members} | "[" ({value} ({comma} {value})*)? "]"'

            self._any = lark.recursive(body)
        return self._any


def _written(value: Any, quote: str) -> str:
    """`value` as the model's template writes it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(each, quote)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_written(each, quote) for each in value)}]"
    return json.dumps(value)


def _register(name: str, form: Form, result: str) -> None:
    """Register a dialect. `result`: the token that begins a call's result."""

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a call after its opening marker."""
        return lark.any_of(
            f"{lark.spelled(CALL + function.name)} "
            f"{_Values(lark, function.schema, form.quote).arguments(function.schema)} {lark.spelled(form.end)}"
            for function in functions
        )

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: GemmaParser(use, form),
            calls,
            detect=lambda signs: form.begin + CALL in signs.template,
            trigger=form.begin,
            separator="",
            keys=r"[^\s<>{}\[\]:,\"']+",
            stops=(result,),
            writes_bare_text=True,
            markers=form,
        )
    )


_register("gemma4", GEMMA, "<|tool_response>")
_register("functiongemma", FUNCTION_GEMMA, "<start_function_response>")
