"""Calls in Python: Llama 3.2 and Llama 4, LFM2, OLMo 3.

A list, `[f(a=1), g(b="x")]`: in Llama the whole answer, in LFM2 between markers. OLMo 3 writes one call per line,
without brackets, between markers.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from server.parsing.grammar import Function, LarkWriter, argument_sequence, part_of
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import CallObjectParser, ToolCallParser
from server.schemas.chat_tools import ToolUse

START, END = "<|python_start|>", "<|python_end|>"
LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO = "<function_calls>", "</function_calls>"
_NAME = re.compile(r"[\w.-]*")


class PythonicParser(ToolCallParser):
    """Reads a list at the beginning of the text. A list of anything but calls of the request's tools is content."""

    def _read(self) -> Waiting[None]:
        feed = self._feed
        feed.begin_record()
        yield from feed.skip_whitespace()
        marked = self._announced = yield from feed.take_marker(START)
        if (yield from feed.skip_whitespace()) == "[":
            feed.take(1)
            yield from self._read_calls()
        else:
            self._record_is_content()
        if marked and self._calls:
            yield from feed.take_marker(END)
        yield from self._content_to_end()

    def _read_calls(self) -> Waiting[None]:
        feed = self._feed
        while True:
            yield from feed.skip_whitespace()
            name = yield from feed.take_word(_NAME)
            if name not in self._schemas or (yield from feed.skip_whitespace()) != "(":
                return self._record_is_content()
            feed.take(1)
            if not (yield from self._read_arguments(name)):
                return None
            feed.begin_record()
            separator = yield from feed.skip_whitespace()
            feed.take(1)
            if separator in ("", "]"):
                feed.end_record()
                return None
            if separator != ",":
                return self._record_is_content()
            if (yield from feed.skip_whitespace()) == "]":
                feed.take(1)
                feed.end_record()
                return None

    def _read_arguments(self, name: str) -> Waiting[bool]:
        """Read keyword arguments up to the closing bracket. Returns whether they were complete."""
        feed = self._feed
        begun = False
        while True:
            character = yield from feed.skip_whitespace()
            if character in ("", ")"):
                break
            key = yield from feed.take_word(_NAME)
            character = yield from feed.skip_whitespace()
            if not character:
                break
            if not key or character != "=":
                if begun:
                    self._close_arguments()
                self._record_is_content()
                return False
            feed.take(1)
            yield from feed.skip_whitespace()
            if not begun:
                self._begin_call(name)
            feed.end_record()
            before = f"{', ' if begun else '{'}{json.dumps(key, ensure_ascii=False)}: "
            begun = True
            if not (yield from self._stream_object(before=before, spelled=f"{key}=")):
                return False
            feed.begin_record()
            character = yield from feed.skip_whitespace()
            if character == ",":
                feed.take(1)
            elif character not in ("", ")"):
                self._close_arguments()
                self._record_is_content()
                return False
        if not begun:
            self._begin_call(name)
        feed.end_record()
        if not character:
            return False
        feed.take(1)
        self._close_arguments()
        return True


class MarkedPythonicParser(PythonicParser, CallObjectParser):
    """Reads calls between markers, of any function, in a list or in sequence. LFM2 writes objects in JSON where its
    prompt asks for them."""

    def __init__(self, use: ToolUse, begin: str, end: str) -> None:
        self._begin = Markers(begin)
        self._end = end
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._content_until(self._begin)):
            if (yield from feed.skip_whitespace()) == "[":
                feed.take(1)
            calls = self._calls
            while True:
                if (yield from feed.skip_whitespace()) in (",", "]") and self._calls > calls:
                    feed.take(1)
                    continue
                if self._calls > calls and (yield from feed.take_marker(self._end)):
                    feed.end_record()
                    break
                if (yield from feed.skip_whitespace()) == "{":
                    if not (yield from self._read_call(self._end)):
                        break
                    feed.begin_record()
                    continue
                name = yield from feed.take_word(_NAME)
                if not name or (yield from feed.skip_whitespace()) != "(":
                    if self._calls == calls or name or not (yield from self._cut_off(self._end)):
                        self._record_is_content()
                    break
                feed.take(1)
                if not (yield from self._read_arguments(name)):
                    break
                feed.begin_record()


def marked_calls(begin_list: str, between: str, end: str) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    """Return a writer of expressions for calls after a marker: `begin_list`, the calls separated by `between`,
    `end`."""

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        call = lark.any_of(_call(lark, function) for function in functions)
        further = "" if once else f"({lark.spelled(between)} {call})*"
        return f"{lark.spelled(begin_list)} {call} {further} {lark.spelled(end)}"

    return calls


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for an answer's calls. Values are JSON; the parser also reads Python's form."""
    call = lark.any_of(_call(lark, function) for function in functions)
    further = "" if once else f"({lark.spelled(', ')} {call})*"
    return f"{lark.spelled('[')} {call} {further} {lark.spelled(']')}"


def _call(lark: LarkWriter, function: Function) -> str:
    def argument(key: str, schema: Any) -> str:
        return f"{key} {lark.spelled('=')} {lark.json(part_of(schema, function.schema))}"

    arguments = argument_sequence(lark, function.schema, argument, ", ")
    return f"{lark.spelled(function.name + '(')} {arguments} {lark.spelled(')')}"


TOOL_DIALECTS.register("lfm2")(
    ToolDialect(
        lambda use: MarkedPythonicParser(use, *LFM2),
        marked_calls("[", ", ", f"]{LFM2[1]}"),
        detect=lambda signs: LFM2[0] in signs.template or signs.has_token(LFM2[0]),
        trigger=LFM2[0],
        keys=r"[\w.-]+",
        markers=LFM2,
    )
)
TOOL_DIALECTS.register("olmo3")(
    ToolDialect(
        lambda use: MarkedPythonicParser(use, *OLMO),
        marked_calls("", "\n", OLMO[1]),
        detect=lambda signs: OLMO[0] in signs.template and "<invoke" not in signs.template,
        trigger=OLMO[0],
        keys=r"[\w.-]+",
        markers=OLMO,
    )
)
TOOL_DIALECTS.register("pythonic")(
    ToolDialect(
        PythonicParser,
        calls,
        detect=lambda signs: (
            "func_name1(" in signs.template or (signs.has_token(START) and '"parameters": ' not in signs.template)
        ),
        opening="[",
        keys=r"[\w.-]+",
        markers=(START, END),
        aliases=("llama4_pythonic",),
    )
)
