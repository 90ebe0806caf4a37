"""A checkpoint's safetensors files and the tensors in them. Read by the loader, and by the general route's."""

from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.config_fields import Fields
from models.errors import CheckpointError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 5


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files, as transformers chooses them: a single one before an index."""
    if (path / _SINGLE_FILE).is_file():
        return [path / _SINGLE_FILE]
    if not (path / _INDEX_FILE).is_file():
        raise CheckpointError(
            f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; convert the weights to safetensors"
        )
    index = Fields.from_file(path / _INDEX_FILE)
    weight_map = index.section("weight_map")
    if weight_map is None or not all(isinstance(name, str) for name in weight_map.values.values()):
        raise index.invalid("weight_map", "an object from tensor names to file names")
    files = [path / name for name in sorted(set(weight_map.values.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{path} lacks {some(absent, 'file')}, which {_INDEX_FILE} names; download it again")
    return files


def tensors_of_file(
    file: Path, seen: dict[str, Path], ignored: tuple[str, ...] = (), absent: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a file by name, mapped into memory and read as it is copied; none that begins with `ignored` or
    is in `absent`.

    Each is noted in `seen`. Raises `CheckpointError` for a damaged file, or a tensor that an earlier file holds too.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a dict
                if name.startswith(ignored) or name in absent:
                    continue
                if name in seen:
                    raise CheckpointError(f"{name} is in both {seen[name]} and {file.name}; only one may hold it")
                seen[name] = file
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a safetensors file ({error}); download it again"
        ) from error


def some(names: Iterable[str], noun: str = "tensor") -> str:
    """A count and the first few names, for a message."""
    first = sorted(names)
    dots = ", ..." if len(first) > _NAMED_IN_ERRORS else ""
    plural = "" if len(first) == 1 else "s"
    return f"{len(first)} {noun}{plural} ({', '.join(first[:_NAMED_IN_ERRORS])}{dots})"
