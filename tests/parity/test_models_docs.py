"""docs/models.md lists the tested models."""

import pytest

from models.architectures.registry import ARCHITECTURES
from tests.parity import models_docs


def test_the_page_is_what_the_registry_of_proofs_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert models_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_every_architecture_is_listed_with_its_variants() -> None:
    rows = [line for line in models_docs.architectures_table().splitlines() if line.startswith("| `")]
    assert len(rows) == len(ARCHITECTURES.names())
    assert all(row.split(" | ")[2].strip(" |") for row in rows)


def test_a_page_without_a_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="table of architectures"):
        models_docs.with_table("no marker", "architectures", "")
