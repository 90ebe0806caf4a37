"""What `make test` selects of a sweep that `make test-long` runs whole: `sweep` of several axes, `some` of one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

_Part = tuple[tuple[int, int], ...]
"""Some axes, each with the place of its value."""


def sweep(together: int = 1, /, **axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations; those outside the short form's selection are slow.

    The selection contains every `together` values of different axes together: with 1 every value, with 2 every pair.
    It always has the first values of all axes together, which should be the product's defaults.
    Values of a mapping are named by their keys.
    """
    named = [
        list(each.items()) if isinstance(each, Mapping) else [(None, value) for value in each]
        for each in axes.values()
    ]
    selected = selection([len(each) for each in named], together)
    forms = []
    for places in product(*(range(len(each)) for each in named)):
        names, values = zip(*(each[place] for each, place in zip(named, places, strict=True)), strict=True)
        marks = () if places in selected else pytest.mark.slow
        forms.append(pytest.param(*values, marks=marks, id="-".join(map(str, names)) if all(names) else None))
    return pytest.mark.parametrize(tuple(axes), forms)


def some(values: Iterable[Any], *short: Any) -> list[Any]:
    """A parameter's values, for `parametrize`; those that are not in `short` are in the long form only."""
    values = list(values)
    assert all(each in values for each in short), f"of {short} some are not among {values}"
    return [pytest.param(each, marks=() if each in short else pytest.mark.slow) for each in values]


def selection(sizes: Sequence[int], together: int) -> set[tuple[int, ...]]:
    """Few combinations that contain every `together` values of different axes, found greedily."""
    forms = list(product(*map(range, sizes)))
    wanted = {part for form in forms for part in _parts(form, together)}
    uses: Counter[_Part] = Counter()
    selected: set[tuple[int, ...]] = set()
    while wanted:
        # Among those that add equally many, the one whose other parts are the rarest yet.
        form = max(forms, key=lambda each: _merit(_parts(each, together), wanted, uses))
        wanted -= _parts(form, together)
        uses.update(_parts(form, together))
        selected.add(form)
    return selected


def _merit(parts: set[_Part], wanted: set[_Part], uses: Counter[_Part]) -> tuple[int, int]:
    return len(wanted & parts), -sum(uses[part] for part in parts)


def _parts(form: tuple[int, ...], together: int) -> set[_Part]:
    return set(combinations(enumerate(form), together))
