"""Calls as a JSON list between markers: Nemotron, Hunyuan, Granite 3, Phi-4-mini, Command A, Apertus. GigaChat 3
writes a single object, Granite 20B Function Calling an object after each marker.

`<TOOLCALL>[{"name": "f", "arguments": {…}}]</TOOLCALL>`, and the same with other markers. Command A names a function
by `tool_name` and its arguments `parameters`. Apertus has the name as the only key: `[{"f": {…}}]`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_list, call_object, string_of
from server.schemas.chat_tools import ToolUse

NEMOTRON = "<TOOLCALL>", "</TOOLCALL>"
HUNYUAN = "<tool_calls>", "</tool_calls>"
PHI = "<|tool_call|>", "<|/tool_call|>"
GRANITE = "<|tool_call|>", ""
COMMAND = "<|START_ACTION|>", "<|END_ACTION|>"
APERTUS = "<|tools_prefix|>", "<|tools_suffix|>"
MESSAGE_END, ROLE_END = "<|message_sep|>", "<|role_sep|>"
FUNCTION_CALL = "<function_call>"
GIGACHAT3, GIGACHAT31 = f"function call{ROLE_END}", "<|function_call|>"


class JsonListParser(CallObjectParser):
    """A list after a marker; a single object without a list is read too."""

    def __init__(self, use: ToolUse, ends: Mapping[str, str], lead: str = "") -> None:
        """`ends` has the marker after a list for each marker before it; empty if there is none. `lead` is dropped at
        the beginning of the text."""
        self._begin = Markers(*ends)
        self._ends = ends
        self._lead = lead
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        yield from feed.take_marker(self._lead)
        while begin := (yield from self._content_until(self._begin)):
            end = self._ends[begin]
            match (yield from feed.skip_whitespace()):
                case "[":
                    is_whole = yield from self._read_list(end)
                case "{":
                    is_whole = yield from self._read_call(end)
                case _:
                    self._record_is_content()
                    continue
            if is_whole and end:
                yield from self._end_call(end)


class ApertusParser(JsonListParser):
    """Objects with one key, the function's name."""

    def _read_call(self, end_marker: str = "") -> Waiting[bool]:
        feed = self._feed
        calls = self._calls
        feed.take(1)
        character = yield from feed.skip_whitespace()
        name = string_of((yield from self._read_value()) if character in ('"', "'") else None)
        character = yield from feed.skip_whitespace()
        if not name or character != ":":
            return self._broken_off(None if character else name, calls)
        feed.take(1)
        character = yield from feed.skip_whitespace()
        if character != "{":
            return self._broken_off(None if character else name, calls)
        self._begin_call(name)
        if not (yield from self._stream_object(end_marker)):
            return False
        feed.begin_record()
        if (yield from feed.skip_whitespace()) == "}":
            feed.take(1)
        feed.end_record()
        return True


class GigaChatParser(JsonListParser):
    """The marker after a message is dropped. With GigaChat 3.0 a call is a message of its own, after that marker."""

    def __init__(self, use: ToolUse, begin: str) -> None:
        super().__init__(use, {begin: ""})
        self._begin = Markers(begin, MESSAGE_END)

    def _content_until(self, markers: Markers) -> Waiting[str]:
        while (begin := (yield from super()._content_until(markers))) == MESSAGE_END:
            self._feed.end_record()
            yield from self._feed.skip_whitespace()
        return begin


class CommandParser(JsonListParser):
    """Command A's names of the keys; the ids of calls are numbers that its template counts itself."""

    name_key = "tool_name"


def _register(
    name: str,
    markers: tuple[str, str],
    detect: Callable[[ModelSigns], bool],
    aliases: tuple[str, ...] = (),
    others: Mapping[str, str] = MappingProxyType({}),
    lead: str = "",
) -> None:
    """Register a dialect whose objects have `name` and `arguments`. `others` are pairs of markers that models may
    write instead; `lead` begins answers without calls."""
    begin, end = markers

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a list after its opening marker."""
        return f"{call_list(lark, functions, once)} {lark.spelled(end)}"

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: JsonListParser(use, {begin: end, **others}, lead),
            calls,
            detect,
            trigger=begin,
            markers=tuple(filter(None, (*markers, *chain(*others.items())))),
            aliases=aliases,
        )
    )


def command_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """An expression for Command A's list after its opening marker, with the white space of its template."""
    call = lark.rule(_command_call(lark, functions))
    further = "" if once else f"({lark.spelled(',' + _LINE)} {call})*"
    return f"{lark.spelled('[' + _LINE)} {call} {further} {lark.spelled(_LAST_LINE + ']' + COMMAND[1])}"


def _command_call(lark: LarkWriter, functions: Sequence[Function]) -> str:
    calls = [
        f"{lark.spelled(function.name + _TO_PARAMETERS)} {lark.json(function.schema)} {lark.spelled('}')}"
        for function in functions
    ]
    return f"{lark.spelled(_TO_ID)} /[0-9]{{1,4}}/ {lark.spelled(_TO_NAME)} {lark.any_of(calls)}"


_LINE, _LAST_LINE = "\n    ", "\n"
_TO_ID, _TO_NAME, _TO_PARAMETERS = '{"tool_call_id": "', '", "tool_name": "', '", "parameters": '

TOOL_DIALECTS.register("cohere_command")(
    ToolDialect(
        lambda use: CommandParser(use, dict([COMMAND])),
        command_calls,
        detect=lambda signs: COMMAND[0] in signs.template,
        trigger=COMMAND[0],
        markers=COMMAND,
        aliases=("command_a", "cohere_command3", "cohere_command4"),
    )
)


def apertus_calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
    """An expression for Apertus' list after its opening marker."""
    call = lark.any_of(
        f"{lark.spelled(json.dumps(function.name, ensure_ascii=False) + _TO_VALUE)} {lark.json(function.schema)}"
        for function in functions
    )
    call = lark.rule(f"{lark.spelled('{')} {call} {lark.spelled('}')}")
    further = "" if once else f"({lark.spelled(', ')} {call})*"
    return f"{lark.spelled('[')} {call} {further} {lark.spelled(']' + APERTUS[1])}"


_TO_VALUE = ": "

TOOL_DIALECTS.register("apertus")(
    ToolDialect(
        lambda use: ApertusParser(use, dict([APERTUS])),
        apertus_calls,
        detect=lambda signs: APERTUS[0] in signs.template,
        trigger=APERTUS[0],
        markers=APERTUS,
    )
)


def _register_gigachat(name: str, begin: str, trigger: str, before: str) -> None:
    """Register a dialect of one call. `trigger` ends with `begin`; `before` precedes the object."""

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for the only call after its marker."""
        return f"{lark.spelled(before)} {call_object(lark, functions, 'arguments')}"

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: GigaChatParser(use, begin),
            calls,
            detect=lambda signs: (GIGACHAT31 if begin == GIGACHAT31 else ROLE_END) in signs.template,
            trigger=trigger,
            markers=(begin, MESSAGE_END, ROLE_END),
        )
    )


TOOL_DIALECTS.register("granite_20b_fc")(
    ToolDialect(
        lambda use: JsonListParser(use, {FUNCTION_CALL: ""}),
        lambda lark, functions, once: call_object(lark, functions, "arguments", ' {"name": "'),
        detect=lambda signs: FUNCTION_CALL in signs.template,
        trigger=FUNCTION_CALL,
        separator="",
        markers=(FUNCTION_CALL,),
    )
)
_register_gigachat("gigachat31", GIGACHAT31, GIGACHAT31, "")
_register_gigachat("gigachat3", GIGACHAT3, f"{MESSAGE_END}\n\n{GIGACHAT3}", "\n")
_register(
    "nemotron_json",
    NEMOTRON,
    detect=lambda signs: NEMOTRON[0] in signs.template,
    aliases=("nemotron_nano_v2",),
)
_register(
    "phi4_mini_json",
    PHI,
    detect=lambda signs: PHI[1] in signs.template or ("<|tool|>" in signs.template and signs.has_token(PHI[1])),
)
# Granite 3.1 writes `<tool_call>`, whatever its template shows.
_register(
    "granite",
    GRANITE,
    detect=lambda signs: GRANITE[0] in signs.template,
    others={"<tool_call>": "</tool_call>"},
)
# With tools, Hunyuan A13B's template asks for answers that begin with "assistant:" in Chinese.
_register(
    "hunyuan_a13b",
    HUNYUAN,
    detect=lambda signs: HUNYUAN[0] in signs.template,
    aliases=("jamba",),
    lead="\u52a9\u624b\uff1a",
)
