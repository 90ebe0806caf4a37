"""GLM-4.5 and later: inside `<tool_call>`, a name, then keys and values, each between its own markers.

GLM-4.5 and 4.6 write each on its own line, GLM-4.7, GLM-5 and Ling 3.0 all on one line. Hunyuan 3 (Hy3) writes as
GLM-4.5, with `<tool_sep>` after the name and `<tool_calls>` around all calls.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import MembersParser
from server.schemas.chat_tools import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"
HUNYUAN_BEGIN, HUNYUAN_END, SEPARATOR = "<tool_calls>", "</tool_calls>", "<tool_sep>"
_KEY_END = Markers(KEY_END)
_NAME = re.compile(r"[^\s<{]*")


class Form(NamedTuple):
    """The markers and line breaks of one dialect."""

    line: str = "\n"
    """The text between the parts of a call."""
    begin: str = ""
    """The marker before all calls, if there is one."""
    end: str = ""
    """The marker after all calls."""
    separator: str = ""
    """The marker after a name."""


class GlmParser(MembersParser):
    """Values are bare text; the tool's schema says which of them are strings."""

    members_end = END
    member_markers = (KEY_BEGIN, VALUE_BEGIN)
    value_end = Markers(VALUE_END)

    def __init__(self, use: ToolUse, form: Form) -> None:
        self._form = form
        self._begin = Markers(*filter(None, (BEGIN, form.begin)))
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        while begin := (yield from self._content_until(self._begin)):
            if begin == BEGIN:
                yield from self._read_call()
            else:
                yield from self._read_section(self._read_call, BEGIN, self._form.end, has_begun=False)

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its opening marker; returns whether it was complete."""
        feed = self._feed
        yield from feed.skip_whitespace()
        name = yield from feed.take_word(_NAME)
        yield from feed.skip_whitespace()
        separated = bool(self._form.separator) and (yield from feed.take_marker(self._form.separator))
        if separated:
            yield from feed.skip_whitespace()
        if not name or not (separated or (yield from self._comes(KEY_BEGIN)) or (yield from self._comes(END))):
            self._record_is_content()
            return False
        self._begin_call(name)
        return (yield from self._read_arguments(name))

    def _read_key(self) -> Waiting[str | None]:
        """Read a key and its value's opening marker."""
        feed = self._feed
        if not (yield from feed.take_marker(KEY_BEGIN)):
            return None
        pieces: list[str] = []
        if not (yield from feed.take_until(_KEY_END, pieces)):
            return None
        yield from feed.skip_whitespace()
        return "".join(pieces).strip() if (yield from feed.take_marker(VALUE_BEGIN)) else None


def _calls(form: Form) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for the text after the first marker: one call, or all calls if markers enclose them."""
        call = lark.any_of(one(lark, function) for function in functions)
        if not form.begin:
            return call
        further = "" if once else f"({lark.spelled(NEWLINE + BEGIN)} {call})*"
        return f"{lark.spelled(NEWLINE + BEGIN)} {call} {further} {lark.spelled(NEWLINE + form.end)}"

    def one(lark: LarkWriter, function: Function) -> str:
        def argument(key: str, schema: Any) -> str:
            value = bare_value(lark, schema, function.schema, VALUE_END)
            before, between = lark.spelled(KEY_BEGIN), lark.spelled(KEY_END + form.line + VALUE_BEGIN)
            return f"{before} {key} {between} {value} {lark.spelled(form.line)}"

        name = lark.spelled(function.name + form.separator + form.line)
        return f"{name} {argument_sequence(lark, function.schema, argument)} {lark.spelled(END)}"

    return calls


NEWLINE = "\n"


def _register(name: str, form: Form, detect: Callable[[ModelSigns], bool], aliases: tuple[str, ...] = ()) -> None:
    extra = tuple(filter(None, form[1:]))
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: GlmParser(use, form),
            _calls(form),
            detect,
            trigger=form.begin or BEGIN,
            separator=None if form.begin else form.line,
            keys=r"[^\s<]([^<]*[^\s<])?",
            writes_bare_text=True,
            markers=(BEGIN, END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END, *extra),
            aliases=aliases,
        )
    )


_register("hy_v3", Form("\n", HUNYUAN_BEGIN, HUNYUAN_END, SEPARATOR), lambda signs: SEPARATOR in signs.template)
_register("glm47", Form(line=""), lambda signs: KEY_END + VALUE_BEGIN in signs.template, aliases=("ling3",))
_register("glm45", Form(), lambda signs: KEY_BEGIN in signs.template, aliases=("poolside_v1",))
