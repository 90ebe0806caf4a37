"""The safetensors files of a checkpoint directory, by their headers. Imports no torch.

Such a file is the length of a header in 8 bytes, the header, and the tensors' bytes.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from models.config.fields import Fields
from models.errors import CheckpointError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 5
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MOST_HEADER_BYTES = 100_000_000
"""As safetensors allows. A sparse file could otherwise claim a header that fills the memory."""


class StoredTensor(msgspec.Struct, frozen=True):
    """The entry of a tensor in a header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """Offsets of the first byte and of the end of its bytes, from the end of the header."""


class Header(NamedTuple):
    """The header of a file."""

    tensors: dict[str, StoredTensor]
    end: int
    """Offset in the file at which the tensors' bytes begin."""


def weight_files(path: Path) -> list[Path]:
    """Return the checkpoint's safetensors files. Like in transformers, a single file takes precedence over an index.

    Raises `CheckpointError` if there are none, or files that the index names are missing or in another directory:
    whoever may replace weights may read those of certain directories only.
    """
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
    names = sorted(set(weight_map.values.values()))
    if elsewhere := [name for name in names if name != Path(name).name]:
        raise CheckpointError(
            f"weight_map of {path / _INDEX_FILE} names {some(elsewhere, 'file')}; it must name files of that directory"
        )
    files = [path / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{path} lacks {some(absent, 'file')}, which {_INDEX_FILE} names; download it again")
    return files


def read_header(file: Path) -> Header:
    """Read the header of a file. Raises `CheckpointError` if it is damaged or was not written completely."""
    try:
        with file.open("rb") as opened:
            length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes, of at most {_MOST_HEADER_BYTES}")
            entries = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        # The metadata are arbitrary strings, whose names may equal those of a tensor's fields.
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=StoredTensor) for name, entry in entries.items()}
        needed = 8 + length + max((each.data_offsets[1] for each in tensors.values()), default=0)
        if size != needed:
            raise ValueError(f"it has {size} bytes, and its header describes {needed}")
    except (OSError, ValueError) as error:
        raise damaged(file, error) from error
    return Header(tensors, 8 + length)


def tensor_files(path: Path) -> dict[str, Path]:
    """Map the name of each tensor of the checkpoint directory `path` to its file. Raises `CheckpointError`."""
    return {name: file for file in weight_files(path) for name in read_header(file).tensors}


def require_layers(path: Path, count: int) -> None:
    """Raise `CheckpointError` if a header of a checkpoint is damaged, or if one of its `count` layers has no tensor.
    Checkpoints that name their layers differently pass."""
    found = {int(match[1]) for name in tensor_files(path) if (match := _LAYER.match(name))}
    if found and (absent := [f"{number}" for number in range(count) if number not in found]):
        raise CheckpointError(
            f"{path} lacks {some(absent, 'layer')}, but num_hidden_layers of its config.json is {count}; "
            "download it again"
        )


def damaged(file: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(f"{file} is truncated or is not a safetensors file ({error}); download it again")


def some(names: Iterable[str], noun: str = "tensor") -> str:
    """Return a count and the first few names, for an error message."""
    first = sorted(names)
    dots = ", ..." if len(first) > _NAMED_IN_ERRORS else ""
    plural = "" if len(first) == 1 else "s"
    return f"{len(first)} {noun}{plural} ({', '.join(first[:_NAMED_IN_ERRORS])}{dots})"
