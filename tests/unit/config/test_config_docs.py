"""The configuration tables of the pages match `Config`."""

from pathlib import Path

import pytest

from engine.config.settings import SETTINGS
from tools import config_docs


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_the_tables_have_every_setting() -> None:
    tables = config_docs.full_tables()
    assert [setting.flag for setting in SETTINGS if f"| `{setting.flag}` |" not in tables] == []


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = f"before\n{config_docs.OPENING}old\n{config_docs.CLOSING}\nafter\n"
    assert config_docs.with_table(page, "new\n") == page.replace("old", "new")


def test_a_page_without_markers_is_an_error_that_shows_them() -> None:
    with pytest.raises(ValueError, match="end of the configuration table"):
        config_docs.with_table("no markers", "table")


def test_a_stale_page_fails_the_check_and_is_written_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{config_docs.OPENING}{config_docs.CLOSING}\n")
    monkeypatch.setattr(config_docs, "PAGE", page)
    assert config_docs.main(["--check"]) == 1
    assert "page.md" in capsys.readouterr().err
    assert config_docs.main([]) == 0
    assert config_docs.main(["--check"]) == 0
