"""Qwen3-Coder: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`."""

import json
import re
from collections.abc import Sequence
from typing import Any

from server.answers.argument_grammar import Function, argument_sequence, bare_value
from server.answers.feed import Markers, Waiting
from server.answers.lark import LarkWriter
from server.answers.tools.base import ToolCallParser
from server.answers.typed_arguments import argument_types

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY_END, NEWLINE = ">\n", "\n"
_BEGIN, _PARAMETER_END = Markers(BEGIN, FUNCTION), Markers(PARAMETER_END)
_NAME = re.compile(r"[^\s<>]*")


class QwenXmlParser(ToolCallParser):
    """Values are bare text between line breaks; the outer marker may be missing."""

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while begin := (yield from self._say_until(_BEGIN)):
            if begin == BEGIN:
                yield from feed.skip_whitespace()
                if not (yield from feed.take_marker(FUNCTION)):
                    self._no_call()
                    continue
            name = yield from feed.take_word(_NAME)
            if not name or not (yield from feed.take_marker(">")):
                self._no_call()
                continue
            self._begin_call(name)
            if (yield from self._read_arguments(name)) and begin == BEGIN:
                feed.keep()
                yield from feed.skip_whitespace()
                if (yield from feed.take_marker(END)):
                    feed.forget()
                elif not (yield from self._cut_off(END)):
                    self._no_call()

    def _read_arguments(self, name: str) -> Waiting[bool]:
        """Read parameters up to the function's end; whether it came."""
        feed = self._feed
        schema = self._schemas.get(name, {})
        opening = "{"
        while True:
            feed.keep()
            yield from feed.skip_whitespace()
            if (yield from feed.take_marker(FUNCTION_END)):
                feed.forget()
                self._close_arguments()
                return True
            known = yield from feed.take_marker(PARAMETER)
            key = (yield from feed.take_word(_NAME)) if known else ""
            if not key or not (yield from feed.take_marker(">")):
                if not (yield from self._cut_off(FUNCTION_END, PARAMETER)):
                    self._close_arguments()
                    self._no_call()
                return False
            feed.forget()
            self._argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            if not (yield from self._stream_typed(argument_types(schema, key), _PARAMETER_END, trim="\n")):
                return False


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """An expression for a call behind its marker."""
    return lark.any_of(_call(lark, function) for function in functions)


def _call(lark: LarkWriter, function: Function) -> str:
    def argument(key: str, schema: Any) -> str:
        value = bare_value(lark, schema, function.schema, PARAMETER_END, before="\n")
        return f"{lark.spelled(PARAMETER)} {key} {lark.spelled(KEY_END)} {value} {lark.spelled(NEWLINE)}"

    name = lark.spelled(f"\n{FUNCTION}{function.name}>\n")
    arguments = argument_sequence(lark, function.schema, argument)
    return f"{name} {arguments} {lark.spelled(FUNCTION_END + NEWLINE + END)}"
