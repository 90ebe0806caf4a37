"""`IncrementalDetokenizer`: the text does not depend on how tokens are grouped; stop strings; text is held only if
needed."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

TEXTS = ["the lazy dog 日本語 stop here", "👩‍👩‍👧 family, ééé", "Grüße\n\naus Köln", "aaab aab ab b", "bananabcd"]
STOPS = [
    ["stop"],
    ["日本"],
    ["語"],
    ["\n\n", "family"],
    ["aab", "ab"],
    ["👩‍👧"],
    ["é,", "éé"],
    ["absent"],
    ["x", "n K"],
]
STOPS += [["abcd"], ["banana", "an"], ["na", "ana"], ["nab", "banana!"]]

per_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def groupings(ids: list[int]) -> Iterator[list[list[int]]]:
    """The ids singly, in pairs, in threes, and all together."""
    for size in (1, 2, 3, len(ids) or 1):
        yield [ids[i : i + size] for i in range(0, len(ids), size)]


def run(tokenizer: Tokenizer, groups: list[list[int]], **params: object) -> tuple[str, str | None, int]:
    """Text, stop string and token count of a sequence pushed in `groups` and then finished."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(max_tokens=10**6, **params))  # type: ignore[arg-type]
    text = "".join([detokenizer.push(group) for group in groups]) + detokenizer.push([], finished=True)
    return text, detokenizer.stopped, detokenizer.num_tokens


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, found by trying every length."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_at_the_same_place_at_every_split(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    results = [
        run(tokenizer, groups, stop_strings=stops, include_stop_str_in_output=include) for groups in groupings(ids)
    ]
    assert results[0][:2] == expected(text, stops, include)
    assert results == [results[0]] * len(results)


@per_test
@given(data=st.data())
def test_any_grouping_of_any_ids_gives_the_whole_decodes_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    groups = [ids[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert run(tokenizer, groups, skip_special_tokens=skip)[0] == tokenizer.decode(ids, skip)


@per_test
@given(data=st.data())
def test_any_grouping_of_any_text_stops_at_the_same_place(tokenizer: Tokenizer, data: st.DataObject) -> None:
    letters = st.text("ab日 ", min_size=1)
    text = data.draw(letters)
    stops = data.draw(st.lists(st.text("ab日 ", min_size=1, max_size=4), min_size=1, max_size=4))
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    groups = [ids[begin:end] for begin, end in itertools.pairwise(cuts)]
    result = run(tokenizer, groups, stop_strings=stops)
    assert result[:2] == expected(text, stops, include=False)
    assert result == run(tokenizer, [[token_id] for token_id in ids], stop_strings=stops)


def test_every_prefix_of_the_ids_gives_the_prefixs_whole_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Köln 日本語 👩‍👩‍👧 the", add_special_tokens=False)
    for end in range(len(ids) + 1):
        assert run(tokenizer, [[i] for i in ids[:end]])[0] == tokenizer.decode(ids[:end])


def test_no_delta_holds_part_of_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    ids = tokenizer.encode("日本語 🙂 👩‍👩‍👧", add_special_tokens=False)
    assert all("\ufffd" not in detokenizer.push([token_id]) for token_id in ids)


def test_a_character_appears_with_its_last_byte(byte_fallback: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_fallback, SamplingParams())
    deltas = [detokenizer.push([3 + byte]) for byte in "日本".encode()]
    assert deltas == ["", "", "日", "", "", "本"]


def test_text_is_held_back_only_while_it_could_begin_a_stop_string(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, SamplingParams(stop_strings=["xyz", "yq"]))
    deltas = [detokenizer.push(byte_level.encode(letter)) for letter in "axyaxyxyz"]
    assert deltas == ["a", "", "", "xya", "", "", "xy", "", ""]
    assert detokenizer.stopped == "xyz"


def test_held_text_is_released_when_the_sequence_finishes(byte_level: Tokenizer) -> None:
    assert run(byte_level, [byte_level.encode("ends in st")], stop_strings=["stop"])[0] == "ends in st"


def test_a_stop_string_completed_by_the_replacement_of_a_cut_character_is_found(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a日", add_special_tokens=False)
    cut = next(ids[:end] for end in range(1, len(ids) + 1) if byte_level.decode(ids[:end]).startswith("a\ufffd"))
    assert run(byte_level, [cut], stop_strings=["\ufffd"])[:2] == ("a", "\ufffd")


def test_tokens_behind_a_stop_string_are_not_counted(byte_level: Tokenizer) -> None:
    text, stopped, num_tokens = run(byte_level, [byte_level.encode("a.b.c")], stop_strings=["."])
    assert (text, stopped, num_tokens) == ("a", ".", 2)


@pytest.mark.parametrize(
    ("min_tokens", "shown"), [(0, ""), (1, "a"), (2, "ab"), (3, "aba"), (4, "abab"), (6, "ababab")]
)
def test_a_stop_string_complete_within_min_tokens_does_not_count(
    byte_level: Tokenizer, min_tokens: int, shown: str
) -> None:
    ids = [byte_level.encode(letter)[0] for letter in "ababab"]
    for groups in groupings(ids):
        assert run(byte_level, groups, stop_strings=["a", "b"], min_tokens=min_tokens)[0] == shown


def test_a_stop_string_begun_within_min_tokens_and_completed_after_them_counts(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(letter)[0] for letter in "xstopy"]
    for groups in groupings(ids):
        assert run(byte_level, groups, stop_strings=["stop", "st"], min_tokens=3)[:2] == ("x", "stop")


def test_a_completion_goes_on_from_its_prompt_with_its_leading_space(byte_fallback: Tokenizer) -> None:
    hello = byte_fallback.encode("Hello", add_special_tokens=False)
    params = SamplingParams()
    after_text = IncrementalDetokenizer(byte_fallback, params, byte_fallback.encode("the"))
    after_bos = IncrementalDetokenizer(byte_fallback, params, byte_fallback.encode(""))
    assert after_text.push(hello) == " Hello"
    assert after_bos.push(hello) == "Hello"


def test_special_tokens_are_hidden_or_shown_in_the_stream(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox<|im_end|>")
    assert run(byte_level, [ids])[0] == "fox"
    assert run(byte_level, [ids], skip_special_tokens=False)[0] == "fox<|im_end|>"


def test_no_stop_string_is_found_in_a_marker_that_only_a_parser_sees(byte_level: Tokenizer) -> None:
    marker = byte_level.token_id("<|im_start|>")
    assert marker is not None
    ids = [*byte_level.encode("a "), marker, *byte_level.encode("im, star")]
    params = SamplingParams(stop_strings=["<|", "im_", " <|im", "star"])
    for groups in groupings(ids):
        detokenizer = IncrementalDetokenizer(byte_level, params, (), frozenset((marker,)))
        text = "".join(map(detokenizer.push, groups)) + detokenizer.push([], finished=True)
        assert (text, detokenizer.stopped) == ("a <|im_start|>im, ", "star")
    shown = IncrementalDetokenizer(
        byte_level, SamplingParams(stop_strings=["im_"], skip_special_tokens=False), (), frozenset((marker,))
    )
    assert shown.push(ids) == "a <|"
