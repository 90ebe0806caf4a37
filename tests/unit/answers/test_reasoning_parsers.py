"""Reasoning: found at an answer's beginning, by what the prompt opened and the model wrote."""

import pytest

from server.parsing.answer_format import AnswerFormat
from server.parsing.parser import AnswerParser, ReasoningPart, TextPart
from server.schemas.chat import ToolUse
from tests.unit.answers.dialect_texts import USE, WHOLE, Answer, parsed
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
        ("think", "", "</think>Yes.", "", "</think>Yes."),
        ("deepseek_r1", "", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", "<｜Assistant｜></think>", "Yes.", "", "Yes."),  # noqa: RUF001
        ("mistral", "", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("mistral", "", "[THI", "", "[THI"),
    ],
)
def test_reasoning_is_told_from_content_however_the_text_is_cut(
    dialect: str, tail: str, text: str, reasoning: str, content: str
) -> None:
    expected = Answer(content, reasoning, [])
    assert parsed(parser(dialect, tail), text) == expected
    assert parsed(parser(dialect, tail), *text) == expected
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert parsed(parser(dialect, tail), text[:first], text[first:second], text[second:]) == expected


def test_reasoning_is_sent_as_it_comes() -> None:
    made = parser("think", "<think>\n")
    assert made.push("Let me ") == [ReasoningPart("Let me ")]
    assert made.push("see") == [ReasoningPart("see")]
    assert made.push("\n</think>\n\n") == []
    assert made.push("Yes") == [TextPart("Yes")]


@pytest.mark.parametrize("written", WHOLE, ids=lambda written: f"{written.dialect}-{written.text[:40]}")
def test_calls_are_found_behind_reasoning_and_not_inside(written: object) -> None:
    dialect, text, answer = written  # type: ignore[misc]
    if dialect == "harmony":
        return
    thought = f"<think>\nI could write {text}.\n</think>\n\n{text}"
    expected = Answer("", f"I could write {text}.", answer.calls)
    assert parsed(parser("think", "", dialect, USE), *thought) == expected


@pytest.mark.parametrize("filler", ["x", "\n", "<"])
def test_a_megabyte_of_reasoning_in_small_pieces_takes_linear_time(filler: str) -> None:
    assert_linear(lambda: parser("think"), "<think>x" + filler * 1_000_000)
