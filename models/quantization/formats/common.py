"""Reads that several formats share."""

from models.config_fields import Fields
from models.errors import CheckpointError


def group_size(section: Fields, name: str) -> int | None:
    """Inputs that share a scale; None where the field is -1: all of them."""
    if section.values.get(name) == -1:
        return None
    return section.integer(name)


def pair(section: Fields, name: str) -> tuple[int, int]:
    """A list of two counts."""
    found = section.values.get(name)
    if not isinstance(found, list) or len(found) != 2 or not all(type(item) is int and item > 0 for item in found):
        raise section.invalid(name, "a list of 2 integers above 0")
    return found[0], found[1]


def scheme_error(section: Fields, text: str) -> CheckpointError:
    """What a part of the checkpoint's configuration asks for that cannot be had; `text` has a verb."""
    return CheckpointError(f"{section.where} {text}")
