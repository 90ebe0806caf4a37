"""`Registry`: the implementations of one extension point by name, each imported when it is first used. No torch here.

Kaon's own implementations are listed by module. Another package adds its own in one of two ways: with the decorator
`register`, in a process that imports the package, or with an entry point of the group `kaon.KIND`, which every process
of the server finds:

    [project.entry-points."kaon.attention_backend"]
    toy = "toy_package.attention"
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to implementations: classes, functions or values of one type."""

    def __init__(self, kind: str, modules: Mapping[str, str]) -> None:
        """`kind` names the extension point in errors and in the entry point group. `modules`: the module that
        registers each of Kaon's own names, in their order of preference.
        """
        self.kind = kind
        self._own = modules
        self._registered: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds an implementation. Raises `ValueError` if the name has another one."""

        def add(implementation: T) -> T:
            if self._registered.setdefault(name, implementation) is not implementation:
                raise ValueError(f"{self.kind} {name!r} is registered twice; give one of the two another name")
            return implementation

        return add

    def names(self) -> tuple[str, ...]:
        """All names, those of other packages before Kaon's own. Imports no implementation."""
        return (*self.foreign_names(), *self._own)

    def foreign_names(self) -> tuple[str, ...]:
        """The names that other packages add."""
        return tuple(name for name in dict.fromkeys((*self._registered, *self._installed)) if name not in self._own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in (*self._own, *self._registered, *self._installed)

    def __getitem__(self, name: str) -> T:
        """The implementation of that name. Raises `ValueError` if there is none, or if its module registers none."""
        if name not in self._registered:
            if name not in self:
                raise ValueError(f"{self.kind} is {name!r}; it must be one of {', '.join(self.names())}")
            module = self._own.get(name) or self._installed[name]
            import_module(module)
            if name not in self._registered:
                raise ValueError(f"{self.kind} is {name!r}, but module {module} registers no such name; correct it")
        return self._registered[name]

    @cached_property
    def _installed(self) -> dict[str, str]:
        """The modules that installed packages name in their entry points."""
        group = f"kaon.{self.kind.replace(' ', '_')}"
        return {entry.name: entry.value for entry in entry_points(group=group)}
