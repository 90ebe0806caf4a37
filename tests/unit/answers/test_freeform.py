"""The free text in the arguments of a custom tool's call does not depend on how the JSON is divided."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsing.freeform import FreeformInput

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\t\u2028\U0001f600'))


def read(pieces: list[str]) -> str:
    reader = FreeformInput()
    return "".join(map(reader.push, pieces)) + reader.finish()


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 400), max_size=6), st.sampled_from([None, 2]))
def test_text_comes_back_whatever_the_cuts(text: str, is_ascii: bool, cuts: list[int], indent: int | None) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    marks = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    assert read([whole[a:b] for a, b in itertools.pairwise(marks)]) == text
    assert read(list(whole)) == text


@given(st.text(st.sampled_from('{}"\\u: inputd83de0{}\n'), max_size=40))
def test_anything_is_read_the_same_whole_and_in_characters(arguments: str) -> None:
    assert read(list(arguments)) == read([arguments])


def test_the_text_is_passed_on_as_it_comes() -> None:
    reader = FreeformInput()
    assert [reader.push(piece) for piece in ('{"input": "*** Be', "gin\\", "nmore\\ud83d", "\\ude00.", '"}')] == [
        "*** Be",
        "gin",
        "\nmore",
        "\U0001f600.",
        "",
    ]
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x", "more": 1}', "x"),
        ('{"input": "cut o', "cut o"),
        ("{}", ""),
        ("", ""),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"input": "\\ud83d alone"}', "\ufffd alone"),
    ],
)
def test_what_models_write_besides(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text
