"""Hermes, Qwen, Granite 4, Ernie 4.5 and others: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

from collections.abc import Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_object

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGIN = Markers(BEGIN)


class HermesParser(CallObjectParser):
    """Reads an object, or a list of them, after a marker. A second object before the end marker is a second call."""

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._content_until(_BEGIN)):
            while (opening := (yield from feed.skip_whitespace())) and opening in "{[":
                if not (yield from (self._read_call(END) if opening == "{" else self._read_list(END))):
                    break
                feed.begin_record()
                while (yield from feed.skip_whitespace()) == "}":
                    feed.take(1)
                if (yield from feed.take_marker(END)):
                    feed.end_record()
                    break
                if (yield from self._cut_off(END)):
                    break
            else:
                self._record_is_content()


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a call after its marker."""
    return f"{lark.spelled(_NEWLINE)} {call_object(lark, functions, 'arguments')} {lark.spelled(_NEWLINE + END)}"


_NEWLINE = "\n"


TOOL_DIALECTS.register("hermes")(
    ToolDialect(
        HermesParser,
        calls,
        detect=lambda signs: BEGIN in signs.template,
        trigger=BEGIN,
        separator="\n",
        markers=(BEGIN, END),
        aliases=("granite4", "ernie45", "exaone4"),
    )
)
