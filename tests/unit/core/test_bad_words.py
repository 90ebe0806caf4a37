"""Token sequences that must never be completed."""

import numpy as np
import pytest

from engine.sampling.parameters import BadWords


@pytest.mark.parametrize(
    ("generated", "forbidden"),
    [
        ([], {9}),
        ([1], {9, 2}),
        ([5, 1], {9, 2}),
        ([1, 2], {9, 3}),
        ([2], {9}),
        ([1, 2, 2], {9}),
        ([7, 7, 7], {9, 7}),
        ([7, 7], {9}),
    ],
)
def test_the_last_token_is_forbidden_behind_those_before_it(generated: list[int], forbidden: set[int]) -> None:
    words = BadWords([[9], [1, 2], [1, 2, 3], [7, 7, 7, 7]])
    assert set(words.completing(np.array(generated, dtype=np.int32)).tolist()) == forbidden


def test_single_tokens_alone_are_always_forbidden() -> None:
    assert BadWords([[4], [6]]).completing(np.array([1], dtype=np.int32)).tolist() == [4, 6]
