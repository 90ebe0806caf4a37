"""The digest of a checkpoint changes with its configuration and its weights only."""

from pathlib import Path

import pytest

from engine.config.paths import weights_digest
from models.errors import CheckpointError

SIZE = 3_000_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "tokenizer.json").write_text("{}")
    for part in range(2):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes([part]) * SIZE)
    return tmp_path


def test_files_that_are_no_weights_change_nothing(checkpoint: Path) -> None:
    before = weights_digest(checkpoint)
    (checkpoint / "tokenizer.json").write_text("other")
    (checkpoint / "model-0.safetensors").touch()
    assert weights_digest(checkpoint) == before
    assert len(before) == 8


@pytest.mark.parametrize("what", ["config", "header", "all numbers", "size", "one file less"])
def test_other_weights_have_another_digest(checkpoint: Path, what: str) -> None:
    before, weights = weights_digest(checkpoint), checkpoint / "model-1.safetensors"
    match what:
        case "config":
            (checkpoint / "config.json").write_text('{"hidden_size": 65}')
        case "header":
            weights.write_bytes(b"\x07" + weights.read_bytes()[1:])
        case "all numbers":
            weights.write_bytes(weights.read_bytes()[:4096] + bytes([9]) * (SIZE - 4096))
        case "size":
            weights.write_bytes(weights.read_bytes() + b"\x01")
        case _:
            weights.unlink()
    assert weights_digest(checkpoint) != before


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path) -> None:
    """As a link of the hub's cache whose file was deleted."""
    broken = checkpoint / "model-2.safetensors"
    broken.symlink_to("deleted")
    with pytest.raises(CheckpointError, match=f"^{broken} cannot be read: No such file or directory; check it"):
        weights_digest(checkpoint)
