"""Qwen3-Coder and Qwen3.5: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`.

Nemotron 3 and others write the same. MiMo-V2 and Seed-OSS have no line breaks around a value; Seed-OSS has an outer
tag of its own.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import MembersParser
from server.schemas.chat_tools import ToolUse

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NEWLINE = "\n"
_NAME = re.compile(r"[^\s<>]*")
_INLINE = re.compile(r"<parameter=\w+>\w")
"""Matches the example in a template that has no line breaks around values."""


class Form(NamedTuple):
    """The markers and line breaks of one dialect."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    around: str = "\n"
    """The text before and after a value."""


class QwenXmlParser(MembersParser):
    """Values are bare text; the outer markers may be missing, or the opening one alone."""

    members_end = FUNCTION_END
    member_markers = (PARAMETER,)
    value_end = Markers(PARAMETER_END)

    def __init__(self, use: ToolUse, form: Form) -> None:
        self._form = form
        self._begin = Markers(form.begin, FUNCTION)
        self.trim = form.around
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while begin := (yield from self._content_until(self._begin)):
            if begin == self._form.begin:
                yield from feed.skip_whitespace()
                if not (yield from feed.take_marker(FUNCTION)):
                    self._record_is_content()
                    continue
            name = yield from feed.take_word(_NAME)
            if not name or not (yield from feed.take_marker(">")):
                self._record_is_content()
                continue
            self._begin_call(name)
            if (yield from self._read_arguments(name)):
                yield from self._end_call(self._form.end)

    def _read_key(self) -> Waiting[str | None]:
        feed = self._feed
        if not (yield from feed.take_marker(PARAMETER)):
            return None
        key = yield from feed.take_word(_NAME)
        return key if key and (yield from feed.take_marker(">")) else None


def _calls(form: Form) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a call after its opening marker."""
        return lark.any_of(one(lark, function) for function in functions)

    def one(lark: LarkWriter, function: Function) -> str:
        def argument(key: str, schema: Any) -> str:
            value = bare_value(lark, schema, function.schema, PARAMETER_END, before=form.around)
            return f"{lark.spelled(PARAMETER)} {key} {lark.spelled('>' + form.around)} {value} {lark.spelled(NEWLINE)}"

        name = lark.spelled(f"\n{FUNCTION}{function.name}>\n")
        arguments = argument_sequence(lark, function.schema, argument)
        return f"{name} {arguments} {lark.spelled(FUNCTION_END + NEWLINE + form.end)}"

    return calls


def _register(name: str, form: Form, detect: Callable[[ModelSigns], bool], aliases: tuple[str, ...] = ()) -> None:
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: QwenXmlParser(use, form),
            _calls(form),
            detect,
            trigger=form.begin,
            separator="\n",
            keys=r"[^\s<>]+",
            writes_bare_text=True,
            ends_text_with_line=bool(form.around),
            markers=(form.begin, form.end, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END),
            aliases=aliases,
        )
    )


SEED = Form("<seed:tool_call>", "</seed:tool_call>", around="")

_register("seed_oss", SEED, lambda signs: SEED.begin in signs.template)
_register(
    "mimo", Form(around=""), lambda signs: FUNCTION in signs.template and _INLINE.search(signs.template) is not None
)
_register(
    "qwen3_coder",
    Form(),
    lambda signs: FUNCTION in signs.template and PARAMETER in signs.template,
    aliases=("qwen3_xml", "step3p5"),
)
