"""What models of each dialect write, and what it means: shared by the tests of the parsers and of the grammars."""

import json
from typing import Any, NamedTuple

from server.parsing.parser import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.schemas.chat import Tool, ToolUse

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
}
CLOCK = {"type": "object", "properties": {}}


def tool(name: str, parameters: dict[str, Any] | None = None, strict: bool | None = None) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = [tool("get_weather", WEATHER), tool("now", CLOCK)]
USE = ToolUse.of(TOOLS, "auto")


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    """Name and arguments."""


class Written(NamedTuple):
    dialect: str
    text: str
    answer: Answer


def answer_of(parts: list[Part]) -> Answer:
    """Parts put together again, in the only order that they may come in."""
    content, reasoning, calls = "", "", []
    for part in parts:
        match part:
            case TextPart(text):
                content += text
            case ReasoningPart(text):
                reasoning += text
            case ToolCallPart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsPart(index, fragment):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + fragment)
    return Answer(content, reasoning, calls)


def parsed(parser: AnswerParser, *pieces: str) -> Answer:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return answer_of([*parts, *parser.finish()])


def _answer(content: str = "", *calls: tuple[str, Any]) -> Answer:
    spelled = [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls]
    return Answer(content, "", spelled)


PARIS = {"city": "Paris", "days": 3}
_OBJECT = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
_LLAMA = _OBJECT.replace("arguments", "parameters")
_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001
_FENCED = f'{_DS_CALL}function{_DS_SEP}get_weather\n```json\n{{"city": "Paris", "days": 3}}\n```{_DS_CALL_END}'
_PLAIN = f'{_DS_CALL}get_weather{_DS_SEP}{{"city": "Paris", "days": 3}}{_DS_CALL_END}'
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
_GLM += "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
_XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
_XML += "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
_HARMONY_CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
_CALL, _NOW = ("get_weather", PARIS), ("now", {})

WHOLE = [
    Written("hermes", f"<tool_call>\n{_OBJECT}\n</tool_call>", _answer("", _CALL)),
    Written(
        "hermes",
        f'<tool_call>\n{_OBJECT}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        _answer("", _CALL, _NOW),
    ),
    Written("qwen3_coder", _XML, _answer("", _CALL)),
    Written(
        "qwen3_coder", f"{_XML}\n<tool_call>\n<function=now>\n</function>\n</tool_call>", _answer("", _CALL, _NOW)
    ),
    Written("llama3_json", _LLAMA, _answer("", _CALL)),
    Written("llama3_json", f'{_LLAMA}; {{"name": "now", "parameters": {{}}}}', _answer("", _CALL, _NOW)),
    Written("pythonic", '[get_weather(city="Paris", days=3)]', _answer("", _CALL)),
    Written("pythonic", '[get_weather(city="Paris", days=3), now()]', _answer("", _CALL, _NOW)),
    Written("mistral", f"[TOOL_CALLS][{_OBJECT}]", _answer("", _CALL)),
    Written("mistral", f'[TOOL_CALLS][{_OBJECT}, {{"name": "now", "arguments": {{}}}}]', _answer("", _CALL, _NOW)),
    Written("mistral_args", f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(PARIS)}", _answer("", _CALL)),
    Written(
        "mistral_args",
        f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]now[ARGS]{{}}",
        _answer("", _CALL, _NOW),
    ),
    Written("deepseek_v3", f"{_DS_BEGIN}{_FENCED}{_DS_END}", _answer("", _CALL)),
    Written("deepseek_v3", f"{_DS_BEGIN}{_FENCED}\n{_FENCED}{_DS_END}", _answer("", _CALL, _CALL)),
    Written("deepseek_v31", f"{_DS_BEGIN}{_PLAIN}{_DS_END}", _answer("", _CALL)),
    Written("deepseek_v31", f"{_DS_BEGIN}{_PLAIN}{_PLAIN}{_DS_END}", _answer("", _CALL, _CALL)),
    Written("glm45", _GLM, _answer("", _CALL)),
    Written("glm45", f"{_GLM}\n<tool_call>now\n</tool_call>", _answer("", _CALL, _NOW)),
    Written("harmony", f"{_HARMONY_CALL}{json.dumps(PARIS)}", _answer("", _CALL)),
]
"""Calls as each dialect's models write them when all goes well: its grammar accepts them too."""

_AROUND = [
    Written(
        "hermes",
        f"Let me look.\n\n<tool_call>{_OBJECT}</tool_call>\n\nDone.\n",
        _answer("Let me look.\n\nDone.\n", _CALL),
    ),
    Written("hermes", f"\n<tool_call>\n{_OBJECT}\n</tool_call>\n", _answer("", _CALL)),
    Written("hermes", "a < b, <tool> and <tool_cal", _answer("a < b, <tool> and <tool_cal")),
    Written("llama3_json", f"<|python_tag|>{_LLAMA}", _answer("", _CALL)),
    Written("llama3_json", f"Sure. <|python_tag|>{_LLAMA}\nOk", _answer("Sure. \nOk", _CALL)),
    Written("pythonic", "<|python_start|>[now()]<|python_end|>", _answer("", _NOW)),
    Written(
        "pythonic",
        "[get_weather(city='It\\'s', places=['a', None])] ok",
        _answer(" ok", ("get_weather", '{"city": "It\'s", "places": ["a", null]}')),
    ),
    Written("mistral", f"Hm.[TOOL_CALLS] [{_OBJECT}]", _answer("Hm.", _CALL)),
    Written("mistral_args", '[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{"a": 1}', _answer("", ("now", {"a": 1}))),
    Written("mistral_args", '[TOOL_CALLS]now{"a": 1}', _answer("", ("now", {"a": 1}))),
    Written("deepseek_v3", f"Ok.\n{_DS_BEGIN}{_FENCED}{_DS_END}\nbye", _answer("Ok.\nbye", _CALL)),
    Written(
        "glm45",
        _GLM.replace("\n", ""),
        _answer("", _CALL),
    ),
    Written(
        "glm45",
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12\n"x"</arg_value>\n<arg_key>note</arg_key>\n'
        "<arg_value>null</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>True</arg_value>\n</tool_call>",
        _answer("", ("get_weather", {"city": '12\n"x"', "note": None, "exact": True})),
    ),
    Written(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n\n  two\nlines\n\n</parameter>\n</function>",
        _answer("", ("get_weather", {"city": "\n  two\nlines\n"})),
    ),
    Written(
        "harmony",
        f"<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{_HARMONY_CALL}{json.dumps(PARIS)}<|call|>",
        Answer("I look.", "Think.", [("get_weather", json.dumps(PARIS))]),
    ),
    Written("harmony", "<|channel|>final<|message|>It is\n12.<|return|>", _answer("It is\n12.")),
    Written(
        "harmony",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>"
        "assistant<|channel|>final<|message|>C",
        Answer("C", "A\nB", []),
    ),
    Written(
        "harmony",
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"a": [1]}<|call|>',
        _answer("", ("now", {"a": [1]})),
    ),
]

_MENDED = [
    Written(
        "hermes",
        f'<tool_call>{{"arguments": {json.dumps(PARIS)}, "name": "get_weather"}}</tool_call>',
        _answer("", _CALL),
    ),
    Written(
        "hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', _answer("", ("now", {"a": 1}))
    ),
    Written("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', _answer("", _NOW)),
    Written("hermes", '<tool_call>{"name": "now"}</tool_call>', _answer("", _NOW)),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call>',
        _answer("}}</tool_call>", ("now", '{"a": [1]}')),
    ),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "Rome", "Italy"}}</tool_call>',
        _answer(', "Italy"}}</tool_call>', ("now", '{"a": "Rome"}')),
    ),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": 1, "b": maybe}}</tool_call>',
        _answer(', "b": maybe}}</tool_call>', ("now", '{"a": 1}')),
    ),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [1\n</tool_call>!',
        _answer("!", ("now", '{"a": [1\n]}')),
    ),
    Written(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}}}\n</tool_call>', _answer("", ("now", {"a": 1}))
    ),
    Written(
        "hermes",
        "<tool_call>{'name': 'now', 'arguments': {'a': \"it's\", 'b': 'say \"x\"', c: True,},}</tool_call>",
        _answer("", ("now", '{"a": "it\'s", "b": "say \\"x\\"", "c": true}')),
    ),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "x\ny\\d\\\'", "b": +1, "c": .5}}</tool_call>',
        _answer("", ("now", '{"a": "x\\ny\\\\d\'", "b": 1, "c": 0.5}')),
    ),
    Written(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}{"name": "now", "arguments": {}}</tool_call>',
        _answer("", _NOW, _NOW),
    ),
    Written("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": [7]}</tool_call>', _answer("", _NOW)),
]

_NO_CALLS = [
    Written("hermes", text, _answer(text))
    for text in (
        "<tool_call>\nnot json\n</tool_call>\n",
        '\n<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"na',
        '<tool_call>{"arguments": {"city": "Pa',
        "<tool_call>",
    )
]
_NO_CALLS += [
    Written(dialect, text, _answer(text))
    for dialect, text in (
        ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
        ("llama3_json", '{"name": "now"}'),
        ("llama3_json", '{"name": "now", "param'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[no"),
        ("mistral", "[TOOL_CALLS]what is this?"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral_args", "[TOOL_CALLS]get_wea"),
        ("deepseek_v3", f"{_DS_BEGIN} nothing"),
        ("deepseek_v3", f"{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}now\n```json\n[1]\n```"),
        ("glm45", "<tool_call>what now</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=no w>\n</function>\n</tool_call>"),
        ("harmony", "<|channel|>final<|end|>x"),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>[1]"),
        ("harmony", "plain"),
        ("harmony", f"<|channel|>{'long ' * 60}<|message|>x"),
    )
]

BROKEN = [
    Written("pythonic", text, _answer(content, ("get_weather", arguments)))
    for text, content, arguments in (
        ("[get_weather(city='a', 3)]", ", 3)]", '{"city": "a"}'),
        ("[get_weather(city=elsewhere)]", "city=elsewhere)]", "{}"),
        ("[get_weather(city='a', days=later)]", "days=later)]", '{"city": "a"}'),
        ("[get_weather(places=[1 2])]", "2])]", '{"places": [1 ]}'),
        ("[get_weather(city='a' days=3)]", " days=3)]", '{"city": "a"}'),
    )
]
BROKEN += [
    Written("glm45", f"{text}\nNo.", _answer(f"{content}\nNo.", ("get_weather", arguments)))
    for text, content, arguments in (
        ("<tool_call>get_weather\n<arg_key>days</arg_key>3", "<arg_key>days</arg_key>3", "{}"),
        (_GLM.replace("</tool_call>", "3 days"), "3 days", json.dumps(PARIS)),
    )
]
BROKEN += [
    Written("qwen3_coder", f"{text}\nNo.", _answer(f"{content}\nNo.", ("get_weather", arguments)))
    for text, content, arguments in (
        ("<tool_call>\n<function=get_weather>\nParis", "Paris", "{}"),
        (_XML.replace("</function>\n</tool_call>", "3 days"), "3 days", json.dumps(PARIS)),
    )
]
"""Calls whose arguments turn wrong."""

CUT_OFF = [
    Written(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
        _answer("", ("get_weather", '{"city": "Pa')),
    ),
    Written(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": 1, ',
        _answer("", ("get_weather", '{"days": 1, ')),
    ),
    Written(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": 12',
        _answer("", ("get_weather", '{"days": 12')),
    ),
    Written(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\u00',
        _answer("", ("get_weather", '{"city": "\\u00')),
    ),
    Written("hermes", '<tool_call>\n{"name": "get_weather", "argu', _answer("", ("get_weather", ""))),
    Written("hermes", '<tool_call>\n{"name": "get_weather"', _answer("", ("get_weather", ""))),
    Written("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_', _answer("", _NOW)),
    Written("llama3_json", '{"name": "now", "parameters": {"a": ', _answer("", ("now", '{"a": '))),
    Written("pythonic", "[get_weather(city='Pa", _answer("", ("get_weather", '{"city": "Pa'))),
    Written("pythonic", "[get_weather(city='Pa', da", _answer("", ("get_weather", '{"city": "Pa"'))),
    Written("pythonic", "[get_weather(ci", _answer("", ("get_weather", ""))),
    Written("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a"', _answer("", ("now", '{"a"'))),
    Written("mistral_args", "[TOOL_CALLS]now[ARGS]", _answer("", ("now", ""))),
    Written("deepseek_v31", f'{_DS_BEGIN}{_DS_CALL}now{_DS_SEP}{{"a": tr', _answer("", ("now", '{"a": tr'))),
    Written("deepseek_v3", f"{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}now\n```json\n{{}}\n``", _answer("", _NOW)),
    Written(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        _answer("", ("get_weather", '{"city": "Par')),
    ),
    Written(
        "glm45",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1",
        _answer("", ("get_weather", '{"days": 1')),
    ),
    Written("glm45", "<tool_call>get_weather\n<arg_key>da", _answer("", ("get_weather", ""))),
    Written(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n",
        _answer("", ("get_weather", '{"city": "Paris\\n')),
    ),
    Written("harmony", f'{_HARMONY_CALL}{{"city": "P', _answer("", ("get_weather", '{"city": "P'))),
    Written("harmony", "<|channel|>analysis<|message|>Hm", Answer("", "Hm", [])),
]
"""Texts that end within a call."""

TEXTS = [*WHOLE, *_AROUND, *_MENDED, *_NO_CALLS, *BROKEN, *CUT_OFF]
