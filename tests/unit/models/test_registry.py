"""`models.registry.Registry`: lookup by name, lazy import, and additions from other packages."""

import sys
from pathlib import Path

import pytest

from models.registry import Registry

COUNTED = """
from test_registry_tables import TABLE

@TABLE.register("counted")
def counted():
    return 7
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to import from, with a module that contains a registry."""
    (tmp_path / "test_registry_tables.py").write_text(
        "from models.registry import Registry\n"
        "TABLE = Registry('test counter', {'counted': 'test_registry_counted', 'absent': 'test_registry_empty'})\n"
    )
    (tmp_path / "test_registry_counted.py").write_text(COUNTED)
    (tmp_path / "test_registry_empty.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("tables", "counted", "empty", "foreign"):
        monkeypatch.delitem(sys.modules, f"test_registry_{module}", raising=False)
    return tmp_path


def test_imports_an_implementation_when_it_is_first_used(tables: Path) -> None:
    from test_registry_tables import TABLE  # type: ignore[import-not-found]

    assert TABLE.names() == ("counted", "absent")
    assert "counted" in TABLE
    assert "test_registry_counted" not in sys.modules
    assert TABLE["counted"]() == 7
    assert "test_registry_counted" in sys.modules


def test_names_what_it_has_where_a_name_is_unknown(tables: Path) -> None:
    from test_registry_tables import TABLE

    with pytest.raises(ValueError, match="test counter is 'other'; it must be one of counted, absent"):
        TABLE["other"]
    with pytest.raises(ValueError, match="module test_registry_empty registers no such name"):
        TABLE["absent"]


def test_additions_come_first_and_names_are_unique() -> None:
    table = Registry[int]("number", {"one": "nowhere"})
    assert table.register("two")(2) == 2
    assert table.names() == ("two", "one")
    assert table.foreign_names() == ("two",)
    assert table["two"] == 2
    with pytest.raises(ValueError, match="number 'two' is registered twice"):
        table.register("two")(3)


def test_finds_entry_points_of_installed_packages(tables: Path) -> None:
    package = tables / "foreign-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[kaon.test_counter]\nforeign = test_registry_foreign\n")
    (tables / "test_registry_foreign.py").write_text(COUNTED.replace('"counted"', '"foreign"'))
    from test_registry_tables import TABLE

    assert TABLE.names() == ("foreign", "counted", "absent")
    assert TABLE["foreign"]() == 7
