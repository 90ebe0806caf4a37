"""Texts that models of each dialect write, with their meaning: shared by the tests of the parsers and of the
grammars."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from server.parsing.parser import AnswerParser, ArgumentsPart, Part, ReasoningPart, TextPart, ToolCallPart
from server.schemas.chat_tools import FunctionTool, ToolUse

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


def tool(name: str, parameters: dict[str, Any] | None = None, strict: bool | None = None) -> FunctionTool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return FunctionTool.model_validate({"type": "function", "function": function})


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
    """Join parts in the only order in which they may come."""
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


def parsed(parser: AnswerParser, *pieces: str, cut_off: bool = False) -> Answer:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return answer_of([*parts, *parser.finish(cut_off=cut_off)])


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
_SEED = "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
_SEED += "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
_SEED_NOW = "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
_MIMO, _MIMO_NOW = _SEED.replace("seed:", ""), _SEED_NOW.replace("seed:", "")
_GLM47 = _GLM.replace("\n", "")
_HY = "<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
_HY += "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
_HY_NOW = "<tool_call>now<tool_sep>\n</tool_call>"
_HY_OPEN, _HY_OPEN_NOW = (text.replace(">", ":opensource>") for text in (_HY, _HY_NOW))
_LONGCAT_KEYS = _GLM.replace("tool_call>", "longcat_tool_call>").replace("arg_", "longcat_arg_")
_INVOKE = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
_INVOKE += '<parameter name="days">3</parameter>\n</invoke>'
_INVOKE_NOW = '<invoke name="now">\n</invoke>'
_MM_BEGIN, _MM_END = "<minimax:tool_call>", "</minimax:tool_call>"


_NS = "]<]minimax[>["
_M3_BEGIN, _M3_END = f"{_NS}<tool_call>", f"{_NS}</tool_call>"


def _tag(name: str, value: str) -> str:
    """An argument, a member or an item as MiniMax-M3 writes it."""
    return f"{_NS}<{name}>{value}{_NS}</{name}>"


def _invoked(name: str, *tags: str) -> str:
    """A call as MiniMax-M3 writes it."""
    return f'{_NS}<invoke name="{name}">{"".join(tags)}{_NS}</invoke>'


_M3 = _invoked("get_weather", _tag("city", "Paris"), _tag("days", "3"))
_M3_NOW = _invoked("now")


def _dsml(text: str, block: str, prefix: str = "｜DSML｜") -> str:  # noqa: RUF001
    """Convert MiniMax's calls to a block in DeepSeek's format."""
    for name in ("invoke", "parameter"):
        text = text.replace(f"<{name}", f"<{prefix}{name}").replace(f"</{name}", f"</{prefix}{name}")
    text = text.replace('name="city"', 'name="city" string="true"')
    text = text.replace('name="days"', 'name="days" string="false"')
    return f"<{prefix}{block}>\n{text}\n</{prefix}{block}>"


_DSML = [
    ("deepseek_v32", "function_calls", "｜DSML｜"),  # noqa: RUF001
    ("deepseek_v4", "tool_calls", "｜DSML｜"),  # noqa: RUF001
    ("deepseek_v41", "calls", "｜DSML｜ "),  # noqa: RUF001
    ("gigachat35", "tool_calls", "｜GCML｜"),  # noqa: RUF001
]
_K_BEGIN, _K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K_ARGUMENTS, _K_CALL_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI = f'<|tool_call_begin|>functions.get_weather:0{_K_ARGUMENTS}{{"city": "Paris", "days": 3}}{_K_CALL_END}'
_KIMI_NOW = f"<|tool_call_begin|>functions.now:1{_K_ARGUMENTS}{{}}{_K_CALL_END}"
_SOLAR = "<|tool_call:begin|>0a1b2c3d4e<|tool_call:name|>get_weather<|tool_call:args|>"
_SOLAR += f"{json.dumps(PARIS)}<|tool_call:end|>"
_SOLAR_NOW = "<|tool_call:begin|>zzzzzzzzz9<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>"
_MINICPM = '<function name="get_weather"><param name="city">Paris</param><param name="days">3</param></function>'
_MINICPM_NOW = '<function name="now"></function>'
_FUNCTION_GEMMA = "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
_GEMMA = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
_COMMAND = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
_COMMAND_NOW = '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
_OBJECT_NOW = '{"name": "now", "arguments": {}}'
_LISTS = [
    ("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
    ("phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
    ("granite", "<|tool_call|>", ""),
    ("hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
]
_HUNYUAN_LEAD = "\u52a9\u624b\uff1a"
_LONGCAT = f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>"
_LONGCAT_NOW = f"<longcat_tool_call>\n{_OBJECT_NOW}\n</longcat_tool_call>"
_APERTUS = '{"get_weather": {"city": "Paris", "days": 3}}'
_GIGACHAT3 = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
_PYTHON = 'get_weather(city="Paris", days=3)'
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
    Written("llama4_json", _LLAMA, _answer("", _CALL)),
    Written("llama4_json", f"{_LLAMA}{_LLAMA}", _answer("", _CALL, _CALL)),
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
    Written("seed_oss", _SEED, _answer("", _CALL)),
    Written("seed_oss", f"{_SEED}\n{_SEED_NOW}", _answer("", _CALL, _NOW)),
    Written("mimo", _MIMO, _answer("", _CALL)),
    Written("mimo", f"{_MIMO}\n{_MIMO_NOW}", _answer("", _CALL, _NOW)),
    Written("glm47", _GLM47, _answer("", _CALL)),
    Written("glm47", f"{_GLM47}<tool_call>now</tool_call>", _answer("", _CALL, _NOW)),
    Written("hy_v3", f"<tool_calls>\n{_HY}\n</tool_calls>", _answer("", _CALL)),
    Written("hy_v3", f"<tool_calls>\n{_HY}\n{_HY_NOW}\n</tool_calls>", _answer("", _CALL, _NOW)),
    Written("hy_v3_opensource", f"<tool_calls:opensource>\n{_HY_OPEN}\n</tool_calls:opensource>", _answer("", _CALL)),
    Written(
        "hy_v3_opensource",
        f"<tool_calls:opensource>\n{_HY_OPEN}\n{_HY_OPEN_NOW}\n</tool_calls:opensource>",
        _answer("", _CALL, _NOW),
    ),
    Written("longcat_keys", _LONGCAT_KEYS, _answer("", _CALL)),
    Written(
        "longcat_keys",
        f"{_LONGCAT_KEYS}\n<longcat_tool_call>now\n</longcat_tool_call>",
        _answer("", _CALL, _NOW),
    ),
    Written("minicpm5", _MINICPM, _answer("", _CALL)),
    Written("minicpm5", f"{_MINICPM}\n{_MINICPM_NOW}", _answer("", _CALL, _NOW)),
    Written("minimax_m2", f"{_MM_BEGIN}\n{_INVOKE}\n{_MM_END}", _answer("", _CALL)),
    Written("minimax_m2", f"{_MM_BEGIN}\n{_INVOKE}\n{_INVOKE_NOW}\n{_MM_END}", _answer("", _CALL, _NOW)),
    Written("minimax_m3", f"{_M3_BEGIN}\n{_M3}\n{_M3_END}", _answer("", _CALL)),
    Written("minimax_m3", f"{_M3_BEGIN}\n{_M3}\n{_M3_NOW}\n{_M3_END}", _answer("", _CALL, _NOW)),
    *(
        Written(dialect, _dsml(text, block, prefix), answer)
        for dialect, block, prefix in _DSML
        for text, answer in (
            (_INVOKE, _answer("", _CALL)),
            (f"{_INVOKE}\n{_INVOKE_NOW}", _answer("", _CALL, _NOW)),
        )
    ),
    Written("kimi_k2", f"{_K_BEGIN}{_KIMI}{_K_END}", _answer("", _CALL)),
    Written("kimi_k2", f"{_K_BEGIN}{_KIMI}{_KIMI_NOW}{_K_END}", _answer("", _CALL, _NOW)),
    Written("solar_open", f"<|tool_calls|>{_SOLAR}", _answer("", _CALL)),
    Written("solar_open", f"<|tool_calls|>{_SOLAR}{_SOLAR_NOW}", _answer("", _CALL, _NOW)),
    Written("xlam", f"[{_OBJECT}]", _answer("", _CALL)),
    Written("xlam", f"[{_OBJECT}, {_OBJECT_NOW}]", _answer("", _CALL, _NOW)),
    Written("functiongemma", _FUNCTION_GEMMA, _answer("", _CALL)),
    Written(
        "functiongemma",
        f"{_FUNCTION_GEMMA}<start_function_call>call:now{{}}<end_function_call>",
        _answer("", _CALL, _NOW),
    ),
    Written("gemma4", _GEMMA, _answer("", _CALL)),
    Written("gemma4", f"{_GEMMA}<|tool_call>call:now{{}}<tool_call|>", _answer("", _CALL, _NOW)),
    Written("cohere_command", f"<|START_ACTION|>[\n    {_COMMAND}\n]<|END_ACTION|>", _answer("", _CALL)),
    Written(
        "cohere_command",
        f"<|START_ACTION|>[\n    {_COMMAND},\n    {_COMMAND_NOW}\n]<|END_ACTION|>",
        _answer("", _CALL, _NOW),
    ),
    *(
        Written(dialect, f"{begin}[{text}]{end}", answer)
        for dialect, begin, end in _LISTS
        for text, answer in ((_OBJECT, _answer("", _CALL)), (f"{_OBJECT}, {_OBJECT_NOW}", _answer("", _CALL, _NOW)))
    ),
    Written("apertus", f"<|tools_prefix|>[{_APERTUS}]<|tools_suffix|>", _answer("", _CALL)),
    Written("apertus", f'<|tools_prefix|>[{_APERTUS}, {{"now": {{}}}}]<|tools_suffix|>', _answer("", _CALL, _NOW)),
    Written("gigachat3", f"{_GIGACHAT3}{_OBJECT}", _answer("", _CALL)),
    Written("gigachat31", f"<|function_call|>{_OBJECT}", _answer("", _CALL)),
    Written("granite_20b_fc", f"<function_call> {_OBJECT}", _answer("", _CALL)),
    Written("granite_20b_fc", f"<function_call> {_OBJECT}<function_call> {_OBJECT_NOW}", _answer("", _CALL, _NOW)),
    Written("longcat", _LONGCAT, _answer("", _CALL)),
    Written("longcat", f"{_LONGCAT}\n{_LONGCAT_NOW}", _answer("", _CALL, _NOW)),
    Written("minimax_m1", f"<tool_calls>\n{_OBJECT}\n</tool_calls>", _answer("", _CALL)),
    Written("minimax_m1", f"<tool_calls>\n{_OBJECT}\n{_OBJECT_NOW}\n</tool_calls>", _answer("", _CALL, _NOW)),
    Written("dots", f"<dots_function_call>\n{_INVOKE}\n</dots_function_call>", _answer("", _CALL)),
    Written(
        "dots", f"<dots_function_call>\n{_INVOKE}\n{_INVOKE_NOW}\n</dots_function_call>", _answer("", _CALL, _NOW)
    ),
    Written("lfm2", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>", _answer("", _CALL)),
    Written("lfm2", f"<|tool_call_start|>[{_PYTHON}, now()]<|tool_call_end|>", _answer("", _CALL, _NOW)),
    Written("olmo3", f"<function_calls>{_PYTHON}</function_calls>", _answer("", _CALL)),
    Written("olmo3", f"<function_calls>{_PYTHON}\nnow()</function_calls>", _answer("", _CALL, _NOW)),
]
"""Correct calls as each dialect's models write them: its grammar accepts them too."""

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
    Written("llama4_json", f"<|python_start|><|python_end|>{_LLAMA}", _answer("", _CALL)),
    Written("llama4_json", f"<|python_start|>I look.<|python_end|>{_LLAMA}{_LLAMA}", _answer("I look.", _CALL, _CALL)),
    Written("llama4_json", f"<|python_start|>{_LLAMA}<|python_end|>", _answer("", _CALL)),
    Written("llama4_json", "<|python_start|>1 + 1<|python_end|>", _answer("1 + 1")),
    Written("llama4_json", '<|python_start|><|python_end|>{"answer": 42}', _answer('{"answer": 42}')),
    Written("llama4_json", '<|python_start|>{"a": 1}<|python_end|>', _answer('{"a": 1}')),
    Written(
        "llama4_json",
        '<|python_start|>{"name": "Bob", "age": 3}<|python_end|>',
        _answer('{"name": "Bob", "age": 3}'),
    ),
    Written("llama4_json", "<|python_start|>\n    x = 1<|python_end|>\n  Ok", _answer("\n    x = 1\n  Ok")),
    Written("llama3_json", "Llama 4 writes <|python_start|> x", _answer("Llama 4 writes <|python_start|> x")),
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
_AROUND += [
    Written("apertus", f"I look.<|tools_prefix|>[{_APERTUS}]<|tools_suffix|>", _answer("I look.", _CALL)),
    Written("apertus", f"<|tools_prefix|> [ {_APERTUS} , ]<|tools_suffix|> Ok", _answer(" Ok", _CALL)),
    Written(
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris"<|tools_suffix|>',
        _answer("", ("get_weather", {"city": "Paris"})),
    ),
    Written("apertus", "<|tools_prefix|>[12]<|tools_suffix|>", _answer("<|tools_prefix|>[12]<|tools_suffix|>")),
    Written("gigachat3", f"I look.{_GIGACHAT3}{_OBJECT}<|message_sep|>\n\n", _answer("I look.", _CALL)),
    Written("gigachat3", f"function call<|role_sep|>\n{_OBJECT}", _answer("", _CALL)),
    Written(
        "gigachat3", "A function call needs\na name.<|message_sep|>\n\n", _answer("A function call needs\na name.")
    ),
    Written("gigachat31", f"I look.<|function_call|>{_OBJECT}<|message_sep|>", _answer("I look.", _CALL)),
    Written("seed_oss", f"I look.\n{_SEED}\n", _answer("I look.", _CALL)),
    Written(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\ntwo\nlines\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        _answer("", ("get_weather", {"city": "\ntwo\nlines\n"})),
    ),
    Written("minimax_m2", f"I look.\n{_MM_BEGIN}\n{_INVOKE}\n{_MM_END}\nDone.", _answer("I look.\nDone.", _CALL)),
    Written("minimax_m2", _INVOKE, _answer("", _CALL)),
    Written("minimax_m3", f"I look.\n{_M3_BEGIN}\n{_M3}\n{_M3_END}\nDone.", _answer("I look.\nDone.", _CALL)),
    Written("minimax_m3", _M3.replace(_NS, f"\n{_NS}").replace("Paris\n", "Paris"), _answer("", _CALL)),
    Written(
        "minimax_m3",
        f"{_M3_BEGIN}\n"
        + _invoked(
            "get_weather",
            _tag("city", " two\n<b>lines</b>\n"),
            _tag("places", _tag("item", "Rome") + _tag("item", "3")),
            _tag("note", "null"),
            _tag("exact", "True"),
        )
        + f"\n{_M3_END}",
        _answer(
            "",
            (
                "get_weather",
                {"city": " two\n<b>lines</b>\n", "places": ["Rome", "3"], "note": None, "exact": True},
            ),
        ),
    ),
    Written(
        "minimax_m3",
        _invoked("find", _tag("of", _tag("a", "1") + _tag("b", _tag("item", _tag("c", "x")) + _tag("item", "2")))),
        _answer("", ("find", {"of": {"a": 1, "b": [{"c": "x"}, 2]}})),
    ),
    Written(
        "minimax_m3",
        _invoked("get_weather", _tag("places", ""), _tag("note", " x"), _tag("exact", "")),
        _answer("", ("get_weather", {"places": [], "note": " x", "exact": ""})),
    ),
    Written("minimax_m3", f"{_M3_BEGIN}\n{_M3}\n{_M3_END}".replace(f"{_NS}<", f"{_NS} \n<"), _answer("", _CALL)),
    Written(
        "minimax_m3",
        _invoked("get_weather", _tag("city", f"{_tag('places', 'x')}{_NS}<b>{_M3_END}"), _tag("exact", "TRUE")),
        _answer("", ("get_weather", {"city": f"{_tag('places', 'x')}{_NS}<b>{_M3_END}", "exact": True})),
    ),
    Written(
        "minimax_m3",
        _invoked("find", _tag("of", f"{_NS}<b>{_tag('item', '1')}{_tag('item', '2')}"), _tag("New York", "3")),
        _answer("", ("find", {"of": {"b": [1, 2]}, "New York": 3})),
    ),
    Written(
        "minimax_m3",
        f"{_M3_BEGIN}\n{_invoked('find', f'{_NS}<of>' + _tag('a', '1'))}".removesuffix(f"{_NS}</invoke>") + _M3_END,
        _answer("", ("find", {"of": {"a": 1}})),
    ),
    Written(
        "minimax_m2",
        f'{_MM_BEGIN}<invoke name="get_weather"><parameter name="places">["a", "b<c"]</parameter>'
        f'<parameter name="note">null</parameter></invoke>{_MM_END}',
        _answer("", ("get_weather", {"places": ["a", "b<c"], "note": None})),
    ),
    Written(
        "deepseek_v32",
        _dsml(
            '<invoke name="get_weather">\n<parameter name="note" string="true">null</parameter>\n</invoke>',
            "function_calls",
        ),
        _answer("", ("get_weather", {"note": "null"})),
    ),
    Written(
        "deepseek_v32",
        "I look.\n\n"
        + _dsml(
            '<invoke name="elsewhere">\n<parameter name="x" string="false">{"a": [1]}</parameter>\n</invoke>',
            "function_calls",
        ),
        _answer("I look.", ("elsewhere", {"x": {"a": [1]}})),
    ),
    Written("kimi_k2", f"I look.{_K_BEGIN}\n{_KIMI}\n{_K_END}", _answer("I look.", _CALL)),
    Written("kimi_k2", _KIMI_NOW.replace("functions.now:1", "now"), _answer("", _NOW)),
    Written("solar_open", f"I look.<|tool_calls|>{_SOLAR}<|calls|>", _answer("I look.", _CALL)),
    Written("solar_open", _SOLAR, _answer("", _CALL)),
    Written("solar_open", f"<|tool_calls|>{_SOLAR}{_SOLAR}", _answer("", _CALL, _CALL)),
    Written(
        "minicpm5",
        'I look.\n<function name="get_weather"><param name="city"><![CDATA[a < b\n</param> ]] &]]></param>'
        '<param name="places">[\'x\', "it\'s"]</param><param name="exact">True</param></function>\nDone.',
        _answer(
            "I look.\nDone.", ("get_weather", {"city": "a < b\n</param> ]] &", "places": ["x", "it's"], "exact": True})
        ),
    ),
    Written("minicpm5", f"{_MINICPM}{_MINICPM_NOW}", _answer("", _CALL, _NOW)),
    Written("xlam", _OBJECT, _answer("", _CALL)),
    Written("xlam", f"[{_OBJECT}]\nDone.", _answer("Done.", _CALL)),
    Written(
        "gemma4",
        'I look.<|tool_call>call:f{of:{k:[1,<|"|>a,"b"<|"|>,{}],<|"|>x y<|"|>:None},ok:true,no:word,j:"a\\n"}'
        "<tool_call|>",
        _answer("I look.", ("f", {"of": {"k": [1, 'a,"b"', {}], "x y": None}, "ok": True, "no": "word", "j": "a\n"})),
    ),
    Written("gemma4", "<|tool_call>call:f{ a : 1 , b:[ ] }<tool_call|>", _answer("", ("f", {"a": 1, "b": []}))),
    Written("cohere_command", f"I look.<|START_ACTION|>[{_COMMAND}]<|END_ACTION|>", _answer("I look.", _CALL)),
    Written("nemotron_json", f"I look.\n\n<TOOLCALL>[{_OBJECT}]</TOOLCALL>\n", _answer("I look.", _CALL)),
    Written("hunyuan_a13b", f"<tool_calls>{_OBJECT}</tool_calls>", _answer("", _CALL)),
    Written("hunyuan_a13b", f"{_HUNYUAN_LEAD}12 {_HUNYUAN_LEAD}", _answer(f"12 {_HUNYUAN_LEAD}")),
    Written("hunyuan_a13b", _HUNYUAN_LEAD[:2], _answer(_HUNYUAN_LEAD[:2])),
    Written("hy_v3", "I look.<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", _answer("I look.", _NOW)),
    Written("lfm2", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>I look.", _answer("I look.", _CALL)),
    Written(
        "lfm2",
        "<|tool_call_start|>[f(a='it\\'s', b={'k': None})]<|tool_call_end|>",
        _answer("", ("f", {"a": "it's", "b": {"k": None}})),
    ),
    Written("olmo3", f"I look.\n<function_calls>\n{_PYTHON}\n</function_calls>", _answer("I look.", _CALL)),
    Written("lfm2", f"<|tool_call_start|>[{_OBJECT}]<|tool_call_end|>I look.", _answer("I look.", _CALL)),
    Written("lfm2", f"<|tool_call_start|>\n[{_OBJECT}, {_OBJECT_NOW}]\n<|tool_call_end|>", _answer("", _CALL, _NOW)),
    Written("lfm2", f"<|tool_call_start|>{_OBJECT}<|tool_call_end|>", _answer("", _CALL)),
    Written(
        "lfm2",
        "<|tool_call_start|>[f(a='it's O'Brien's', b={'don't': ['x', 'rock'n'roll']}, c='')]<|tool_call_end|>",
        _answer("", ("f", {"a": "it's O'Brien's", "b": {"don't": ["x", "rock'n'roll"]}, "c": ""})),
    ),
    Written(
        "kimi_k2",
        f"I look.{_K_BEGIN}{_KIMI}{_KIMI_NOW}{_K_END}".replace("tool_calls_section", "tool_call_section"),
        _answer("I look.", _CALL, _NOW),
    ),
    Written("kimi_k2", f"{_K_BEGIN}{_KIMI}<|tool_call_section_end|>I look.", _answer("I look.", _CALL)),
    Written("qwen3_coder", f"I look.\n\n{_XML.removeprefix('<tool_call>')}", _answer("I look.", _CALL)),
    Written("qwen3_coder", f"{_XML.removeprefix('<tool_call>')}\n{_XML}\nDone.", _answer("Done.", _CALL, _CALL)),
    Written("seed_oss", _SEED.removeprefix("<seed:tool_call>"), _answer("", _CALL)),
    Written("granite", f"<tool_call>[{_OBJECT}, {_OBJECT_NOW}]", _answer("", _CALL, _NOW)),
    Written("granite", f"I look.<tool_call>[{_OBJECT}]</tool_call>", _answer("I look.", _CALL)),
    Written("hermes", f"<tool_call>[{_OBJECT}, {_OBJECT_NOW}]</tool_call>\nDone.", _answer("Done.", _CALL, _NOW)),
]

_MENDED = [
    Written("hermes", f"<tool_call>[{_OBJECT}, {_OBJECT_NOW}</tool_call>\nDone.", _answer("Done.", _CALL, _NOW)),
    Written("hermes", f"<tool_call>[{_OBJECT[:-1]}</tool_call>", _answer("", _CALL)),
    Written("hermes", f"<tool_call>[{_OBJECT},]</tool_call>", _answer("", _CALL)),
    Written("nemotron_json", f"<TOOLCALL>[{_OBJECT}, {_OBJECT_NOW}</TOOLCALL>Done.", _answer("Done.", _CALL, _NOW)),
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
        ("seed_oss", "<seed:tool_call>\nget_weather"),
        ("mimo", "<tool_call>\nget_weather"),
        ("glm47", "<tool_call>what now</tool_call>"),
        ("hy_v3", "<tool_calls> none"),
        ("minimax_m2", "<minimax:tool_call>\nnothing"),
        ("minimax_m2", '<invoke name="a<b">'),
        ("minimax_m3", f"{_M3_BEGIN}\nnothing"),
        ("minimax_m3", f'{_NS}<invoke name="a<b">'),
        ("deepseek_v32", "<｜DSML｜function_calls>\n<｜DSML｜invoke name=now>"),  # noqa: RUF001
        ("solar_open", "<|tool_calls|> nothing"),
        ("solar_open", "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|><|tool_call:args|>{}"),
        ("solar_open", "<|tool_call:begin|>0<|tool_call:name|>now<|tool_call:args|>[1]"),
        ("minicpm5", '<function name="a<b">'),
        ("xlam", "[1, 2]"),
        ("xlam", '[{"name": "Bob", "arguments": {"age": 3}}]'),
        ("xlam", "I could write [{}]."),
        ("kimi_k2", f"{_K_BEGIN} nothing"),
        ("kimi_k2", f"{_K_BEGIN}<|tool_call_begin|>functions.:0{_K_ARGUMENTS}{{}}"),
        ("kimi_k2", f"{_K_BEGIN}<|tool_call_begin|>functions.now:0{_K_ARGUMENTS}[1]"),
        ("gemma4", "<|tool_call>get_weather{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:now(1)<tool_call|>"),
        ("cohere_command", f"<|START_ACTION|>[{_OBJECT}]<|END_ACTION|>"),
        ("nemotron_json", "<TOOLCALL>what is this?"),
        ("nemotron_json", "<TOOLCALL>[1]</TOOLCALL>"),
        ("granite", "<|tool_call|>nothing"),
        ("lfm2", "<|tool_call_start|>[1, 2]<|tool_call_end|>"),
        ("olmo3", "<function_calls>now"),
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
BROKEN += [
    Written(dialect, f"{text}\nNo.", _answer(f"{content}\nNo.", ("get_weather", arguments)))
    for dialect, text, content, arguments in (
        ("seed_oss", _SEED.replace("</function>\n</seed:tool_call>", "3 days"), "3 days", json.dumps(PARIS)),
        ("minimax_m2", f"{_MM_BEGIN}\n{_INVOKE.replace('</invoke>', '3 days')}", "3 days", json.dumps(PARIS)),
        ("minimax_m2", f'{_MM_BEGIN}\n<invoke name="get_weather">\nParis', "Paris", "{}"),
        ("minimax_m3", f"{_M3_BEGIN}\n{_M3.removesuffix(f'{_NS}</invoke>')}3 days", "3 days", json.dumps(PARIS)),
        ("minimax_m3", f'{_M3_BEGIN}\n{_NS}<invoke name="get_weather">Paris', "Paris", "{}"),
        (
            "minimax_m3",
            _M3.replace("</days>", "</da<ys>"),
            f"{_NS}</da<ys>{_NS}</invoke>",
            json.dumps(PARIS),
        ),
        ("kimi_k2", f"{_K_BEGIN}{_KIMI.replace('3}', '3 4}')}", f"4}}{_K_CALL_END}", '{"city": "Paris", "days": 3 }'),
        ("gemma4", _GEMMA.replace("3}<tool_call|>", "3 4}"), " 4}", json.dumps(PARIS)),
        ("gemma4", _GEMMA.replace("days:3}<tool_call|>", "places:[1 2}"), " 2}", '{"city": "Paris", "places": [1]}'),
        ("gemma4", _GEMMA.replace("days:3}<tool_call|>", "days}"), ",days}", '{"city": "Paris"}'),
        ("lfm2", "<|tool_call_start|>[get_weather(city='a', 3)]", ", 3)]", '{"city": "a"}'),
    )
]
"""Calls whose arguments become invalid."""

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
    Written("seed_oss", _SEED[: _SEED.index("ris")], _answer("", ("get_weather", '{"city": "Pa'))),
    Written("glm47", _GLM47[: _GLM47.index("ris")], _answer("", ("get_weather", '{"city": "Pa'))),
    Written("hy_v3", "<tool_calls>\n<tool_call>now<tool_sep>\n</tool_ca", _answer("", ("now", ""))),
    Written(
        "minimax_m2",
        f"{_MM_BEGIN}\n{_INVOKE[: _INVOKE.index('ris')]}",
        _answer("", ("get_weather", '{"city": "Pa')),
    ),
    Written("minimax_m2", f"{_MM_BEGIN}\n{_INVOKE}\n</minimax:to", _answer("", _CALL)),
    Written("minimax_m3", f"{_M3_BEGIN}\n{_M3[: _M3.index('ris')]}", _answer("", ("get_weather", '{"city": "Pa'))),
    Written("minimax_m3", _M3[: _M3.index("days")], _answer("", ("get_weather", '{"city": "Paris"'))),
    Written("minimax_m3", _M3[: -len("oke>")], _answer("", ("get_weather", '{"city": "Paris", "days": 3'))),
    Written("minimax_m3", f"{_M3_BEGIN}\n{_M3}\n{_M3_END[:-3]}", _answer("", _CALL)),
    Written(
        "minimax_m3",
        _invoked("get_weather", f"{_NS}<places>{_tag('item', 'Rome')}")[: -len(f"{_NS}</invoke>")],
        _answer("", ("get_weather", '{"places": ["Rome"')),
    ),
    Written("solar_open", _SOLAR[: _SOLAR.index("ris")], _answer("", ("get_weather", '{"city": "Pa'))),
    Written("solar_open", f"<|tool_calls|>{_SOLAR}<|tool_call:be", _answer("", _CALL)),
    Written("minicpm5", _MINICPM[: _MINICPM.index("ris")], _answer("", ("get_weather", '{"city": "Pa'))),
    Written("minicpm5", f"{_MINICPM}\n<function na", _answer("", _CALL)),
    Written("xlam", f"[{_OBJECT[: _OBJECT.index('ris')]}", _answer("", ("get_weather", '{"city": "Pa'))),
    Written("kimi_k2", f"{_K_BEGIN}{_KIMI[: _KIMI.index('ris')]}", _answer("", ("get_weather", '{"city": "Pa'))),
    Written("kimi_k2", f"{_K_BEGIN}{_KIMI}<|tool_calls_sec", _answer("", _CALL)),
    Written("gemma4", _GEMMA[: _GEMMA.index("ris")], _answer("", ("get_weather", '{"city": "Pa'))),
    Written("gemma4", _GEMMA[: _GEMMA.index("ys:3")], _answer("", ("get_weather", '{"city": "Paris"'))),
    Written("gemma4", _GEMMA[: -len("}<tool_call|>")], _answer("", ("get_weather", '{"city": "Paris"'))),
    Written("gemma4", _GEMMA[:-3], _answer("", _CALL)),
    Written(
        "cohere_command",
        f"<|START_ACTION|>[{_COMMAND[: _COMMAND.index('ris')]}",
        _answer("", ("get_weather", '{"city": "Pa')),
    ),
    Written("lfm2", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_", _answer("", _CALL)),
    Written("harmony", f'{_HARMONY_CALL}{{"city": "P', _answer("", ("get_weather", '{"city": "P'))),
    Written("harmony", "<|channel|>analysis<|message|>Hm", Answer("", "Hm", [])),
]
"""Texts that end within a call."""

CUT_IN_NAME = [
    (dialect, f"I look.\n{text}")
    for dialect, text in (
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("hermes", '<tool_call>\n{"arguments": {"city": "Pa'),
        ("llama3_json", '<|python_tag|>{"name": "get_wea'),
        ("mistral", '[TOOL_CALLS][{"name": "get_wea'),
        ("mistral_args", "[TOOL_CALLS]get_wea"),
        ("deepseek_v3", f"{_DS_BEGIN}{_DS_CALL}function{_DS_SEP}get_wea"),
        ("deepseek_v31", f"{_DS_BEGIN}{_DS_CALL}get_wea"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_wea'),  # noqa: RUF001
        ("glm45", "<tool_call>get_wea"),
        ("hy_v3", "<tool_calls>\n<tool_call>get_wea"),
        ("qwen3_coder", "<tool_call>\n<function=get_wea"),
        ("minimax_m2", f'{_MM_BEGIN}\n<invoke name="get_wea'),
        ("minimax_m3", f'{_M3_BEGIN}\n{_NS}<invoke name="get_wea'),
        ("kimi_k2", f"{_K_BEGIN}<|tool_call_begin|>functions.get_wea"),
        ("solar_open", "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>get_wea"),
        ("minicpm5", '<function name="get_wea'),
        ("gemma4", "<|tool_call>call:get_wea"),
        ("cohere_command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_wea'),
        ("nemotron_json", '<TOOLCALL>[{"name": "get_wea'),
        ("lfm2", "<|tool_call_start|>[get_wea"),
        ("olmo3", "<function_calls>get_wea"),
    )
]
"""Texts that end before a call's name is known."""

TEXTS = [*WHOLE, *_AROUND, *_MENDED, *_NO_CALLS, *BROKEN, *CUT_OFF]


LIKE_ANOTHER = frozenset(
    {
        *("deepseek_v4", "deepseek_v41", "functiongemma", "glm47", "granite", "granite_20b_fc", "hunyuan_a13b"),
        *("hy_v3_opensource", "longcat_keys", "mimo", "minimax_m1", "olmo3", "phi4_mini_json"),
    }
)
"""Dialects that differ from another in their markers only: most of their tests run in the long form."""


def short_form(dialects: Iterable[str]) -> list[Any]:
    """The dialects as a test's parameters; those that are like another are in the long form only."""
    return [pytest.param(dialect, marks=[pytest.mark.slow] if dialect in LIKE_ANOTHER else []) for dialect in dialects]


def texts_in_short_form(texts: Sequence[Written], *, one_each: bool = False) -> list[Any]:
    """The texts as a test's parameters; those of dialects that are like another are in the long form only.

    `one_each`: the short form has the first text of each dialect.
    """
    seen: set[str] = set()
    cases = []
    for each in texts:
        is_long = each.dialect in LIKE_ANOTHER or (one_each and each.dialect in seen)
        name = f"{each.dialect}-{each.text[:40]}"
        cases.append(pytest.param(each, id=name, marks=[pytest.mark.slow] if is_long else []))
        seen.add(each.dialect)
    return cases
