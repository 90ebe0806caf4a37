"""Calls as a JSON list between markers: Nemotron, Hunyuan, Granite 3, Phi-4-mini, Command A.

`<TOOLCALL>[{"name": "f", "arguments": {…}}]</TOOLCALL>`, and the same with other markers. Command A names a function
by `tool_name` and its arguments `parameters`.
"""

from collections.abc import Callable, Sequence

from server.parsing.grammar import Function, LarkWriter
from server.parsing.parser import Markers, Waiting
from server.parsing.registry import TOOL_DIALECTS, ModelSigns, ToolDialect
from server.parsing.tool_calls import CallObjectParser, call_list
from server.schemas.chat import ToolUse

NEMOTRON = "<TOOLCALL>", "</TOOLCALL>"
HUNYUAN = "<tool_calls>", "</tool_calls>"
PHI = "<|tool_call|>", "<|/tool_call|>"
GRANITE = "<|tool_call|>", ""
COMMAND = "<|START_ACTION|>", "<|END_ACTION|>"


class JsonListParser(CallObjectParser):
    """A list after a marker; a single object without a list is read too."""

    def __init__(self, use: ToolUse, begin: str, end: str) -> None:
        self._begin = Markers(begin)
        self._end = end
        super().__init__(use)

    def _read(self) -> Waiting[None]:
        feed = self._feed
        while (yield from self._content_until(self._begin)):
            match (yield from feed.skip_whitespace()):
                case "[":
                    is_whole = yield from self._read_list()
                case "{":
                    is_whole = yield from self._read_call(self._end)
                case _:
                    self._record_is_content()
                    continue
            if is_whole and self._end:
                feed.begin_record()
                yield from feed.skip_whitespace()
                if (yield from feed.take_marker(self._end)):
                    feed.end_record()
                elif not (yield from self._cut_off(self._end)):
                    self._record_is_content()


class CommandParser(JsonListParser):
    """Command A's names of the keys; the ids of calls are numbers that its template counts itself."""

    name_key = "tool_name"


def _register(
    name: str,
    markers: tuple[str, str],
    detect: Callable[[ModelSigns], bool],
    aliases: tuple[str, ...] = (),
) -> None:
    """Register a dialect whose objects have `name` and `arguments`."""
    begin, end = markers

    def calls(lark: LarkWriter, functions: Sequence[Function], once: bool) -> str:
        """An expression for a list after its opening marker."""
        return f"{call_list(lark, functions, once, 'arguments')} {lark.spelled(end)}"

    TOOL_DIALECTS.register(name)(
        ToolDialect(
            lambda use: JsonListParser(use, begin, end),
            calls,
            detect,
            trigger=begin,
            markers=tuple(filter(None, markers)),
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
        lambda use: CommandParser(use, *COMMAND),
        command_calls,
        detect=lambda signs: COMMAND[0] in signs.template,
        trigger=COMMAND[0],
        markers=COMMAND,
        aliases=("command_a", "cohere_command3", "cohere_command4"),
    )
)
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
_register("granite", GRANITE, detect=lambda signs: GRANITE[0] in signs.template)
_register(
    "hunyuan_a13b",
    HUNYUAN,
    detect=lambda signs: HUNYUAN[0] in signs.template,
    aliases=("jamba",),
)
