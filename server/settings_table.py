"""`SETTINGS`: every leaf of `Config` once, with the names it has outside Python. Read by `settings` and `config_docs`.

Found by walking `Config` and its sections: flag, `KAON_*` variable and YAML key follow from the leaf's name.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from engine.config import Config, Section

ENV_PREFIX = "KAON_"
POSITIONAL = "model"
"""The one setting that the command line takes without a flag."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of `Config`, under all of its names."""

    name: str
    """The leaf's name, which is its YAML key."""
    section: type[Section]
    path: tuple[str, ...]
    """Field names from `Config` down to the section; empty for `Config`'s own leaves."""
    optional: bool
    """Whether the section is there only when one of its leaves is set."""
    field: FieldInfo

    @property
    def flag(self) -> str:
        """As the command line spells it."""
        return "MODEL" if self.name == POSITIONAL else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """As the environment spells it."""
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> Any:
        """The bare type: without constraints, without None."""
        return _bare(self.field.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values, where they can be listed."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def type_name(self) -> str:
        """The type in a word or two, for help and docs."""
        if self.choices:
            return " | ".join(self.choices)
        if get_origin(self.kind) is tuple:
            return f"{_word(get_args(self.kind)[0])},..."
        return _word(self.kind)

    @property
    def default(self) -> str | None:
        """The default as YAML would spell it; None where the meaning tells it.

        Of an optional section the first setting's is `off`, and the others' what they are once the section is there.
        """
        if self.optional and self.name == next(iter(self.section.model_fields)):
            return "off"
        value = self.field.default
        if value is None or value in ((), ""):
            return None
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def secret(self) -> bool:
        """Whether its values must not be shown."""
        return SecretStr in map(_bare, get_args(self.kind))

    @property
    def meaning(self) -> str:
        """What it does, on one line."""
        return " ".join((self.field.description or "").split())


def derive_settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every leaf of `root` and its sections. Raises `TypeError` when two share a name, since all are spelled flat."""
    settings: dict[str, Setting] = {}
    for setting in _leaves(root, (), optional=False):
        if (other := settings.setdefault(setting.name, setting)) is not setting:
            raise TypeError(
                f"{setting.name} is a field of both {other.section.__name__} and {setting.section.__name__}; "
                "settings are spelled flat, so rename one"
            )
    return tuple(settings.values())


def _leaves(section: type[Section], path: tuple[str, ...], *, optional: bool) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        kind = _bare(field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _leaves(kind, (*path, name), optional=optional or field.default is None)
        else:
            yield Setting(name, section, path, optional, field)


def _word(kind: Any) -> str:
    bare: type = _bare(kind)
    return "text" if bare in (str, SecretStr) else bare.__name__


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _bare(next(arg for arg in get_args(annotation) if arg is not types.NoneType))
    return annotation


SETTINGS = derive_settings(Config)
