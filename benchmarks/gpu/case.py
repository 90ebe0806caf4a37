"""`Case`: one thing that is measured; `Finding`: what came of it; `Part`: cases that share a table."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

Values: TypeAlias = dict[str, float | str]
"""Figures and remarks of a case, by column. A column "of the ..." holds a share, which is shown in percent."""


class Case(NamedTuple):
    """One row of a table. `run` raises where it cannot be measured; its words become the row."""

    name: str
    run: Callable[[], Values]


class Wrong(ValueError):
    """What was to be measured gives wrong numbers."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row: figures, or why there are none."""

    part: str
    case: str
    values: Values = field(default_factory=dict)
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Without what is empty."""
        return {name: value for name, value in asdict(self).items() if value}


class Part(NamedTuple):
    """Cases of one subject, measured in a process of their own."""

    name: str
    title: str
    what: str
    target: str
    seconds: float
    """The most that it may take."""
    quick_seconds: float
    """The same of a quick run."""

    def cases(self, bench: "Bench") -> Iterator[Case]:
        """In order; what several share is made when the first of them runs."""
        module = import_module(f"benchmarks.gpu.{self.name}")
        return cast("Iterator[Case]", module.cases(bench))
