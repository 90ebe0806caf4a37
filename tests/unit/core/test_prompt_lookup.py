"""Drafts that are looked up in a sequence's earlier tokens."""

from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.ngram import PromptLookup

FIRST = [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_came_next_the_last_time_is_drafted() -> None:
    lookup = PromptLookup(2, 4)
    assert lookup.propose(FIRST, 3) == []
    assert lookup.propose([*FIRST, 2, 3], 3) == [4, 5, 6]
    assert lookup.propose([*FIRST, 2, 3, 9, 2, 3], 1) == [9], "the latest of two that match alike"
    assert lookup.propose([*FIRST, 2, 3, 9, 2, 3, 5], 3) == [], "3, 5 never came"


def test_of_several_places_the_longest_match_wins() -> None:
    tokens = [5, 1, 2, 30, 6, 1, 2, 40, 7, 1, 2, 50, 6, 1, 2]
    assert PromptLookup(2, 3).propose(tokens, 1) == [40]
    assert PromptLookup(2, 2).propose(tokens, 1) == [50], "not compared any further"


def test_what_repeats_goes_on_repeating() -> None:
    assert PromptLookup(2, 4).propose([9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup(1, 4).propose([4, 4], 3) == [4, 4, 4]


def test_tokens_that_are_not_known_yet_are_left_out() -> None:
    tokens = [*FIRST, 2, 3]
    assert PromptLookup(2, 4).propose(tokens, 3, num_unread=1) == [5, 6, 7]


def test_drafts_pause_after_none_was_accepted() -> None:
    lookup, length = PromptLookup(1, 2), 4

    def pause() -> int:
        """Tokens that are generated without drafts, after all drafts of a step were rejected."""
        nonlocal length
        lookup.note(length, 2, 0)
        begin = length
        while not lookup.propose([1] * length, 1):
            length += 1
        return length - begin

    assert [pause() for _ in range(8)] == [1, 3, 7, 15, 31, 32, 32, 32]
    lookup.note(length, 2, 1)
    assert pause() == 1


def test_runs_that_are_indexed_together_follow_those_indexed_before() -> None:
    tokens, lookup = [1, 2, 3, 9, 5, 3, 8, 1, 2, 3], PromptLookup(1, 3)
    while lookup.index(tokens, 4):
        pass
    assert lookup.propose(tokens, 1) == [9]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    steps=st.lists(st.integers(1, 5), max_size=8),
    most=st.integers(1, 30),
)
def test_growing_finds_what_starting_anew_finds(
    tokens: list[int], shortest: int, more: int, steps: list[int], most: int
) -> None:
    grown, length = PromptLookup(shortest, shortest + more), 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        grown.index(tokens[:length], most)
        found = grown.propose(tokens[:length], 4)
        assert found == PromptLookup(shortest, shortest + more).propose(tokens[:length], 4)
        last = tokens[:length][-shortest:]
        ends = [end for end in range(shortest, length) if tokens[end - shortest : end] == last]
        assert bool(found) == bool(ends)
        if found:
            assert len(found) == 4
            assert any(tokens[end] == found[0] for end in ends)
