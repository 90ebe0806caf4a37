"""DeepSeek-V3 and R1: a function's name and a fenced JSON block between markers. V3.1 has no fence."""

import re
from collections.abc import Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE_BEGIN, FENCE_END = "```json", "```"
_BEGIN = Markers(CALLS_BEGIN, CALL_BEGIN)
_NAME = re.compile(r"[^\s<{`]*")


class DeepSeekParser(ToolCallParser):
    """Reads both forms. If the arguments follow the separator directly, the name precedes it."""

    def _read(self) -> Waiting[None]:
        while begin := (yield from self._content_until(_BEGIN)):
            yield from self._read_section(self._read_call, CALL_BEGIN, CALLS_END, has_begun=begin == CALL_BEGIN)

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its marker. Returns whether it was complete."""
        feed = self._feed
        yield from feed.skip_whitespace()
        name = yield from feed.take_word(_NAME)
        yield from feed.skip_whitespace()
        if not name or not (yield from feed.take_marker(SEPARATOR)):
            self._record_is_content()
            return False
        character = yield from feed.skip_whitespace()
        fenced = character not in ("{", "")
        if fenced:
            name = yield from feed.take_word(_NAME)
            yield from feed.skip_whitespace()
            fenced = yield from feed.take_marker(FENCE_BEGIN)
            character = yield from feed.skip_whitespace()
            if not fenced and not character:
                name = ""
        elif not character and name == "function":
            name = ""
        if not name or character not in ("{", ""):
            self._record_is_content()
            return False
        self._begin_call(name)
        if not character or not (yield from self._stream_object(FENCE_END if fenced else CALL_END)):
            return False
        feed.begin_record()
        yield from feed.skip_whitespace()
        if fenced and (yield from feed.take_marker(FENCE_END)):
            yield from feed.skip_whitespace()
        if (yield from feed.take_marker(CALL_END)):
            feed.end_record()
            return True
        if not (yield from self._cut_off(CALL_END, FENCE_END)):
            self._record_is_content()
        return False


def fenced_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for V3's and R1's calls after the first marker."""
    head, tail = f"function{SEPARATOR}", f"\n{FENCE_END}{CALL_END}"
    return _calls(lark, functions, once, head, f"\n{FENCE_BEGIN}\n", tail)


def plain_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for V3.1's calls after the first marker."""
    return _calls(lark, functions, once, "", SEPARATOR, CALL_END)


def _calls(lark: LarkWriter, functions: Sequence[Function], once: bool, head: str, middle: str, tail: str) -> str:
    call = lark.any_of(
        f"{lark.spelled(head + function.name + middle)} {lark.json(function.schema)} {lark.spelled(tail)}"
        for function in functions
    )
    begin = lark.spelled(CALL_BEGIN)
    gap = lark.spelled("\n" if head else "")
    further = "" if once else f"({gap} {begin} {call})*"
    return f"{begin} {call} {further} {lark.spelled(CALLS_END)}"


_MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

TOOL_DIALECTS.register("deepseek_v3")(
    ToolDialect(
        DeepSeekParser,
        fenced_calls,
        detect=lambda signs: CALLS_BEGIN in signs.template and FENCE_BEGIN in signs.template,
        trigger=CALLS_BEGIN,
        markers=_MARKERS,
        aliases=("deepseek_r1",),
    )
)
TOOL_DIALECTS.register("deepseek_v31")(
    ToolDialect(
        DeepSeekParser,
        plain_calls,
        detect=lambda signs: CALLS_BEGIN in signs.template,
        trigger=CALLS_BEGIN,
        markers=_MARKERS,
    )
)
