"""Property: no text breaks a dialect's parser, and how a text is divided into pieces changes neither content nor
calls."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsing import registry
from server.parsing.answer_format import AnswerFormat
from server.parsing.json_repair import JsonMender, mend
from tests.unit.answers.dialect_texts import TEXTS, USE, Answer, parsed, short_form

DIALECTS = short_form([*registry.TOOL_DIALECTS, registry.HARMONY])
PLUMBING = ["{", "}", "[", "]", "(", ")", '"', "'", ":", ",", ";", "=", "\\", "\n", " ", "1", "a", "é", "True", "null"]
PLUMBING += [
    '"name": "now"',
    '"name"',
    '"arguments": {',
    '"parameters": {',
    "get_weather",
    "now",
    "function",
    "```json",
]
PLUMBING += [" to=functions.now", "assistant", "analysis", "final", "<think>", "</think>", "[THINK]", "<|python_tag|>"]


def read(dialect: str, *pieces: str) -> Answer:
    reasoning = "harmony" if dialect == "harmony" else "think"
    parser = AnswerFormat(dialect, reasoning).parser(USE, prompt_tail="")
    assert parser is not None
    return parsed(parser, *pieces)


def texts(dialect: str) -> st.SearchStrategy[str]:
    """Markers of the dialect in any order, and whole texts with anything between them."""
    markers = AnswerFormat(dialect, "harmony" if dialect == "harmony" else "none").markers
    pieces = st.sampled_from([*markers, *PLUMBING]) | st.text(max_size=3)
    whole = st.sampled_from([written.text for written in TEXTS if written.dialect == dialect])
    return st.lists(pieces | whole, max_size=20).map("".join)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None)
@given(data=st.data())
def test_cuts_change_nothing(dialect: str, data: st.DataObject) -> None:
    text = data.draw(texts(dialect))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(dialect, text)
    assert read(dialect, *pieces) == whole
    assert read(dialect, *text) == whole


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None)
@given(text=st.text())
def test_text_without_markers_is_content_as_it_stands(dialect: str, text: str) -> None:
    if not any(sign in text for sign in "<[{"):
        assert read(dialect, text) == (text, "", [])


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(["one", "two ", "three"]), max_size=4), data=st.data())
def test_words_between_calls_are_kept(dialect: str, words: list[str], data: st.DataObject) -> None:
    written = next(each for each in TEXTS if each.dialect == dialect)
    if dialect in ("llama3_json", "llama4_json", "xlam", "pythonic", "harmony"):
        return
    answer = read(dialect, *[word + written.text for word in words])
    assert answer.content == "".join(words)
    assert answer.calls == written.answer.calls * len(words)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=json_values, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_valid_json_passes_as_written(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert mend(text) == text


@settings(deadline=None)
@given(value=json_values)
def test_python_literals_become_the_json_of_their_value(value: Any) -> None:
    mended = mend(repr(value))
    assert mended is not None
    assert json.loads(mended) == value


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(PLUMBING) | st.text(max_size=3), max_size=30).map("".join))
def test_what_the_mender_completes_is_json_and_cuts_change_nothing(text: str) -> None:
    mended = mend(text)
    if mended is not None:
        json.loads(mended)
    whole, cut = JsonMender(), JsonMender()
    at = whole.read(text, 0)
    cut_at = 0
    for character in text:
        cut_at += cut.read(character, 0)
    assert (cut.done, cut.failed, cut.take(), cut.unread()) == (whole.done, whole.failed, whole.take(), whole.unread())
    assert at == cut_at


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("opening", ["[", '{"a":', "(", "{", "<tool_call>"])
def test_nesting_of_any_depth_is_read(dialect: str, opening: str) -> None:
    written = next(each for each in TEXTS if each.dialect == dialect)
    begin, _ = written.text.split("Paris")
    for text in (opening * 10_000, begin + opening * 10_000, begin + '",' + opening * 10_000):
        read(dialect, text)
