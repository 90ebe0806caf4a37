"""Docstrings of fields: those of the class that declares them last, and none where the annotation describes them."""

from typing import Annotated

from pydantic import Field

from engine.config.section import Section, docstrings


class Outer(Section):
    """With fields of several kinds."""

    plain: int = 1
    """First line.

    Third line."""
    described: Annotated[int, Field(description="By its annotation.")] = 2
    """Not this."""
    silent: int = 3
    again: int = 4
    """Before."""


class Inner(Outer):
    """Inherits some fields, and declares one again without a docstring."""

    again: int = 5
    silent: int = 6
    """Now described."""


def test_a_field_has_the_docstring_of_the_class_that_declares_it() -> None:
    assert docstrings(Outer) == {"plain": "First line.\n\nThird line.", "again": "Before."}
    assert docstrings(Inner) == {"plain": "First line.\n\nThird line.", "silent": "Now described."}


def test_classes_of_functions_have_their_own() -> None:
    class Outer(Section):
        """Of the same name as another."""

        plain: int = 1
        """Of a function."""

    assert docstrings(Outer) == {"plain": "Of a function."}


def test_without_sources_there_is_none() -> None:
    assert docstrings(type("Made", (Section,), {"__annotations__": {"x": int}, "x": 1, "__module__": "absent"})) == {}
