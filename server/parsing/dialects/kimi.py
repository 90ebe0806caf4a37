"""Kimi-K2 and Solar Open: a section of calls, each with an id, and its arguments between markers.

Kimi-K2's ids name the function: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.
Solar Open's are random: `<|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>`.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import ToolCallParser
from server.schemas.chat_tools import ToolUse

NAMESPACE = "functions."
_WORD = re.compile(r"[^\s<{]*")
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?")


class Form(NamedTuple):
    """The markers of one dialect."""

    call: str
    arguments: str
    end: str
    sections: tuple[str, ...]
    """The markers that begin a section; the first is the template's."""
    section_ends: tuple[str, ...]
    """The markers that end a section; the first is the template's. It may be the token that ends the answer."""
    name: str = ""
    """The marker between id and name; empty if the id names the function."""

    @property
    def markers(self) -> tuple[str, ...]:
        ends = () if self.name else self.section_ends
        return *self.sections, *ends, self.call, self.end, self.arguments, *filter(None, (self.name,))


KIMI = Form(
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    # The second is the form of Kimi-K2's report, which models write too. It is text, no token.
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)
SOLAR = Form(
    "<|tool_call:begin|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    ("<|tool_calls|>",),
    ("<|calls|>",),
    name="<|tool_call:name|>",
)


class KimiParser(ToolCallParser):
    """The ids are passed on as the model writes them: the templates show them again."""

    def __init__(self, use: ToolUse, form: Form) -> None:
        self._form = form
        self._begin = Markers(*form.sections, form.call)
        self._ids: set[str] = set()
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        form = self._form
        while begin := (yield from self._content_until(self._begin)):
            has_begun = begin == form.call
            yield from self._read_section(self._read_call, form.call, *form.section_ends, has_begun=has_begun)

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its opening marker; returns whether it was complete."""
        feed, form = self._feed, self._form
        yield from feed.skip_whitespace()
        id = yield from feed.take_word(_WORD)
        if form.name:
            name = (yield from feed.take_word(_WORD)) if (yield from feed.take_marker(form.name)) else ""
        else:
            numbered = _NUMBERED.fullmatch(id)
            name = numbered[1] if numbered is not None else ""
        yield from feed.skip_whitespace()
        if not name or not (yield from feed.take_marker(form.arguments)):
            self._record_is_content()
            return False
        character = yield from feed.skip_whitespace()
        if character not in ("{", ""):
            self._record_is_content()
            return False
        self._begin_call(name, "" if id in self._ids else id)
        self._ids.add(id)
        if not character or not (yield from self._stream_object(form.end)):
            return False
        return (yield from self._end_call(form.end))


def _kimi_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a section's calls after its marker; calls are numbered through the whole chat."""
    call = lark.any_of(
        f"{lark.spelled(f'{KIMI.call}{NAMESPACE}{function.name}:')} /[0-9]{{1,4}}/ {lark.spelled(KIMI.arguments)} "
        f"{lark.json(function.schema)} {lark.spelled(KIMI.end)}"
        for function in functions
    )
    return f"{call if once else f'{call}+'} {lark.spelled(KIMI.section_ends[0])}"


def _solar_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """Write an expression for a section's calls after its marker; the token after them ends the answer."""
    call = lark.any_of(
        f"{lark.spelled(SOLAR.call)} /[a-z0-9]{{10}}/ {lark.spelled(f'{SOLAR.name}{function.name}{SOLAR.arguments}')} "
        f"{lark.json(function.schema)} {lark.spelled(SOLAR.end)}"
        for function in functions
    )
    return call if once else f"{call}+"


def _register(name: str, form: Form, calls: Callable[[LarkWriter, Sequence[Function], bool], str]) -> None:
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: KimiParser(use, form),
            calls,
            detect=lambda signs: form.sections[0] in signs.template,
            trigger=form.sections[0],
            markers=form.markers,
        )
    )


_register("kimi_k2", KIMI, _kimi_calls)
_register("solar_open", SOLAR, _solar_calls)
