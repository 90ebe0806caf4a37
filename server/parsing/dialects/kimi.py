"""Kimi-K2: a section of calls, each with an id that names the function, and its arguments between markers."""

import re
from collections.abc import Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat_tools import ToolUse

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SINGULAR_BEGIN, SINGULAR_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
"""The form of Kimi-K2's report, which models write too. It is text, no token."""
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
NAMESPACE = "functions."
_BEGIN = Markers(SECTION_BEGIN, SINGULAR_BEGIN, CALL_BEGIN)
_ID = re.compile(r"[^\s<{]*")
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")


class KimiParser(ToolCallParser):
    """The ids are passed on as the model writes them, `functions.f:0`: its template shows them again."""

    def __init__(self, use: ToolUse) -> None:
        self._ids: set[str] = set()
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        while begin := (yield from self._content_until(_BEGIN)):
            ends = SECTION_END, SINGULAR_END
            yield from self._read_section(self._read_call, CALL_BEGIN, *ends, has_begun=begin == CALL_BEGIN)

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its opening marker; returns whether it was complete."""
        feed = self._feed
        yield from feed.skip_whitespace()
        id = yield from feed.take_word(_ID)
        numbered = _NUMBERED.fullmatch(id)
        yield from feed.skip_whitespace()
        if numbered is None or not numbered[1] or not (yield from feed.take_marker(ARGUMENTS)):
            self._record_is_content()
            return False
        character = yield from feed.skip_whitespace()
        if character not in ("{", ""):
            self._record_is_content()
            return False
        self._begin_call(numbered[1], "" if id in self._ids else id)
        self._ids.add(id)
        if not character or not (yield from self._stream_object(CALL_END)):
            return False
        feed.begin_record()
        yield from feed.skip_whitespace()
        if (yield from feed.take_marker(CALL_END)):
            feed.end_record()
            return True
        if not (yield from self._cut_off(CALL_END)):
            self._record_is_content()
        return False


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """An expression for a section's calls after its opening marker; calls are numbered through the whole chat."""
    call = lark.any_of(
        f"{lark.spelled(f'{CALL_BEGIN}{NAMESPACE}{function.name}:')} /[0-9]{{1,4}}/ {lark.spelled(ARGUMENTS)} "
        f"{lark.json(function.schema)} {lark.spelled(CALL_END)}"
        for function in functions
    )
    return f"{call if once else f'{call}+'} {lark.spelled(SECTION_END)}"


TOOL_DIALECTS.register("kimi_k2")(
    ToolDialect(
        KimiParser,
        calls,
        detect=lambda signs: SECTION_BEGIN in signs.template,
        trigger=SECTION_BEGIN,
        markers=(SECTION_BEGIN, SECTION_END, SINGULAR_BEGIN, SINGULAR_END, CALL_BEGIN, CALL_END, ARGUMENTS),
    )
)
