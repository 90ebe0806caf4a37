"""Calls as `<invoke name="f">` with `<parameter name="k">` inside: MiniMax-M2, DeepSeek-V3.2 and later,
GigaChat 3.5, dots.

`<minimax:tool_call><invoke name="f"><parameter name="k">value</parameter></invoke></minimax:tool_call>`. DeepSeek's
tags begin with `｜DSML｜`, and its parameters say whether the value is text: `string="true"` or `string="false"`;
GigaChat's begin with `｜GCML｜`.
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
_IS_TEXT, _IS_JSON = ' string="true"', ' string="false"'


class Tags(NamedTuple):
    """One dialect's tags."""

    block: str
    """The name of the tag around all calls."""
    prefix: str = ""
    """The prefix of all tags' names."""
    says_types: bool = False
    """Whether parameters have an attribute that says if their value is text."""

    def begin(self, name: str) -> str:
        return f"<{self.prefix}{name}"

    def end(self, name: str) -> str:
        return f"</{self.prefix}{name}>"

    @property
    def opening(self) -> str:
        return f"{self.begin(self.block)}>"


class InvokeParser(MembersParser):
    """Values are bare text up to the end of the parameter. The block around the calls may be missing."""

    def __init__(self, use: ToolUse, tags: Tags) -> None:
        self._tags = tags
        self._invoke = tags.begin("invoke") + ' name="'
        self._parameter = tags.begin("parameter") + ' name="'
        self._begin = Markers(tags.opening, self._invoke)
        self._says: bool | None = None
        """Whether the last parameter's attribute says that its value is text; None: it has no such attribute."""
        self.members_end = tags.end("invoke")
        self.member_markers = (self._parameter,)
        self.value_end = Markers(tags.end("parameter"))
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        end = self._tags.end(self._tags.block)
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
                if has_block and (yield from feed.take_marker(end)):
                    feed.end_record()
                elif not (yield from self._cut_off(end, self._invoke)):
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
        return key if key and (yield from feed.take_marker(">")) else None

    def _types(self, schema: Mapping[str, Any], key: str) -> frozenset[str]:
        types = super()._types(schema, key)
        if self._says is None:
            return types
        return _STRING if self._says else types - _STRING or types


def _calls(tags: Tags) -> Callable[[LarkWriter, Sequence[Function], bool], str]:
    end = tags.end("parameter")

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a block's calls after its opening tag."""
        call = lark.any_of(one(lark, function) for function in functions)
        closing = lark.spelled(f"\n{tags.end(tags.block)}")
        return f"{call if once else f'{call}+'} {closing}"

    def one(lark: LarkWriter, function: Function) -> str:
        def argument(key: str, schema: Any) -> str:
            before = lark.spelled(f'{tags.begin("parameter")} name="')
            openings = (f'"{_IS_TEXT}>', f'"{_IS_JSON}>') if tags.says_types else ('">', '">')
            value = bare_value(lark, schema, function.schema, end, openings=openings)
            return f"{before} {key} {value} {lark.spelled(_NEWLINE)}"

        name = lark.spelled(f'\n{tags.begin("invoke")} name="{function.name}">\n')
        return f"{name} {argument_sequence(lark, function.schema, argument)} {lark.spelled(tags.end('invoke'))}"

    return calls


_NEWLINE = "\n"


def _register(name: str, tags: Tags, detect: Callable[[ModelSigns], bool], aliases: tuple[str, ...] = ()) -> None:
    names = ("invoke", "parameter")
    texts = (tags.opening, tags.end(tags.block), *map(tags.begin, names), *map(tags.end, names))
    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: InvokeParser(use, tags),
            _calls(tags),
            detect,
            trigger=tags.opening,
            keys=r'[^"<>]+',
            writes_bare_text=True,
            markers=(*texts, tags.prefix.strip()) if tags.prefix else texts,
            aliases=aliases,
        )
    )


MINIMAX = Tags("minimax:tool_call")
V32 = Tags("function_calls", DSML, says_types=True)
V4 = Tags("tool_calls", DSML, says_types=True)
V41 = Tags("calls", f"{DSML} ", says_types=True)
GIGACHAT = Tags("tool_calls", GCML, says_types=True)
DOTS = Tags("dots_function_call")


def _shows(tags: Tags) -> Callable[[ModelSigns], bool]:
    """Templates may have the prefix in a variable, so only the names after it are compared."""
    return lambda signs: DSML in signs.template and re.search(rf"[^<\w] ?{tags.block}>", signs.template) is not None


_register("minimax_m2", MINIMAX, lambda signs: MINIMAX.block in signs.template)
_register("deepseek_v32", V32, _shows(V32))
_register("deepseek_v4", V4, _shows(V4))
_register("deepseek_v41", V41, _shows(V41))
_register("gigachat35", GIGACHAT, lambda signs: GCML in signs.template)
_register("dots", DOTS, lambda signs: DOTS.block in signs.template)
