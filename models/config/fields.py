"""`Fields`: typed reads from a JSON object of a checkpoint, with errors that name field and value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import CheckpointError

_REQUIRED: Any = object()
_LARGEST_INTEGER = 2**31 - 1
_LARGEST_NUMBER = 1e18
"""Above any checkpoint's numbers, and low enough that computing with them cannot overflow."""

MAX_LAYERS = 4096
"""Upper limit, far above any checkpoint's, so that a damaged config.json does not make the loader build layers for
hours."""

OTHER_CLASS_NAMES = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
}
"""By names that published files have in `architectures`, for code of their own: transformers' name of the class."""


class Fields:
    """A JSON object and its origin. A field that is null counts as missing, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @classmethod
    def from_file(cls, path: Path) -> "Fields":
        """The JSON object in `path`. Raises `CheckpointError` when it is not one, or cannot be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download the checkpoint again") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {_kind(values)}; it must hold a JSON object")
        return cls(values, str(path))

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same object, with defaults for fields that it leaves out."""
        missing = {name: value for name, value in defaults.items() if not self.has(name)}
        return Fields({**self.values, **missing}, self.where)

    def with_names(self, names: Mapping[str, str]) -> "Fields":
        """The same object, in which fields that have one of these names have the second as well."""
        found = {
            new: self.values[old]
            for old, new in names.items()
            if self.has(old) or (old in self.values and new not in self.values)
        }
        return Fields({**self.values, **found}, self.where)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int = _REQUIRED, *, minimum: int = 1, maximum: int = _LARGEST_INTEGER
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.invalid(name, f"an integer from {minimum} to {maximum}")
        return int(value)

    def number(self, name: str, default: float = _REQUIRED, *, may_be_zero: bool = False) -> float:
        """A positive number."""
        value = self._get(name, default)
        if not _is_positive(value) and not (may_be_zero and value == 0 and not isinstance(value, bool)):
            least = "from" if may_be_zero else "above"
            raise self.invalid(name, f"a number {least} 0 and at most {_LARGEST_NUMBER:g}")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self.invalid(name, f"a list of {length} numbers above 0 and at most {_LARGEST_NUMBER:g}")
        return tuple(float(item) for item in value)

    def integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers; empty where the field is missing."""
        values = self._get(name, [])
        if not isinstance(values, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= _LARGEST_INTEGER
            for item in values
        ):
            raise self.invalid(name, f"a list of integers from {minimum} to {_LARGEST_INTEGER}")
        return tuple(values)

    def boolean(self, name: str, default: bool) -> bool:
        """Null is false, as for transformers' code."""
        value = self.values.get(name, default)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.invalid(name, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(name, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the field is missing."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(
            isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _LARGEST_INTEGER for item in ids
        ):
            raise self.invalid(name, f"a token id from 0 to {_LARGEST_INTEGER}, or a list of them")
        return tuple(dict.fromkeys(ids))

    def section(self, name: str) -> "Fields | None":
        """The object in a field, None where the field is missing."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "a JSON object")
        return Fields(value, f"{name} of {self.where}")

    def invalid(self, name: str, wanted: str) -> CheckpointError:
        """The error for a field's value, with what it must be."""
        return CheckpointError(f"{name} of {self.where} is {_short(self.values.get(name))}; it must be {wanted}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where} has no {name}, which the model needs; download the checkpoint again")
        return default


def body_name(prefix: str, name: str) -> str:
    """The name of a tensor or module by its name in checkpoints whose body has another prefix than `model.`.

    Where the body has none, a name without a dot is not a module's.
    """
    if not prefix and "." not in name:
        return name
    return f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def with_parts(names: Mapping[str, str], name: str) -> str:
    """The name of a tensor or module in which some parts are replaced by others."""
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def read_config(path: Path) -> Fields:
    """config.json of the checkpoint directory `path`. Raises `CheckpointError` where there is none."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; name the directory of a Hugging Face checkpoint")
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has no config.json; name the directory of a Hugging Face checkpoint")
    config = Fields.from_file(config_path)
    names = config.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in OTHER_CLASS_NAMES:
        return Fields({**config.values, "architectures": [OTHER_CLASS_NAMES[names[0]]]}, config.where)
    return config


def is_causal(config: Fields) -> bool:
    """Whether a token sees only earlier ones. Null is true, unlike other flags: transformers' default
    attention is causal then, unless it makes a mask for padding or for a window shorter than the text."""
    return config.values.get("is_causal") is None or config.boolean("is_causal", True)


def read_generation_config(path: Path) -> Fields:
    """generation_config.json of the checkpoint directory `path`; empty where there is none."""
    file = path / "generation_config.json"
    return Fields.from_file(file) if file.exists() else Fields({}, "")


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= _LARGEST_NUMBER


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
