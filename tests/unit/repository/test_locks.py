"""The packages that `make install` installs are pinned by hash, match pyproject.toml, and have no known advisory."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import sbom
from tools.advisories import Advisory, Snapshot, audit, load, locked, lower_bounds, refreshed
from tools.locks import EXTRAS, FOLDER, ROOT, TORCH, entries, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}


def test_there_is_a_lock_of_the_server_of_each_extra_and_of_torch_for_cuda() -> None:
    assert LOCKS.keys() == {"kaon", "torch-cuda", *EXTRAS}


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_hashes_and_names_no_index(name: str) -> None:
    assert "://" not in LOCKS[name]
    assert entries(LOCKS[name])
    for entry in entries(LOCKS[name]).values():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    is_torch = {name for name in entries(LOCKS[name]) if TORCH.match(name)}
    assert is_torch == (set(entries(LOCKS[name])) if name == "torch-cuda" else set())


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_each_dependency_of_pyproject_is_locked_at_a_version_that_it_admits(extra: str) -> None:
    """If this fails, run `make locks`."""
    names = ["kaon", "torch-cuda", extra] if extra else ["kaon", "torch-cuda"]
    found = [(canonicalize_name(package), version) for name in names for package, version in pins(LOCKS[name])]
    for text in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        requirement = Requirement(text)
        versions = [version for package, version in found if package == canonicalize_name(requirement.name)]
        assert versions, f"{requirement.name} is in no lock"
        assert all(requirement.specifier.contains(version, prereleases=True) for version in versions), text


def test_no_locked_version_and_no_lower_bound_is_affected_by_an_advisory() -> None:
    found = [
        f"{package} {version}: {advisory.id}, fixed in {advisory.fixed}"
        for package, version, advisory in audit(locked() | lower_bounds(), load())
        if advisory.not_affected is None
    ]
    assert found == []


def test_nothing_that_is_served_with_calls_torch_load() -> None:
    """The snapshot has the reason why advisories about pickled checkpoints do not concern Kaon."""
    packages = ("kaon", "server", "engine", "kvcache", "models")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert [path for path in sources if re.search(r"\btorch\.load\(", path.read_text())] == []


def test_the_audit_finds_what_it_should() -> None:
    known = load()
    assert {advisory.id for _, _, advisory in audit([("jinja2", "3.1.4")], known)} == {
        "CVE-2024-56201",
        "CVE-2024-56326",
        "CVE-2025-27516",
    }
    assert next(advisory.id for _, _, advisory in audit([("Starlette", "0.38.0")], known)) == "CVE-2024-47874"
    assert list(audit([("jinja2", "3.1.6"), ("unheard-of", "1.0")], known)) == []


RECORD = """
id: PYSEC-1
modified: '2030-01-02T03:04:05Z'
aliases: [CVE-2030-1, GHSA-x]
affected:
- package: {name: Some.Package, ecosystem: PyPI}
  ranges:
  - type: ECOSYSTEM
    events: [{introduced: '1.0'}, {fixed: '1.2'}, {introduced: '2.0'}]
- package: {name: Other, ecosystem: npm}
  ranges: [{type: ECOSYSTEM, events: [{introduced: '0'}]}]
"""


def test_a_snapshot_is_refreshed_from_records_of_the_database(tmp_path: Path) -> None:
    (tmp_path / "PYSEC-1.yaml").write_text(RECORD)
    (tmp_path / "PYSEC-2.yaml").write_text(RECORD.replace("PYSEC-1", "PYSEC-2") + "withdrawn: '2030-01-01'\n")
    earlier = Advisory(id="CVE-2030-1", package="some-package", introduced="1.0", not_affected="not used")
    before = Snapshot(as_of="2029-12-31", source="", advisories=[earlier])
    found = refreshed(before, tmp_path, {"some-package", "other"})
    assert found.as_of == "2030-01-02"
    assert found.advisories == [
        Advisory(id="CVE-2030-1", package="some-package", introduced="1.0", fixed="1.2", not_affected="not used"),
        Advisory(id="CVE-2030-1", package="some-package", introduced="2.0", fixed=None),
    ]


def test_the_bill_of_materials_is_what_the_locks_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, run `make rendered`."""
    assert sbom.main(["--check"]) == 0, capsys.readouterr().err
    components = {(each["name"], each["version"]): each for each in sbom.document()["components"]}
    assert components.keys() >= pins(LOCKS["kaon"])
    assert [name for name, _ in components if TORCH.match(name)] == ["torch"]
    assert len({each["bom-ref"] for each in components.values()}) == len(components)
