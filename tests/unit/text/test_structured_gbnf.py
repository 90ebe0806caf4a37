"""Conversion of GBNF to Lark: forms that the library's converter does not read by itself."""

import pytest

from engine.text.structured.checker import is_gbnf, lark_of_gbnf


@pytest.mark.parametrize(
    ("text", "gbnf"),
    [
        ('root ::= "a"', True),
        ('x\n  ::= "a"', True),
        ('start: "::= a"', False),
        ('start: "a" # x ::= y', False),
        ("start: /[a ::= b]/", False),
    ],
)
def test_the_syntax_is_detected_by_the_form_of_rules(text: str, gbnf: bool) -> None:
    assert is_gbnf(text) is gbnf


def test_a_rule_may_span_lines_and_hold_comments() -> None:
    in_lines = 'root ::= "a" x # one\n  | "b" # two\n\nx ::= (\n "c" |\n "d" )\n'
    in_one = 'root ::= "a" x | "b"\nx ::= ( "c" | "d" )\n'
    assert lark_of_gbnf(in_lines) == lark_of_gbnf(in_one)


def test_characters_by_code_point_are_themselves() -> None:
    lark = lark_of_gbnf(r'root ::= "\u00e9\U0001F600\u0022\\u00e9" [^\u005d\u0009]')
    assert '"é😀\\"\\\\u00e9"' in lark
    assert r"[^\]\x09]" in lark


@pytest.mark.parametrize(
    "text", ["root ::= x", 'x ::= "a"', 'root ::= "', r'root ::= "\ud800"', "root ::= " + "(" * 5000]
)
def test_a_wrong_grammar_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        lark_of_gbnf(text)
