"""GLM-4.5 and later: inside `<tool_call>`, a name, then keys and values, each between its own markers.

GLM-4.5 and 4.6 write each on its own line, GLM-4.7, GLM-5 and Ling 3.0 all on one line. Hunyuan 3 (Hy3) writes as
GLM-4.5, with `<tool_sep>` after the name and `<tool_calls>` around all calls; its open checkpoints end the names of
all tags with `:opensource`. Later LongCat-Flash models begin them with `longcat_`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import MembersParser
from server.schemas.chat_tools import ToolUse

_NAME = re.compile(r"[^\s<{]*")


class Form(NamedTuple):
    """The tags and line breaks of one dialect."""

    line: str = "\n"
    """The text between the parts of a call."""
    has_block: bool = False
    """Whether a tag encloses all calls, and another separates a name from its arguments."""
    prefix: str = ""
    """The text before the names of all tags."""
    suffix: str = ""
    """The text after the names of all tags."""

    def tag(self, name: str) -> str:
        return f"<{self.prefix}{name}{self.suffix}>"

    def end(self, name: str) -> str:
        return f"</{self.prefix}{name}{self.suffix}>"

    @property
    def separator(self) -> str:
        return self.tag("tool_sep") if self.has_block else ""


class GlmParser(MembersParser):
    """Values are bare text; the tool's schema says which of them are strings."""

    def __init__(self, use: ToolUse, form: Form) -> None:
        self._form = form
        self._call, self._block = form.tag("tool_call"), form.tag("tool_calls")
        self._begin = Markers(*((self._call, self._block) if form.has_block else (self._call,)))
        self._key_end = Markers(form.end("arg_key"))
        self.members_end = form.end("tool_call")
        self.member_markers = self._key, self._value = form.tag("arg_key"), form.tag("arg_value")
        self.value_end = Markers(form.end("arg_value"))
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        while begin := (yield from self._content_until(self._begin)):
            if begin == self._call:
                yield from self._read_call()
            else:
                yield from self._read_section(
                    self._read_call, self._call, self._form.end("tool_calls"), has_begun=False
                )

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its opening marker; returns whether it was complete."""
        feed = self._feed
        yield from feed.skip_whitespace()
        name = yield from feed.take_word(_NAME)
        yield from feed.skip_whitespace()
        separated = bool(self._form.separator) and (yield from feed.take_marker(self._form.separator))
        if separated:
            yield from feed.skip_whitespace()
        if not name or not (
            separated or (yield from self._feed.comes(self._key)) or (yield from self._feed.comes(self.members_end))
        ):
            self._record_is_content()
            return False
        self._begin_call(name)
        return (yield from self._read_arguments(name))

    def _read_key(self) -> Waiting[str | None]:
        """Read a key and its value's opening marker."""
        feed = self._feed
        if not (yield from feed.take_marker(self._key)):
            return None
        pieces: list[str] = []
        if not (yield from feed.take_until(self._key_end, pieces)):
            return None
        yield from feed.skip_whitespace()
        return "".join(pieces).strip() if (yield from feed.take_marker(self._value)) else None


def _calls(form: Form) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for the text after the first marker: one call, or all calls if markers enclose them."""
        call = lark.any_of(one(lark, function) for function in functions)
        if not form.has_block:
            return call
        begin = lark.spelled(NEWLINE + form.tag("tool_call"))
        further = "" if once else f"({begin} {call})*"
        return f"{begin} {call} {further} {lark.spelled(NEWLINE + form.end('tool_calls'))}"

    def one(lark: LarkWriter, function: Function) -> str:
        def argument(key: str, schema: Any) -> str:
            value = bare_value(lark, schema, function.schema, form.end("arg_value"))
            between = lark.spelled(form.end("arg_key") + form.line + form.tag("arg_value"))
            return f"{lark.spelled(form.tag('arg_key'))} {key} {between} {value} {lark.spelled(form.line)}"

        name = lark.spelled(function.name + form.separator + form.line)
        return f"{name} {argument_sequence(lark, function.schema, argument)} {lark.spelled(form.end('tool_call'))}"

    return calls


NEWLINE = "\n"


def _register(name: str, form: Form, detect: Callable[[ModelSigns], bool], aliases: tuple[str, ...] = ()) -> None:
    names = ("tool_call", "arg_key", "arg_value", *(("tool_calls",) if form.has_block else ()))
    texts = (*map(form.tag, names), *map(form.end, names), *((form.separator,) if form.separator else ()))
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: GlmParser(use, form),
            _calls(form),
            detect,
            trigger=form.tag("tool_calls" if form.has_block else "tool_call"),
            separator=None if form.has_block else form.line,
            keys=r"[^\s<]([^<]*[^\s<])?",
            writes_bare_text=True,
            markers=texts,
            aliases=aliases,
        )
    )


HUNYUAN, HUNYUAN_OPEN = Form(has_block=True), Form(has_block=True, suffix=":opensource")
LONGCAT = Form(prefix="longcat_")

_register(
    "hy_v3_opensource",
    HUNYUAN_OPEN,
    lambda signs: HUNYUAN_OPEN.separator in signs.template or signs.has_token(HUNYUAN_OPEN.separator),
)
_register("hy_v3", HUNYUAN, lambda signs: HUNYUAN.separator in signs.template)
_register("longcat_keys", LONGCAT, lambda signs: LONGCAT.tag("arg_key") in signs.template)
_register("glm47", Form(line=""), lambda signs: "</arg_key><arg_value>" in signs.template, aliases=("ling3",))
_register("glm45", Form(), lambda signs: "<arg_key>" in signs.template, aliases=("poolside_v1",))
