"""GLM-4.5 and later: a name, then keys and values between markers of their own, inside `<tool_call>`."""

import re
from collections.abc import Sequence
from typing import Any

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ToolDialect
from server.parsing.tool_calls import MembersParser

BEGIN, END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"
NEWLINE = "\n"
_BEGIN, _KEY_END = Markers(BEGIN), Markers(KEY_END)
_NAME = re.compile(r"[^\s<{]*")


class GlmParser(MembersParser):
    """Values are bare text; the tool's schema says which of them are strings."""

    members_end = END
    member_markers = (KEY_BEGIN, VALUE_BEGIN)
    value_end = Markers(VALUE_END)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._say_until(_BEGIN)):
            yield from feed.skip_whitespace()
            name = yield from feed.take_word(_NAME)
            yield from feed.skip_whitespace()
            if not name or not ((yield from self._comes(KEY_BEGIN)) or (yield from self._comes(END))):
                self._no_call()
                continue
            self._begin_call(name)
            yield from self._read_arguments(name)

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


def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """An expression for a call behind its marker, in GLM-4.5's spacing."""
    return lark.any_of(_call(lark, function) for function in functions)


def _call(lark: LarkWriter, function: Function) -> str:
    def argument(key: str, schema: Any) -> str:
        value = bare_value(lark, schema, function.schema, VALUE_END)
        before, between = lark.spelled(KEY_BEGIN), lark.spelled(f"{KEY_END}\n{VALUE_BEGIN}")
        return f"{before} {key} {between} {value} {lark.spelled(NEWLINE)}"

    name = lark.spelled(f"{function.name}\n")
    return f"{name} {argument_sequence(lark, function.schema, argument)} {lark.spelled(END)}"


TOOL_DIALECTS.register("glm45")(
    ToolDialect(
        GlmParser,
        calls,
        detect=lambda signs: KEY_BEGIN in signs.template,
        trigger=BEGIN,
        separator="\n",
        keys=r"[^\s<]([^<]*[^\s<])?",
        writes_bare_text=True,
        markers=(BEGIN, END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END),
        aliases=("glm47",),
    )
)
