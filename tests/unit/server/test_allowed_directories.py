"""Directories that admin calls may name are below the allowed ones, as are their files, also through links.

The weights in them are checked by their headers before the engine is called.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from server.adapters import allowed_directory
from server.errors import PathNotAllowed
from server.frontend import _check_replacement


async def allowed(path: Path | str, *directories: Path) -> Path | None:
    resolved = [directory.resolve() for directory in directories]
    return await allowed_directory(str(path), resolved, param="lora_path", setting="lora_directories")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An allowed directory with an adapter, and a file outside of it."""
    adapter = tmp_path / "allowed" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "secret").write_text("{}")
    return tmp_path


async def test_links_are_followed_beneath_the_allowed_directories(folder: Path) -> None:
    """As in the hub's cache: files of a snapshot are links to blobs."""
    inside, blobs = folder / "allowed", folder / "blobs"
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"")
    (inside / "adapter" / "adapter_model.safetensors").symlink_to(blobs / "weights")
    (inside / "link").symlink_to(inside / "adapter")
    (inside / "adapter" / "deeper").mkdir()
    assert await allowed(inside / "link", inside, blobs) == (inside / "adapter").resolve()
    assert await allowed(inside / "nothing", inside) is None
    assert await allowed(inside / "adapter" / "adapter_config.json", inside) is None
    with pytest.raises(PathNotAllowed, match="is a link to a file elsewhere; copy the file itself"):
        await allowed(inside / "link", inside)


@pytest.mark.parametrize("path", ["allowed/..", "secret", "allowed/out", "allowed/out/adapter", "allowed/loop", "\0"])
async def test_a_directory_elsewhere_is_refused_however_it_is_named(path: str, folder: Path) -> None:
    (folder / "allowed" / "out").symlink_to(folder)
    (folder / "allowed" / "loop").symlink_to(folder / "allowed" / "loop")
    with pytest.raises(PathNotAllowed, match="not beneath a directory of lora_directories"):
        await allowed(folder / path, folder / "allowed")


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda file: file.symlink_to(file.parents[2] / "secret"), "a link to a file elsewhere"),
        (lambda file: file.symlink_to("../../secret"), "a link to a file elsewhere"),
        (lambda file: file.symlink_to("/dev/zero"), "a link to a file elsewhere"),
        (lambda file: file.symlink_to(file), "a link that leads nowhere"),
        (lambda file: file.symlink_to("gone"), "a link that leads nowhere"),
        (os.mkfifo, "neither a file nor a directory"),
    ],
)
async def test_a_directory_with_a_file_elsewhere_or_no_file_is_refused(
    put: Callable[[Path], object], why: str, folder: Path
) -> None:
    put(folder / "allowed" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(PathNotAllowed, match=f"whose file 'adapter_model.safetensors' is {why}"):
        await allowed(folder / "allowed" / "adapter", folder / "allowed")


_ENTRY = '{"a": {"dtype": "F32", "shape": [0], "data_offsets": %s}}'


@pytest.mark.parametrize(
    "header",
    ['{"a": 1}', _ENTRY % "[]", _ENTRY % '[0, "1"]', _ENTRY % "[0, 1]", '{"a": {}}', '{"a": null}', "[]", "{"],
)
def test_a_broken_header_of_weights_is_refused_in_words(header: str, tmp_path: Path) -> None:
    _write_header(tmp_path, header)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or is not a safetensors file"):
        _check_replacement(tmp_path, tmp_path)


def test_a_header_that_names_more_bytes_than_safetensors_reads_is_not_read(tmp_path: Path) -> None:
    file, length = tmp_path / "model.safetensors", 2**40
    file.write_bytes(struct.pack("<Q", length))
    os.truncate(file, 8 + length)
    with pytest.raises(ValueError, match=f"its header would have {length} bytes, of at most 100000000"):
        _check_replacement(tmp_path, tmp_path)


def test_a_directory_with_the_name_of_weights_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a file; copy the checkpoint again"):
        _check_replacement(tmp_path, tmp_path)


def test_metadata_of_weights_may_have_any_names(tmp_path: Path) -> None:
    header = '{"__metadata__": {"data_offsets": "none"},' + (_ENTRY % "[0, 0]")[1:]
    _write_header(tmp_path, header)
    assert _check_replacement(tmp_path, tmp_path) == 8 + len(header)


_ADDED = '{"added_tokens_decoder": {"3": {"content": "%s"}}}'


@pytest.mark.parametrize(
    ("name", "present", "new", "said"),
    [
        ("tekken.json", "{}", "[]", "tekken.json"),
        ("tekken.json", "{}", None, "has tekken.json; both must have it"),
        ("vocab.json", "{}", "[]", "vocab.json"),
        ("tokenizer_config.json", _ADDED % "<a>", _ADDED % "<b>", "added_tokens_decoder"),
    ],
)
def test_weights_of_another_vocabulary_are_refused(
    name: str, present: str, new: str | None, said: str, tmp_path: Path
) -> None:
    """Unless both have the same tokenizer.json, next to which no other file is read."""
    folders = [tmp_path / "present", tmp_path / "new"]
    for folder, text in zip(folders, (present, new), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        _write_header(folder, "{}")
        if text is not None:
            (folder / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        _check_replacement(*folders)
    for folder in folders:
        (folder / "tokenizer.json").write_text("{}")
    assert _check_replacement(*folders) == 8 + len("{}")


def _write_header(folder: Path, header: str) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
