"""Calls as `<invoke name="f">` with `<parameter name="k">` inside: MiniMax-M2, DeepSeek-V3.2 and later,
GigaChat 3.5, dots, MiniCPM5.

`<minimax:tool_call><invoke name="f"><parameter name="k">value</parameter></invoke></minimax:tool_call>`. DeepSeek's
tags begin with `｜DSML｜`, and its parameters say whether the value is text: `string="true"` or `string="false"`;
GigaChat's begin with `｜GCML｜`. MiniCPM5 has other names, no tag around all calls, and no line breaks within one:
`<function name="f"><param name="k">value</param></function>`; text of more than one line, or with `<` or `&`, is
between `<![CDATA[` and `]]>`.
"""  # noqa: RUF002

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from server.parsing.grammar import Function, LarkWriter, argument_sequence, bare_value
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import MembersParser
from server.schemas.chat_tools import ToolUse

DSML, GCML = "｜DSML｜", "｜GCML｜"  # noqa: RUF001
_QUOTED = re.compile(r'[^"<>]*')
_STRING = frozenset({"string"})
CDATA, CDATA_END = "<![CDATA[", "]]>"
_IS_TEXT, _IS_JSON = ' string="true"', ' string="false"'


class Tags(NamedTuple):
    """One dialect's tags."""

    block: str = ""
    """The name of the tag around all calls; empty if there is none."""
    prefix: str = ""
    """The prefix of all tags' names."""
    says_types: bool = False
    """Whether parameters have an attribute that says if their value is text."""
    invoke: str = "invoke"
    """The name of the tag around a call."""
    parameter: str = "parameter"
    """The name of the tag around an argument."""
    has_cdata: bool = False
    """Whether text may be between `<![CDATA[` and `]]>`."""

    def begin(self, name: str) -> str:
        return f"<{self.prefix}{name}"

    def end(self, name: str) -> str:
        return f"</{self.prefix}{name}>"

    @property
    def opening(self) -> str:
        """The first marker of calls."""
        return f"{self.begin(self.block)}>" if self.block else self.call

    @property
    def call(self) -> str:
        return self.begin(self.invoke) + ' name="'

    @property
    def line(self) -> str:
        """The text between the parts of a call."""
        return "\n" if self.block else ""


class InvokeParser(MembersParser):
    """Values are bare text up to the end of the parameter. The block around the calls may be missing."""

    def __init__(self, use: ToolUse, tags: Tags) -> None:
        self._tags = tags
        self._invoke = tags.call
        self._parameter = tags.begin(tags.parameter) + ' name="'
        self._begin = Markers(*{tags.opening, tags.call})
        self._says: bool | None = None
        """Whether the last parameter's attribute says that its value is text; None: it has no such attribute."""
        self.members_end = tags.end(tags.invoke)
        self.member_markers = (self._parameter,)
        end = tags.end(tags.parameter)
        self._bare_end, self._cdata_end = Markers(end), Markers(CDATA_END + end)
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        ends = (self._tags.end(self._tags.block),) if self._tags.block else ()
        while begin := (yield from self._content_until(self._begin)):
            has_block = begin != self._invoke
            if has_block:
                yield from feed.skip_whitespace()
                if not (yield from feed.take_marker(self._invoke)):
                    self._record_is_content()
                    continue
            while (yield from self._read_call()):
                feed.begin_record()
                yield from feed.skip_whitespace()
                if (yield from feed.take_marker(self._invoke)):
                    continue
                if has_block and (yield from self._take_any(ends)):
                    feed.end_record()
                elif not (yield from self._cut_off(*ends, self._invoke)):
                    self._record_is_content()
                break

    def _read_call(self) -> Waiting[bool]:
        """Read a call after its tag's name; returns whether it was complete."""
        name = yield from self._read_name()
        if not name or not (yield from self._feed.take_marker(">")):
            self._record_is_content()
            return False
        self._begin_call(name)
        return (yield from self._read_arguments(name))

    def _read_name(self) -> Waiting[str]:
        """Read the rest of a quoted name; empty if the closing quote is missing."""
        name = yield from self._feed.take_word(_QUOTED)
        return name if (yield from self._feed.take_marker('"')) else ""

    def _read_key(self) -> Waiting[str | None]:
        feed = self._feed
        if not (yield from feed.take_marker(self._parameter)):
            return None
        key = yield from self._read_name()
        self._says = None
        if (yield from feed.take_marker(' string="')):
            says = yield from self._read_name()
            self._says = says == "true" if says in ("true", "false") else None
        if not key or not (yield from feed.take_marker(">")):
            return None
        is_cdata = self._tags.has_cdata and (yield from feed.take_marker(CDATA))
        self.value_end = self._cdata_end if is_cdata else self._bare_end
        return key

    def _types(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        types = super()._types(schema, key)
        if self._says is None:
            return types
        return _STRING if self._says else types - _STRING or types


def _calls(tags: Tags) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    end, line = tags.end(tags.parameter), tags.line

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a block's calls after its opening tag, or for a call after the beginning of its own."""
        call = lark.any_of(one(lark, function) for function in functions)
        if not tags.block:
            return call
        return f"{call if once else f'{call}+'} {lark.spelled(line + tags.end(tags.block))}"

    def one(lark: LarkWriter, function: Function) -> str:
        def argument(key: str, schema: Any) -> str:
            before = lark.spelled(tags.begin(tags.parameter) + ' name="')
            openings = (f'"{_IS_TEXT}>', f'"{_IS_JSON}>') if tags.says_types else ('">', '">')
            value = bare_value(lark, schema, function.schema, end, openings=openings)
            return f"{before} {key} {value} {lark.spelled(line)}"

        opening = f'{function.name}">{line}'
        name = lark.spelled(line + tags.call + opening if tags.block else opening)
        return f"{name} {argument_sequence(lark, function.schema, argument)} {lark.spelled(tags.end(tags.invoke))}"

    return calls


def _register(name: str, tags: Tags, detect: Callable[[ModelSigns], bool], aliases: tuple[str, ...] = ()) -> None:
    names = (tags.invoke, tags.parameter)
    block = (tags.opening, tags.end(tags.block)) if tags.block else ()
    prefix = (tags.prefix.strip(),) if tags.prefix else ()
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: InvokeParser(use, tags),
            _calls(tags),
            detect,
            trigger=tags.opening,
            separator=None if tags.block else "\n",
            keys=r'[^"<>]+',
            writes_bare_text=True,
            markers=(*block, *map(tags.begin, names), *map(tags.end, names), *prefix),
            aliases=aliases,
        )
    )


MINIMAX = Tags("minimax:tool_call")
V32 = Tags("function_calls", DSML, says_types=True)
V4 = Tags("tool_calls", DSML, says_types=True)
V41 = Tags("calls", f"{DSML} ", says_types=True)
GIGACHAT = Tags("tool_calls", GCML, says_types=True)
DOTS = Tags("dots_function_call")
MINICPM = Tags(invoke="function", parameter="param", has_cdata=True)


def _shows(tags: Tags) -> Callable[[ModelSigns], bool]:
    """Templates may have the prefix in a variable, so only the names after it are compared."""
    return lambda signs: DSML in signs.template and re.search(rf"[^<\w] ?{tags.block}>", signs.template) is not None


_register("minimax_m2", MINIMAX, lambda signs: MINIMAX.block in signs.template)
_register("deepseek_v32", V32, _shows(V32))
_register("deepseek_v4", V4, _shows(V4))
_register("deepseek_v41", V41, _shows(V41))
_register("gigachat35", GIGACHAT, lambda signs: GCML in signs.template)
_register("dots", DOTS, lambda signs: DOTS.block in signs.template)
_register("minicpm5", MINICPM, lambda signs: '<param name="' in signs.template)
