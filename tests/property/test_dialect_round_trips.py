"""Calls written in each dialect, as the models' templates write them, are read with their arguments unchanged.

A small writer for each dialect writes calls of random schemas. Strings hold anything, the dialect's own markers
included, except the marker that ends a value where values are bare text.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from server.parsing import registry
from server.parsing.answer_format import AnswerFormat
from server.schemas.chat_tools import ToolUse
from tests.unit.answers.dialect_texts import parsed, short_form, tool

NAMESPACE = "]<]minimax[>["
DSML, GCML = "｜DSML｜", "｜GCML｜"  # noqa: RUF001


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any) -> str:
    """Strings unchanged, all other values as JSON."""
    return value if isinstance(value, str) else _json(value)


def _jinja(value: Any) -> str:
    """Strings unchanged, lists and objects as JSON, constants as Jinja prints them: Qwen3-Coder's template."""
    return _json(value) if isinstance(value, dict | list) else str(value)


def _members(call: Call, begin: str, value: Callable[[Any], str], end: str, between: str = "\n") -> str:
    """The arguments in turn; `{key}` in `begin` is replaced by the key."""
    return between.join(begin.replace("{key}", key) + value(each) + end for key, each in call.arguments.items())


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": {_json(call.name)}, "{key}": {_json(call.arguments)}}}'


def _hermes(prefix: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: "\n".join(f"<{prefix}tool_call>\n{_object(call)}\n</{prefix}tool_call>" for call in calls)


def _qwen(around: str, value: Callable[[Any], str], prefix: str = "") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return "\n".join(
            f"<{prefix}tool_call>\n<function={call.name}>\n"
            + _members(call, f"<parameter={{key}}>{around}", value, f"{around}</parameter>")
            + f"\n</function>\n</{prefix}tool_call>"
            for call in calls
        )

    return write


def _glm(line: str, *, has_block: bool = False, prefix: str = "", suffix: str = "") -> Callable[[Sequence[Call]], str]:
    def tags(name: str) -> tuple[str, str]:
        return f"<{prefix}{name}{suffix}>", f"</{prefix}{name}{suffix}>"

    (begin, end), (call_begin, call_end) = tags("tool_calls"), tags("tool_call")
    (key_begin, key_end), (value_begin, value_end) = tags("arg_key"), tags("arg_value")
    separator = tags("tool_sep")[0] if has_block else ""

    def write(calls: Sequence[Call]) -> str:
        each = line.join(
            f"{call_begin}{call.name}{separator}{line}"
            + _members(call, f"{key_begin}{{key}}{key_end}{line}{value_begin}", _bare, f"{value_end}{line}", "")
            + call_end
            for call in calls
        )
        return f"{begin}\n{each}\n{end}" if has_block else each

    return write


def _fenced(calls: Sequence[Call]) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"  # noqa: RUF001


def _plain(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>"  # noqa: RUF001
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"  # noqa: RUF001


def _nested(value: Any) -> str:
    match value:
        case dict():
            return "".join(f"{NAMESPACE}<{key}>{_nested(each)}{NAMESPACE}</{key}>" for key, each in value.items())
        case list():
            return "".join(f"{NAMESPACE}<item>{_nested(each)}{NAMESPACE}</item>" for each in value)
    return _bare(value)


def _minimax_m3(calls: Sequence[Call]) -> str:
    each = "".join(
        f'{NAMESPACE}<invoke name="{call.name}">{_nested(call.arguments)}{NAMESPACE}</invoke>\n' for call in calls
    )
    return f"{NAMESPACE}<tool_call>\n{each}{NAMESPACE}</tool_call>"


def _invokes(block: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        each = "".join(
            f'<invoke name="{call.name}">\n'
            + _members(call, '<parameter name="{key}">', _bare, "</parameter>\n", "")
            + "</invoke>\n"
            for call in calls
        )
        return f"<{block}>\n{each}</{block}>"

    return write


def _dsml(block: str, prefix: str = DSML) -> Callable[[Sequence[Call]], str]:
    def one(call: Call) -> str:
        members = "".join(
            f'<{prefix}parameter name="{key}" string="{_json(isinstance(value, str))}">{_bare(value)}'
            f"</{prefix}parameter>\n"
            for key, value in call.arguments.items()
        )
        return f'<{prefix}invoke name="{call.name}">\n{members}</{prefix}invoke>\n'

    return lambda calls: f"<{prefix}{block}>\n{''.join(map(one, calls))}</{prefix}{block}>"


def _kimi(calls: Sequence[Call]) -> str:
    each = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>{_json(call.arguments)}"
        "<|tool_call_end|>"
        for number, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def _solar(calls: Sequence[Call]) -> str:
    return "<|tool_calls|>" + "".join(
        f"<|tool_call:begin|>{number:010}<|tool_call:name|>{call.name}<|tool_call:args|>{_json(call.arguments)}"
        "<|tool_call:end|>"
        for number, call in enumerate(calls)
    )


def _cdata(value: Any) -> str:
    """Text in CDATA if it needs it; other values as Jinja prints them."""
    return f"<![CDATA[{value}]]>" if isinstance(value, str) and re.search("[<&\n]", value) else str(value)


def _minicpm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<function name="{call.name}">{_members(call, PARAM, _cdata, "</param>", "")}</function>' for call in calls
    )


PARAM = '<param name="{key}">'


def _gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{','.join(f'{key}:{_gemma_value(each, quote)}' for key, each in sorted(value.items()))}}}"
        case list():
            return f"[{','.join(_gemma_value(each, quote) for each in value)}]"
    return _json(value)


def _gemma(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(
        f"{begin}call:{call.name}{_gemma_value(call.arguments, quote)}{end}" for call in calls
    )


def _command(calls: Sequence[Call]) -> str:
    each = ",\n    ".join(
        f'{{"tool_call_id": "{number}", "tool_name": "{call.name}", "parameters": {_json(call.arguments)}}}'
        for number, call in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {each}\n]<|END_ACTION|>"


def _list(begin: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{begin}[{', '.join(map(_object, calls))}]{end}"


def _python(call: Call, value: Callable[[Any], str]) -> str:
    return f"{call.name}({', '.join(f'{key}={value(each)}' for key, each in call.arguments.items())})"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}<|call|>"
        for call in calls
    )


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes(),
    "longcat": _hermes("longcat_"),
    "qwen3_coder": _qwen("\n", _jinja),
    "mimo": _qwen("", _bare),
    "seed_oss": _qwen("", _bare, "seed:"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "hy_v3": _glm("\n", has_block=True),
    "hy_v3_opensource": _glm("\n", has_block=True, suffix=":opensource"),
    "longcat_keys": _glm("\n", prefix="longcat_"),
    "deepseek_v3": _fenced,
    "deepseek_v31": _plain,
    "minimax_m3": _minimax_m3,
    "minimax_m2": _invokes("minimax:tool_call"),
    "dots": _invokes("dots_function_call"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", f"{DSML} "),
    "gigachat35": _dsml("tool_calls", GCML),
    "gigachat31": lambda calls: f"<|function_call|>{_object(calls[0])}<|message_sep|>\n\n",
    "gigachat3": lambda calls: f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_object(calls[0])}<|message_sep|>\n\n",
    "apertus": lambda calls: (
        f"<|tools_prefix|>[{', '.join(_json({call.name: call.arguments}) for call in calls)}]<|tools_suffix|>"
    ),
    "kimi_k2": _kimi,
    "solar_open": _solar,
    "minicpm5": _minicpm,
    "xlam": lambda calls: f"[{', '.join(map(_object, calls))}]",
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "cohere_command": _command,
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini_json": _list("<|tool_call|>", "<|/tool_call|>"),
    "granite": _list("<|tool_call|>", ""),
    "minimax_m1": lambda calls: "\n".join(("<tool_calls>", *map(_object, calls), "</tool_calls>")),
    "hunyuan_a13b": _list("<tool_calls>", "</tool_calls>"),
    "granite_20b_fc": lambda calls: "".join(f"<function_call> {_object(call)}" for call in calls),
    "mistral_args": lambda calls: "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls),
    "mistral": _list("[TOOL_CALLS]", ""),
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(_python(call, repr) for call in calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: (
        "<function_calls>" + "\n".join(_python(call, _json) for call in calls) + "</function_calls>"
    ),
    "pythonic": lambda calls: f"[{', '.join(_python(call, repr) for call in calls)}]",
    "llama4_json": lambda calls: "".join(_object(call, "parameters") for call in calls),
    "llama3_json": lambda calls: "; ".join(_object(call, "parameters") for call in calls),
    registry.HARMONY: _harmony,
}

VALUE_ENDS = {
    **dict.fromkeys(("qwen3_coder", "mimo", "seed_oss"), "</parameter>"),
    **dict.fromkeys(("glm45", "glm47", "hy_v3"), "</arg_value>"),
    "hy_v3_opensource": "</arg_value:opensource>",
    "longcat_keys": "</longcat_arg_value>",
    "minicpm5": "</param>",
    "functiongemma": "<escape>",
    "minimax_m3": NAMESPACE,
    **dict.fromkeys(("minimax_m2", "dots"), "</parameter>"),
    "gigachat35": f"</{GCML}parameter>",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), f"</{DSML}parameter>"),
    "deepseek_v41": f"</{DSML} parameter>",
    "gemma4": '<|"|>',
}
"""Texts that strings cannot contain, in the dialects whose values are bare text."""

NUM_CASES = 60
_BODY = re.compile(r"<\|channel\|>commentary<\|message\|>|<\|end\|><\|start\|>assistant")

MARKUP = [
    "<tool_call>",
    "</function>",
    "</b>",
    "<",
    ">",
    '"',
    "'",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "\\",
    "&lt;",
]
MARKUP += ["\n", "\r", "\t", " ", "\0", "\x85", "é", "😀", "a", "\\n", "\\u00", "<think>", "</think>"]
LIKE_OTHERS = [
    "",
    "12",
    "007",
    "+1",
    "1e5",
    "null",
    "None",
    "true",
    "False",
    "NaN",
    '"a"',
    "[1]",
    "{}",
    " ",
    "\n",
    " x",
    "x\n",
    "a b",
]
"""Strings that look like values of other types, or like no value."""
KEYS = ["a", "b", "city", "item", "name", "arguments", "type", "x_1", "Ünit"]
WORDS = ["Hm.", "one\ntwo", "a < b", "{x}", "  it is", "$100 [1]", "é"]


class Writing:
    """Random calls in one dialect."""

    def __init__(self, dialect: str, seed: int) -> None:
        self._random = random.Random(f"{dialect}{seed}")
        self._pieces = [*AnswerFormat(dialect, "none").markers, *MARKUP]
        self._end = VALUE_ENDS.get(dialect)
        self._has_null = dialect != "minimax_m3"
        """Whether the template writes null; MiniMax-M3's omits it."""

    def text(self) -> str:
        while True:
            if self._random.random() < 0.4:
                return self._random.choice(LIKE_OTHERS)
            text = "".join(self._random.choices(self._pieces, k=self._random.randint(1, 8)))
            if self._end is None or self._end not in text + self._end[:-1]:
                return text

    def number(self) -> int | float:
        return self._random.choice([0, -1, 12, 10**20, 0.5, -2.5e-7, 1e300, self._random.randint(-999, 999)])

    def keys(self) -> list[str]:
        return self._random.sample(KEYS, self._random.randint(0, 3))

    def value(self, depth: int = 2) -> tuple[dict[str, Any], Any]:
        """A schema, and a value that fits it."""
        match self._random.randrange(14 if not depth else 21):
            case 0 | 1:
                return {"type": "string"}, self.text()
            case 2:
                return {"enum": [text := self.text(), "other"]}, text
            case 3:
                return {"$ref": "#/$defs/text"}, self.text()
            case 4:
                return {"description": "It.", "allOf": [{"description": "Of"}, {"type": "string"}]}, self.text()
            case 5:
                return {"type": "integer"}, self._random.randint(-99, 10**18)
            case 6:
                return {"type": "number"}, self.number()
            case 7:
                return {"type": "boolean"}, self._random.random() < 0.5
            case 8:
                return {"type": ["integer", "null"]}, self._random.choice([None, 3] if self._has_null else [3])
            case 9:
                schema = {"anyOf": [{"type": "number"}, {"type": "null"}]}
                return schema, self._random.choice([None, 2.5] if self._has_null else [2.5])
            case 10:
                text = self._random.choice(["007", "+1", "1.50", "x", ""])
                return {"type": ["string", "integer"]}, self._random.choice([text, 12])
            case 11:
                return {"type": "string", "oneOf": [{"const": text} for text in LIKE_OTHERS]}, self._random.choice(
                    LIKE_OTHERS
                )
            case 12:
                return {"type": "str", "maxLength": 99}, self.text()
            case 13:
                return {"pattern": ""}, self.text()
            case 14:
                return {"type": "object", "additionalProperties": {"type": "string"}}, {
                    key: self.text() for key in self.keys()
                }
            case 15:
                texts = [self.text() for _ in range(self._random.randint(0, 3))]
                return {"type": "array", "items": {"$ref": "#/$defs/text"}}, texts
            case 16:
                parts = [self.value(depth - 1) for _ in range(self._random.randint(1, 3))]
                return {"type": "array", "prefixItems": [schema for schema, _ in parts]}, [one for _, one in parts]
            case 17:
                schema, one = self.value(depth - 1)
                return {"type": ["array", "null"], "items": schema}, [one]
            case 18:
                schema, one = self.object(depth - 1)
                return {"anyOf": [{"type": "null"}, schema]}, one
            case 19:
                schema, one = self.object(depth - 1)
                other = {"type": "object", "properties": {"other": {"type": "integer"}}}
                return {"type": "array", "items": {"oneOf": [other, schema]}}, [one]
        return self.object(depth - 1)

    def object(self, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
        members = {key: self.value(depth) for key in self.keys()}
        schema = {"type": "object", "properties": {key: schema for key, (schema, _) in members.items()}}
        return schema, {key: value for key, (_, value) in members.items()}

    def calls(self) -> tuple[ToolUse, list[Call]]:
        tools, calls = [], []
        for number in range(self._random.randint(1, 3)):
            schema, arguments = self.object(2)
            tools.append(tool(f"f{number}", {**schema, "$defs": {"text": {"type": "string"}}}))
            calls.append(Call(f"f{number}", arguments))
        return ToolUse.of(tools, "auto"), calls

    def pieces(self, text: str) -> list[str]:
        longest = self._random.choice([1, 3, 20, len(text)])
        pieces = []
        while text:
            size = self._random.randint(1, longest)
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    def words(self) -> str:
        return self._random.choice([*WORDS, ""])


@pytest.mark.parametrize("dialect", short_form(WRITERS))
def test_arguments_are_read_as_they_were_written(dialect: str) -> None:
    for seed in range(NUM_CASES):
        writing = Writing(dialect, seed)
        use, calls = writing.calls()
        if dialect in ("gigachat3", "gigachat31"):
            calls = calls[:1]
        thought, before, text = writing.words(), writing.words(), WRITERS[dialect](calls)
        if dialect in ("pythonic", "llama3_json", "llama4_json", "xlam"):
            before = ""
        if dialect == registry.HARMONY:
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
            before = before and f"<|channel|>commentary<|message|>{before}{end}"
            made = AnswerFormat(dialect, dialect).parser(use, prompt_tail="<|start|>assistant")
        else:
            begin, end = "<think>\n", "\n</think>\n\n"
            made = AnswerFormat(dialect, "think").parser(use, prompt_tail="")
        assert made is not None
        text = (thought and begin + thought + end) + before + text
        answer = parsed(made, *writing.pieces(text))
        assert [Call(name, json.loads(arguments)) for name, arguments in answer.calls] == calls, f"{text}\n{use.tools}"
        assert answer.reasoning == thought, text
        assert answer.content == _BODY.sub("", before), text


def test_every_dialect_has_a_writer() -> None:
    assert WRITERS.keys() == {*registry.TOOL_DIALECTS, registry.HARMONY}
