"""The operators' arguments in Python equal those in C, field by field: both sources are read, neither is built."""

import ctypes
import re
from pathlib import Path

import pytest

from models.ops.cpu import runtime as library
from models.ops.cpu import structures
from models.ops.cpu import structures as exchange_structures
from models.ops.cpu import structures as group_structures

SOURCES = Path(library.__file__).parent
_TYPES = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


def original(wanted: str) -> list[tuple[str, object]]:
    """The fields of a structure, with their types."""
    text = "".join((SOURCES / name).read_text() for name in ("kaon.h", "operators.h"))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    body = re.search(rf"struct {wanted} \{{(.*?)\n\}};", text, flags=re.DOTALL)
    assert body is not None, f"there is no struct {wanted}"
    return [field for line in body[1].split(";") for field in fields(line.strip())]


def fields(declaration: str) -> list[tuple[str, object]]:
    """# `const bf16 *a, *b` -> a and b, two pointers"""
    if not declaration:
        return []
    if whole := re.fullmatch(r"struct (\w+) \w+", declaration):
        return original(whole[1])
    kind, _, names = declaration.removeprefix("const ").removeprefix("struct ").partition(" ")
    found = []
    for name in names.split(","):
        stars, word = re.fullmatch(r"\s*(\**)(\w+)\s*", name).groups()
        found.append((word, ctypes.c_void_p if stars else _TYPES[kind]))
    return found


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@pytest.mark.parametrize(
    "mirror",
    [structures.Step, group_structures.Group, exchange_structures.Exchange, *structures.Arguments.__subclasses__()],
    ids=lambda each: each.__name__,
)
def test_a_structure_has_the_fields_of_its_c_original_in_order(mirror: type[ctypes.Structure]):
    assert list(mirror._fields_) == original(snake_case(mirror.__name__))


def test_operators_have_the_numbers_that_c_gives_them():
    text = (SOURCES / "operators.h").read_text()
    numbers = re.search(r"enum \{\s*(LINEAR.*?),\s*OPERATORS,?\s*\};", text, flags=re.DOTALL)
    assert numbers is not None
    names = [name.strip().lower() for name in numbers[1].split(",")]
    assert {snake_case(each.__name__): each.kind for each in library.Arguments.__subclasses__()} == {
        name: number for number, name in enumerate(names)
    }
