"""Each dialect's tool calls: they are found and streamed; texts that are no calls stay content."""

import json
import re

import pytest

from server.parsing.answer_format import AnswerFormat
from server.parsing.json_repair import argument_types, typed_argument
from server.parsing.parser import AnswerParser, ArgumentsPart, TextPart, ToolCallPart
from server.parsing.registry import TOOL_DIALECTS
from server.schemas.chat_tools import ToolUse
from tests.unit.answers.dialect_texts import (
    BROKEN,
    CUT_IN_NAME,
    CUT_OFF,
    TEXTS,
    TOOLS,
    USE,
    WHOLE,
    Written,
    parsed,
    short_form,
    texts_in_short_form,
)
from tests.unit.answers.linear_time import assert_linear

LONGEST_MARKER = 12
DIALECTS = sorted({written.dialect for written in TEXTS})


def parser(dialect: str, use: ToolUse = USE, tail: str = "") -> AnswerParser:
    made = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "none").parser(use, prompt_tail=tail)
    assert made is not None
    return made


def ids(written: Written) -> str:
    return f"{written.dialect}-{written.text[:40]}"


@pytest.mark.parametrize("apart", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("written", TEXTS, ids=ids)
def test_a_text_is_taken_apart_the_same_however_it_is_cut(written: Written, apart: int) -> None:
    text = written.text
    assert parsed(parser(written.dialect), text) == written.answer
    assert parsed(parser(written.dialect), *text) == written.answer
    for cut in range(1 + TEXTS.index(written) % apart, len(text), apart):
        assert parsed(parser(written.dialect), text[:cut], text[cut:]) == written.answer


@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("written", texts_in_short_form(TEXTS, one_each=True))
def test_two_cuts_within_a_markers_length_change_nothing(written: Written, apart: int) -> None:
    text, whole = written.text, written.answer
    for first in range(1, len(text) - 1, apart):
        for second in range(first + 1, min(first + LONGEST_MARKER, len(text)), apart):
            assert parsed(parser(written.dialect), text[:first], text[first:second], text[second:]) == whole


@pytest.mark.parametrize(("dialect", "text"), CUT_IN_NAME)
def test_a_call_that_its_length_cuts_off_before_its_name_is_known_is_no_content(dialect: str, text: str) -> None:
    for cut in range(len(text)):
        answer = parsed(parser(dialect), text[:cut], text[cut:], cut_off=True)
        assert answer == ("I look.", "", [])
    assert parsed(parser(dialect), text).content == text
    trigger = TOOL_DIALECTS[dialect].trigger or TOOL_DIALECTS[dialect].optional
    for end in range(text.index(trigger) + len(trigger), len(text)):
        assert parsed(parser(dialect), text[:end], cut_off=True) == ("I look.", "", []), text[:end]


def test_a_call_after_a_token_of_calls_that_is_cut_off_before_its_name_is_known_is_no_content() -> None:
    assert parsed(parser("pythonic"), *"<|python_start|>[get_wea", cut_off=True) == ("", "", [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "<tool_call>what"),
        ("hermes", "I look.\n"),
        ("llama3_json", '{"name": "Bob", "parameters": {"a'),
        ("pythonic", "[1, 2"),
        ("glm45", "<tool_call>what now"),
    ],
)
def test_text_that_its_length_cuts_off_is_content_if_it_is_no_call(dialect: str, text: str) -> None:
    assert parsed(parser(dialect), *text, cut_off=True).content == text


@pytest.mark.parametrize("written", CUT_OFF, ids=ids)
def test_a_call_with_a_name_that_its_length_cuts_off_is_a_call(written: Written) -> None:
    assert parsed(parser(written.dialect), *written.text, cut_off=True) == written.answer


@pytest.mark.parametrize("written", BROKEN, ids=ids)
def test_arguments_that_turn_wrong_are_closed_before_what_follows_them(written: Written) -> None:
    parts = parser(written.dialect).push(written.text + " And so on.")
    arguments = [place for place, part in enumerate(parts) if isinstance(part, ArgumentsPart)]
    texts = [place for place, part in enumerate(parts) if isinstance(part, TextPart)]
    assert max(arguments) < min(texts)


FINISHED = [
    each
    for each in TEXTS
    if each not in CUT_OFF and each.text.count("{") == each.text.count("}") and "[1}" not in each.text
]


@pytest.mark.parametrize("written", FINISHED, ids=ids)
def test_a_finished_calls_arguments_are_a_json_object(written: Written) -> None:
    for _, arguments in written.answer.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "dialect",
    [
        *("hermes", "llama3_json", "pythonic", "mistral_args", "deepseek_v31", "glm45", "harmony"),
        *("seed_oss", "minimax_m2", "deepseek_v32", "kimi_k2", "gemma4", "cohere_command", "nemotron_json", "lfm2"),
        "minimax_m3",
    ],
)
def test_arguments_are_sent_as_they_come(dialect: str) -> None:
    text = next(each.text for each in WHOLE if each.dialect == dialect)
    made = parser(dialect)
    before = made.push(text[: text.index("ris")])
    assert [type(part) for part in before] == [ToolCallPart, ArgumentsPart]
    assert [part.json for part in before if isinstance(part, ArgumentsPart)] == ['{"city": "Pa']
    assert made.push("ris") == [ArgumentsPart(0, "ris")]


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_plain_text_is_held_back_only_while_it_may_be_a_marker(dialect: str) -> None:
    made = parser(dialect, tail="<|start|>assistant<|channel|>final<|message|>")
    assert made.push("It is ") == [TextPart("It is ")]
    assert made.push("warm.") == [TextPart("warm.")]
    assert made.finish() == []


def test_unknown_functions_are_passed_on_where_a_marker_announced_them() -> None:
    text = '<tool_call>{"name": "elsewhere", "arguments": {}}</tool_call>'
    assert parsed(parser("hermes"), text).calls == [("elsewhere", "{}")]


@pytest.mark.parametrize("dialect", [dialect for dialect in DIALECTS if dialect != "harmony"])
@pytest.mark.parametrize("use", [ToolUse.of([], "auto"), ToolUse.of(TOOLS, "none")], ids=["no tools", "none"])
def test_without_tools_to_call_nothing_is_taken_apart(dialect: str, use: ToolUse) -> None:
    assert AnswerFormat(dialect, "none").parser(use, prompt_tail="") is None


def test_without_tools_to_call_a_harmony_call_is_text_and_analysis_still_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    )
    answer = parsed(parser("harmony", ToolUse.of(TOOLS, "none")), *text)
    assert answer == ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}", "Hm.", [])


def test_a_harmony_answer_may_begin_with_the_recipient_of_a_call() -> None:
    text = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    for cut in range(len(text)):
        made = parser("harmony", tail="<|start|>assistant")
        assert parsed(made, text[:cut], text[cut:]) == ("", "", [("now", '{"a": 1}')])
    assert parsed(parser("harmony", tail="<|start|>assistant"), " towards").content == " towards"
    assert parsed(parser("harmony", ToolUse.of(TOOLS, "none"), "<|start|>assistant"), *text).calls == []


def test_with_parallel_tool_calls_off_later_calls_are_left_out() -> None:
    written = WHOLE[1]
    answer = parsed(parser("hermes", ToolUse.of(TOOLS, "auto", parallel_tool_calls=False)), *written.text)
    assert answer.calls == written.answer.calls[:1]


@pytest.mark.parametrize(("dialect", "form"), [("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")])
def test_ids_have_the_form_that_the_models_templates_accept(dialect: str, form: str) -> None:
    text = next(each.text for each in WHOLE if each.dialect == dialect and len(each.answer.calls) == 2)
    found = [part.id for part in parser(dialect).push(text) if isinstance(part, ToolCallPart)]
    assert len(set(found)) == 2
    assert all(re.fullmatch(form, each) for each in found)


# Letters are in the short form of one dialect: test_a_megabyte_of_arguments_takes_linear_time.
@pytest.mark.parametrize("dialect", short_form(DIALECTS))
@pytest.mark.parametrize("filler", [pytest.param("x", marks=pytest.mark.slow), "\n", "["])
def test_long_arguments_in_small_pieces_take_linear_time(dialect: str, filler: str) -> None:
    written = next(each for each in WHOLE if each.dialect == dialect)
    begin, end = written.text.split("Paris")
    assert_linear(lambda: parser(dialect), begin + filler * 50_000 + end)


@pytest.mark.parametrize("dialect", short_form(DIALECTS))
def test_markers_over_and_over_take_linear_time(dialect: str) -> None:
    markers = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "none").markers
    for piece in (*markers, *(marker + "f" for marker in markers), *(marker + "{" for marker in markers)):
        assert_linear(lambda: parser(dialect), piece * (20_000 // len(piece)))


def test_a_megabyte_of_arguments_takes_linear_time() -> None:
    begin, end = WHOLE[0].text.split("Paris")
    assert_linear(lambda: parser("hermes"), begin + "words and " * 100_000 + end)


@pytest.mark.parametrize("header", ["<|start|>", "<|channel|>commentary to=f", "<|channel|>final"])
def test_a_harmony_header_that_is_cut_off_is_no_content(header: str) -> None:
    assert parsed(parser("harmony"), f"<|channel|>final<|message|>Hi<|end|>{header}").content == "Hi"


@pytest.mark.parametrize("cut", ["<", "</arg_va", "</arg_value"])
def test_a_value_that_is_cut_off_in_its_end_marker_has_none_of_it(cut: str) -> None:
    text = f"<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>5{cut}"
    ((_, arguments),) = parsed(parser("glm45"), text).calls
    assert arguments == '{"days": 5'


@pytest.mark.parametrize(("text", "typed"), [("3", "3"), ("null", "null"), ("true", None), ("[1]", None)])
def test_bare_text_under_a_union_with_string_is_of_another_type_only_where_the_union_has_it(
    text: str, typed: str | None
) -> None:
    assert typed_argument(text, frozenset({"string", "number", "null"})) == typed


@pytest.mark.parametrize(
    ("text", "types", "typed"),
    [
        ("007", "string number", None),
        ("+1", "string integer", None),
        (" 5", "string integer", None),
        ("2.5", "string integer", None),
        ("5", "string integer", "5"),
        ("007", "integer", "7"),
        ("TRUE", "boolean", "true"),
        ("0", "boolean null", "false"),
        ("0", "boolean integer", "0"),
        ("yes", "boolean", "true"),
        ("Null", "integer null", "null"),
        ("", "integer null", "null"),
        ("\n", "array null", "[]"),
        ("", "object", "{}"),
        ("", "array string", None),
        ("", "integer", None),
    ],
)
def test_bare_text_has_the_type_that_the_schema_allows(text: str, types: str, typed: str | None) -> None:
    assert typed_argument(text, frozenset(types.split())) == typed


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"allOf": [{"description": "It."}, {"type": "string"}]}, "string"),
        ({"allOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/text"}]}, "string"),
        ({"type": ["string", "number"], "enum": [1, 2]}, "integer"),
        ({"type": "number", "anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"$ref": "#/$defs/text", "type": ["string", "null"]}, "string"),
        ({"properties": {"a": {"type": "string"}}}, "object"),
        ({"prefixItems": [{"type": "string"}]}, "array"),
        ({"minLength": 1}, "string"),
        ({"type": "str"}, "string"),
        ({"type": ["int", "none"]}, "integer null"),
        ({"type": "string", "enum": [1]}, "string"),
        ({"description": "It."}, "string number boolean null array object"),
    ],
)
def test_the_types_of_an_argument_are_those_that_all_keywords_allow(schema: dict[str, object], types: str) -> None:
    parameters = {"properties": {"it": schema}, "$defs": {"text": {"type": "string"}}}
    assert argument_types(parameters, "it") == frozenset(types.split())


def test_references_among_schemas_are_followed_once() -> None:
    number = {"anyOf": [{"$ref": "#/$defs/number"}] * 1000 + [{"type": "number"}]}
    assert argument_types({"properties": {"it": {"$ref": "#/$defs/number"}}, "$defs": {"number": number}}, "it")
