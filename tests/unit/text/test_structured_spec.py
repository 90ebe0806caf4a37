"""A request's answer format as the text of a grammar; the library's errors, as sentences."""

import json
import math

import pytest

from engine.text.structured.spec import (
    MAX_CHOICES,
    GrammarSpec,
    InvalidGrammar,
    lark_of,
    reason_in_words,
    without_forcing,
)


def nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_as_text_is_the_schema_as_an_object() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert lark_of(GrammarSpec("json", json.dumps(schema))) == lark_of(GrammarSpec("json", schema))


def test_whitespace_between_tokens_of_json_is_bounded_whatever_the_schema_asks() -> None:
    lark = lark_of(GrammarSpec("json", {"x-guidance": {"whitespace_flexible": True, "lenient": True}}))
    options = json.loads(lark.removeprefix("start: %json "))["x-guidance"]
    assert options == {"whitespace_pattern": r"[ ]|\n {0,20}"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("json", "{"), "not valid JSON"),
        (GrammarSpec("json", "[]"), "a schema is a JSON object"),
        (GrammarSpec("json", 7), "a schema is a JSON object"),
        (GrammarSpec("json", nested(64)), "at most 64 levels"),
        (GrammarSpec("json", nested(500)), "at most 64 levels"),
        (GrammarSpec("json", '{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deeply"),
        (GrammarSpec("json", '{"const": NaN}'), "not finite"),
        (GrammarSpec("json", '{"const": -1e400}'), "not finite"),
        (GrammarSpec("json", {"enum": [None, {"a": math.nan}]}), "not finite"),
        (GrammarSpec("json", {"maximum": math.inf}), "not finite"),
        (GrammarSpec("json", '{"const": "\\ud800"}'), "half a surrogate pair"),
        (GrammarSpec("regex", ""), "empty"),
        (GrammarSpec("regex", None), "empty"),
        (GrammarSpec("grammar", " \n"), "empty"),
        (GrammarSpec("choice", []), "list of strings"),
        (GrammarSpec("choice", ["a", ""]), "at least 1 character"),
        (GrammarSpec("choice", ["a", 1]), "list of strings"),
        (GrammarSpec("choice", [str(i) for i in range(MAX_CHOICES + 1)]), f"at most {MAX_CHOICES}"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_in_words(spec: GrammarSpec, reason: str) -> None:
    with pytest.raises(InvalidGrammar, match=reason):
        lark_of(spec)


def test_a_schema_at_the_limit_of_nesting_is_taken() -> None:
    assert lark_of(GrammarSpec("json", nested(63)))


def test_a_regex_keeps_its_meaning_between_slashes() -> None:
    assert lark_of(GrammarSpec("regex", "a/b\\/c\nd\\\ne\\\\/")) == "start: /a\\/b\\/c\\nd\\ne\\\\\\//\n"


def test_digits_of_a_regex_are_ascii_s() -> None:
    assert lark_of(GrammarSpec("regex", r"\d[a\d]\D\\d")) == "start: /[0-9][a[0-9]][^0-9]\\\\d/\n"


def test_choices_are_quoted_and_counted_once() -> None:
    assert lark_of(GrammarSpec("choice", ['a"\\\n', "é", "é"])) == 'start: CHOICE\nCHOICE: "a\\"\\\\\\x0a" | "é"\n'


def test_no_grammar_forces_tokens() -> None:
    option = '%llguidance {"no_forcing": true}'
    assert without_forcing("start: x").endswith(f"{option}\n")
    several = json.loads(without_forcing('{"grammars": [{"lark_grammar": "a"}, {"name": "b", "lark_grammar": "c"}]}'))
    assert [option in each["lark_grammar"] for each in several["grammars"]] == [True, True]
    assert several["grammars"][1]["name"] == "b"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "at 2(8): failed to compile JSON schema: Invalid type: strin\n 1 | x",
            "it is not valid: Invalid type: strin",
        ),
        ('Unimplemented keys: ["if", "not"]', "its JSON schema uses keywords that are not supported: if, not"),
        (
            "at 2(8): failed to compile JSON schema: Resource 'http://a/b' is not present in a registry and",
            "its reference http://a/b leads outside the schema; only #/... within it is followed",
        ),
        (
            'at 1(8): invalid regex "(a" (in regex): regex parse error:\n    (a\n    ^\nerror: unclosed group\n  1 |',
            "its regular expression is not valid: unclosed group",
        ),
        (
            "lexer error: too many expressions constructed\n<non-verbose/>",
            "it is too costly to follow: lexer error: too many expressions constructed",
        ),
        ("recursion limit exceeded at line 1 column 2203", "it is nested too deeply"),
        ("NoExtensionBias\n<non-verbose/>", "it allows no text at all"),
        ("", "it is not valid: it cannot be followed"),
    ],
)
def test_a_complaint_becomes_a_sentence(message: str, words: str) -> None:
    assert reason_in_words(message) in (words, words.removeprefix("it is not valid: "))


def test_a_complaint_is_of_bounded_length() -> None:
    assert len(reason_in_words("Invalid type: " + "x" * 10_000)) < 400
