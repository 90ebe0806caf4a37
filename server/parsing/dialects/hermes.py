"""Hermes, Qwen, Granite 4, Ernie 4.5 and others: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.

LongCat-Flash writes the same with `longcat_` in its tags.
"""

from collections.abc import Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_object
from server.schemas.chat_tools import ToolUse

HERMES = "<tool_call>", "</tool_call>"
LONGCAT = "<longcat_tool_call>", "</longcat_tool_call>"


class HermesParser(CallObjectParser):
    """Reads an object, or a list of them, after a marker. A second object before the end marker is a second call."""

    def __init__(self, use: ToolUse, markers: tuple[str, str] = HERMES) -> None:
        begin, self._end = markers
        self._begin = Markers(begin)
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed, end = self._feed, self._end
        while (yield from self._content_until(self._begin)):
            while (opening := (yield from feed.skip_whitespace())) and opening in "{[":
                if not (yield from (self._read_call(end) if opening == "{" else self._read_list(end))):
                    break
                feed.begin_record()
                while (yield from feed.skip_whitespace()) == "}":
                    feed.take(1)
                if (yield from feed.take_marker(end)):
                    feed.end_record()
                    break
                if (yield from self._cut_off(end)):
                    break
            else:
                self._record_is_content()


_NEWLINE = "\n"


def _register(name: str, markers: tuple[str, str], aliases: tuple[str, ...] = ()) -> None:
    begin, end = markers

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a call after its marker."""
        return f"{lark.spelled(_NEWLINE)} {call_object(lark, functions, 'arguments')} {lark.spelled(_NEWLINE + end)}"

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: HermesParser(use, markers),
            calls,
            detect=lambda signs: begin in signs.template,
            trigger=begin,
            separator="\n",
            markers=markers,
            aliases=aliases,
        )
    )


_register("longcat", LONGCAT)
_register("hermes", HERMES, aliases=("granite4", "ernie45", "exaone4", "qwen3_json"))
