"""The selections of sweeps contain what they say, in few forms."""

from itertools import combinations, product

import pytest

from tests.sweeps import selection, some, sweep


@pytest.mark.parametrize(
    ("sizes", "together", "most"), [((5, 2), 1, 5), ((2, 2, 2), 2, 4), ((4, 4, 2), 2, 17), ((3, 2), 2, 6)]
)
def test_every_so_many_values_are_together(sizes: tuple[int, ...], together: int, most: int) -> None:
    selected = selection(sizes, together)
    assert len(selected) <= most
    assert (0,) * len(sizes) in selected
    for axes in combinations(range(len(sizes)), together):
        found = {tuple(form[axis] for axis in axes) for form in selected}
        assert found == set(product(*(range(sizes[axis]) for axis in axes)))


def test_the_others_are_slow_and_names_are_the_keys() -> None:
    forms = sweep(a={"one": 1, "two": 2}, b={"x": [], "y": [3]}).args[1]
    assert [(form.id, form.values) for form in forms if not form.marks] == [("one-x", (1, [])), ("two-y", (2, [3]))]
    assert [form.id for form in forms if form.marks] == ["one-y", "two-x"]


def test_some_of_the_values_of_an_axis_are_in_the_short_form() -> None:
    cases = some(["a", "b", "c"], "c")
    assert [(case.values, [mark.name for mark in case.marks]) for case in cases] == [
        (("a",), ["slow"]),
        (("b",), ["slow"]),
        (("c",), []),
    ]
    with pytest.raises(AssertionError, match="of \\('d',\\) some are not among"):
        some(["a"], "d")
