"""Qwen3-Coder: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`."""

import re
from collections.abc import Sequence
from typing import Any

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import MembersParser

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY_END, NEWLINE = ">\n", "\n"
_BEGIN = Markers(BEGIN, FUNCTION)
_NAME = re.compile(r"[^\s<>]*")


class QwenXmlParser(MembersParser):
    """Values are bare text between line breaks; the outer marker may be missing."""

    members_end = FUNCTION_END
    member_markers = (PARAMETER,)
    value_end = Markers(PARAMETER_END)
    trim = "\n"

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

    def _read_key(self) -> Waiting[str | None]:
        feed = self._feed
        if not (yield from feed.take_marker(PARAMETER)):
            return None
        key = yield from feed.take_word(_NAME)
        return key if key and (yield from feed.take_marker(">")) else None


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


TOOL_DIALECTS.register("qwen3_coder")(
    ToolDialect(
        QwenXmlParser,
        calls,
        detect=lambda signs: FUNCTION in signs.template,
        trigger=BEGIN,
        separator="\n",
        keys=r"[^\s<>]+",
        writes_bare_text=True,
        ends_text_with_line=True,
        markers=(BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END),
        aliases=("qwen3_xml",),
    )
)
