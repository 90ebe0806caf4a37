"""Every architecture that has a model here, in the shapes and options that its checkpoints come in.

A module a family, each with `VARIANTS`; `test_architectures` proves them all, and docs/models.md lists them.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import pytest

from tests.parity.checkpoints import Family


class Variant(NamedTuple):
    """One checkpoint to be: a family's model with some fields of its config set."""

    architecture: str
    name: str
    family: Family
    overrides: dict[str, Any]


PARTLY_TORCH = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Ministral3ForCausalLM"})
"""Architectures of which torch computes a part where the CPU's operators compute the others whole."""


def first_of_each(variants: Sequence[Variant]) -> pytest.MarkDecorator:
    """Parametrizes `variant`, a fixture; in the short form, by the first variant of each architecture."""
    seen: set[str] = set()
    cases = []
    for each in variants:
        marks = [pytest.mark.slow] if each.architecture in seen else []
        cases.append(pytest.param(each, marks=marks, id=f"{each.architecture}, {each.name}"))
        seen.add(each.architecture)
    return pytest.mark.parametrize("variant", cases, indirect=True)


def all_variants() -> list[Variant]:
    """Of every family."""
    return [
        variant
        for module in sorted(module.name for module in iter_modules(__path__))
        for variant in import_module(f"{__name__}.{module}").VARIANTS
    ]
