"""Hermes, Qwen, Granite 4, Ernie 4.5 and others: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.

LongCat-Flash writes the same with `longcat_` in its tags. MiniMax-M1 writes all calls between `<tool_calls>` and
`</tool_calls>`, each on its own line.
"""

import re
from collections.abc import Callable, Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_object
from server.schemas.chat_tools import ToolUse

HERMES = "<tool_call>", "</tool_call>"
LONGCAT = "<longcat_tool_call>", "</longcat_tool_call>"
MINIMAX_M1 = "<tool_calls>", "</tool_calls>"


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
_MINIMAX_M1 = re.compile(r'<tool_calls>(\n|\\n)\{"name"')


def _register(
    name: str,
    markers: tuple[str, str],
    detect: Callable[[ModelSigns], bool] | None = None,
    aliases: tuple[str, ...] = (),
    *,
    has_block: bool = False,
) -> None:
    """Register a dialect. `has_block`: the markers enclose all calls. `detect` searches for the first marker by
    default."""
    begin, end = markers

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a call, or for all calls if markers enclose them, after the first marker."""
        call = lark.rule(f"{lark.spelled(_NEWLINE)} {call_object(lark, functions, 'arguments')}")
        return f"{call}{'+' if has_block and not once else ''} {lark.spelled(_NEWLINE + end)}"

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: HermesParser(use, markers),
            calls,
            detect or (lambda signs: begin in signs.template),
            trigger=begin,
            separator=None if has_block else "\n",
            markers=markers,
            aliases=aliases,
        )
    )


_register("longcat", LONGCAT)
_register("hermes", HERMES, aliases=("granite4", "ernie45", "exaone4", "qwen3_json"))
_register("minimax_m1", MINIMAX_M1, lambda signs: _MINIMAX_M1.search(signs.template) is not None, has_block=True)
