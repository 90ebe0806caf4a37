"""Reasoning is found at an answer's beginning, by the end of the prompt and by the model's text."""

import pytest

from server.parsing.answer_format import AnswerFormat
from server.parsing.parser import AnswerParser, ReasoningPart, TextPart
from server.parsing.reasoning import is_closed
from server.parsing.registry import REASONING_DIALECTS
from server.schemas.chat_tools import ToolUse
from tests.unit.answers.dialect_texts import USE, WHOLE, Answer, parsed, texts_in_short_form
from tests.unit.answers.linear_time import assert_linear

NO_TOOLS = ToolUse(())


def parser(dialect: str, tail: str = "", tools: str = "none", use: ToolUse = NO_TOOLS) -> AnswerParser:
    made = AnswerFormat(tools, dialect).parser(use, prompt_tail=tail)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("dialect", "tail", "text", "reasoning", "content"),
    [
        ("think", "", "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
        ("think", "", "<think></think>Yes.", "", "Yes."),
        ("think", "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("think", "", "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
        ("think", "", "\n\nYes.", "", "\n\nYes."),
        ("think", "", "The tag <think> opens, </think> closes.", "", "The tag <think> opens, </think> closes."),
        ("think", "", "<thin", "", "<thin"),
        ("think", "", "<think>Hm. </thi", "Hm. </thi", ""),
        ("think", "<|assistant|>\n<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("think", "<|assistant|>\n<think>\n", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("think", "<|assistant|>\n<think>\nFirst", " then.</think>Yes.", " then.", "Yes."),
        ("think", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("think", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", "A tag.", "", "A tag."),
        ("think", "", "</think>Yes.", "", "Yes."),
        ("think", "<think>\n\n</think>\n\n", "\n</think>\n\nYes </think>.", "", "Yes </think>."),
        ("minimax_m3", "]~b]ai\n", "</mm:think>Yes.", "", "Yes."),
        ("deepseek_r1", "", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", "<｜Assistant｜></think>", "Yes.", "", "Yes."),  # noqa: RUF001
        ("mistral", "", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
        ("minimax_m3", "", "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        (
            "cohere_command",
            "",
            "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_TEXT|>Yes.\n<|END_TEXT|>",
            "Hm.",
            "Yes.",
        ),
        ("cohere_command", "", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
        ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nA.\n\nB.\n</answer>", "Hm.", "A.\n\nB."),
        ("hunyuan_a13b", "", "<think>\n\n</think>\n\nYes <answer>.\n", "", "Yes <answer>.\n"),
        ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n", "Hm.", "Yes.\n"),
        ("apertus", "<|assistant_start|>", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
        ("longcat", "", "<longcat_think>\nHm.\n</longcat_think>\nYes.", "Hm.", "Yes."),
        ("solar_open", "<|end|><|begin|>assistant", "<|content|>Yes.", "", "Yes."),
        (
            "solar_open",
            "<|begin|>user<|content|>Hi<|end|><|begin|>assistant",
            "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|><|begin|>assistant<|tool_calls|>",
            "Hm.",
            "Yes.<|tool_calls|>",
        ),
        ("solar_open", "", "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>", "Hm.", "<|tool_calls|>"),
        ("hy_v3_opensource", "<think:opensource>", "Hm.</think:opensource>Yes.", "Hm.", "Yes."),
        (
            "apriel",
            "<|begin_assistant|>\nHere are my reasoning steps:\n",
            "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]",
            "Hm.",
            "Yes.",
        ),
        ("apriel", "", "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.", "Hm.", "Yes."),
        ("apriel", "<|begin_assistant|>\n", "Yes.\n\nNo.", "", "Yes.\n\nNo."),
        ("granite", "", "Here is my thought process:\nHm.\nHere is my response:\nYes.", "Hm.", "Yes."),
        # Reasoning of an earlier turn has ended, and the prompt opens the next.
        ("think", "</think>Hi.[e~[\n]~b]user\nHi[e~[\n]~b]ai\n<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("mistral", "", "[THI", "", "[THI"),
    ],
)
def test_reasoning_is_separated_from_content_however_the_text_is_cut(
    dialect: str, tail: str, text: str, reasoning: str, content: str
) -> None:
    expected = Answer(content, reasoning, [])
    assert parsed(parser(dialect, tail), text) == expected
    assert parsed(parser(dialect, tail), *text) == expected
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert parsed(parser(dialect, tail), text[:first], text[first:second], text[second:]) == expected


@pytest.mark.parametrize(
    ("dialect", "tail"),
    [
        ("think", "</think>Hi.[e~[\n]~b]user\nHi[e~[\n]~b]ai\n<think>\n"),
        ("think", "</think>Hi.\n<SPECIAL_12>\n<SPECIAL_11>Assistant\n"),
        ("seed_oss", "</seed:think>Hi.<seed:eos><seed:bos>user\nHi<seed:eos><seed:bos>assistant\n"),
        ("gemma4", "<channel|>Hi.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"),
    ],
)
def test_reasoning_of_an_earlier_turn_leaves_the_next_turn_free_to_reason(dialect: str, tail: str) -> None:
    assert not is_closed(REASONING_DIALECTS[dialect], tail)


def test_reasoning_is_sent_as_it_comes() -> None:
    made = parser("think", "<think>\n")
    assert made.push("Let me ") == [ReasoningPart("Let me ")]
    assert made.push("see") == [ReasoningPart("see")]
    assert made.push("\n</think>\n\n") == []
    assert made.push("Yes") == [TextPart("Yes")]


@pytest.mark.parametrize("written", texts_in_short_form(WHOLE))
def test_calls_are_found_behind_reasoning_and_not_inside(written: object) -> None:
    dialect, text, answer = written  # type: ignore[misc]
    if dialect == "harmony":
        return
    thought = f"<think>\nI could write {text}.\n</think>\n\n{text}"
    expected = Answer("", f"I could write {text}.", answer.calls)
    assert parsed(parser("think", "", dialect, USE), *thought) == expected


@pytest.mark.parametrize("written", texts_in_short_form(WHOLE, one_each=True))
def test_reasoning_that_never_ends_ends_at_the_first_call(written: object) -> None:
    dialect, text, answer = written  # type: ignore[misc]
    if dialect in ("harmony", "pythonic", "llama3_json", "llama4_json", "xlam"):
        return
    cut = f"<think>\nHm.\n\n{text}"
    expected = Answer("", "Hm.", answer.calls)
    assert parsed(parser("think", "", dialect, USE), cut) == expected
    assert parsed(parser("think", "", dialect, USE), *cut) == expected
    assert parsed(parser("think", "", dialect, NO_TOOLS), *cut) == Answer("", cut.removeprefix("<think>\n"), [])


def test_text_after_a_call_in_reasoning_stays_reasoning_if_the_reasoning_ends() -> None:
    text = "<think>a\n\n<tool_call>\nb\n<tool_call>c\n</think>\nYes."
    expected = Answer("Yes.", "a\n\n<tool_call>\nb\n<tool_call>c", [])
    assert parsed(parser("think", "", "hermes", USE), text) == expected
    assert parsed(parser("think", "", "hermes", USE), *text) == expected


@pytest.mark.parametrize("filler", ["x", "\n", "<"])
def test_a_megabyte_of_reasoning_in_small_pieces_takes_linear_time(filler: str) -> None:
    assert_linear(lambda: parser("think"), "<think>x" + filler * 1_000_000)
