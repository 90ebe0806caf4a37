"""`Section`: the base of `Config` and of each of its sections; `docstrings`: what the fields of such a class mean."""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of `Config` and its sections: immutable, without unknown fields, with strict conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@cache
def docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstrings of a model's fields, where their annotations give no description; empty without sources.

    Pydantic's `use_attribute_docstrings` tokenises the source of each class when it is defined, which took a sixth of
    the imports of a server and of an engine core. Only help, documentation and the API's description need them.
    """
    found = {}
    for name, field in model.model_fields.items():
        if field.description is None:
            declared = (_declared_in(base.__module__).get(base.__qualname__, {}) for base in model.__mro__)
            if text := next((fields[name] for fields in declared if name in fields), ""):
                found[name] = text
    return found


@cache
def _declared_in(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of all annotated names of a module's classes, empty for those without one, by qualified name."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_declared(ast.parse(source), ""))


def _declared(parent: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            fields = {}
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    fields[statement.target.id] = _text(following)
            yield prefix + node.name, fields
            yield from _declared(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _declared(node, f"{prefix}{node.name}.<locals>.")


def _text(statement: ast.stmt | None) -> str:
    """Return the content of a statement that is a string; otherwise nothing."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else ""
    return ""
