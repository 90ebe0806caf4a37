"""`python -m tools.advisories [--refresh FOLDER]`: compares dependencies with a snapshot of published advisories.

pip-audit asks a service over the network, and cannot read a snapshot from a file. deploy/locks/advisories.json is such
a snapshot: for each package the ranges of versions that advisories name. A test compares the locks and the lower
bounds of pyproject.toml with it, so that every change is audited offline. `--refresh` merges a checkout of
github.com/pypa/advisory-database, or a folder of OSV's records for PyPI, into it.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.locks import FOLDER, ROOT, pins

SNAPSHOT = FOLDER / "advisories.json"


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """One published advisory about one package: versions from `introduced` on, and before `fixed`, are affected."""

    id: str
    package: str
    introduced: str = "0"
    fixed: str | None = None
    """The first fixed version; None if no fixed version is known."""
    not_affected: str | None = None
    """The reason why Kaon is not affected although a version is; such advisories are shown, but are no error."""

    def affects(self, package: str, version: str) -> bool:
        """Whether a version of a package is in the range."""
        if canonicalize_name(package) != self.package or Version(version) < Version(self.introduced):
            return False
        return self.fixed is None or Version(version) < Version(self.fixed)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The advisories that were known on a day."""

    as_of: str
    source: str
    advisories: list[Advisory]


def load() -> Snapshot:
    """The snapshot in the repository."""
    return msgspec.json.decode(SNAPSHOT.read_bytes(), type=Snapshot)


def locked() -> set[tuple[str, str]]:
    """Names and versions of all packages in all locks."""
    return {pin for file in FOLDER.glob("*.txt") for pin in pins(file.read_text(encoding="utf-8"))}


def lower_bounds() -> set[tuple[str, str]]:
    """Names and lower bounds of the dependencies in pyproject.toml that have one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [project["build-system"]["requires"], project["project"]["dependencies"]]
    groups += project["project"]["optional-dependencies"].values()
    found: set[tuple[str, str]] = set()
    for requirement in (Requirement(text) for group in groups for text in group):
        for bound in requirement.specifier:
            if bound.operator in (">=", "=="):
                found.add((canonicalize_name(requirement.name), bound.version))
    return found


def audit(versions: Iterable[tuple[str, str]], snapshot: Snapshot) -> Iterator[tuple[str, str, Advisory]]:
    """The versions that an advisory affects, each with the advisory."""
    for package, version in sorted(versions):
        for advisory in snapshot.advisories:
            if advisory.affects(package, version):
                yield package, version, advisory


def refreshed(snapshot: Snapshot, folder: Path, packages: set[str]) -> Snapshot:
    """Return `snapshot` with every range that records below `folder` name for `packages` and did not withdraw.

    Its day is that of the newest record, since the folder may be older than today.
    """
    known = {(each.id, each.package, each.introduced): each for each in snapshot.advisories}
    as_of = snapshot.as_of
    for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.json"))):
        text = path.read_text(encoding="utf-8")
        record = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(record, dict) or "affected" not in record or record.get("withdrawn"):
            continue
        as_of = max(as_of, str(record["modified"])[:10])
        for found in _ranges(record):
            key = found.id, found.package, found.introduced
            if found.package in packages:
                reason = known[key].not_affected if key in known else None
                known[key] = msgspec.structs.replace(found, not_affected=reason)
    ordered = sorted(known.values(), key=lambda each: (each.package, each.id, each.introduced))
    return Snapshot(as_of=as_of, source=snapshot.source, advisories=ordered)


def _ranges(record: dict[str, Any]) -> Iterator[Advisory]:
    """The ranges of one record in OSV's format, by its CVE number if it has one."""
    names = [record["id"], *record.get("aliases", ())]
    name = next((each for each in names if re.match(r"CVE-", each)), names[0])
    for affected in record["affected"]:
        package = affected["package"]
        if package.get("ecosystem") != "PyPI":
            continue
        for each in affected.get("ranges", ()):
            if each["type"] != "ECOSYSTEM":
                continue
            introduced = "0"
            is_open = False
            for event in each["events"]:
                if "introduced" in event:
                    introduced, is_open = str(event["introduced"]), True
                elif "fixed" in event:
                    is_open = False
                    yield Advisory(
                        id=name,
                        package=canonicalize_name(package["name"]),
                        introduced=introduced,
                        fixed=str(event["fixed"]),
                    )
            if is_open and not any("last_affected" in event for event in each["events"]):
                yield Advisory(id=name, package=canonicalize_name(package["name"]), introduced=introduced)


def main(argv: Sequence[str]) -> int:
    """Print the affected packages. Returns 1 if there are any, 2 for invalid arguments."""
    if argv and (len(argv) != 2 or argv[0] != "--refresh" or not Path(argv[1]).is_dir()):
        sys.stderr.write("usage: python -m tools.advisories [--refresh FOLDER]\n")
        return 2
    snapshot = load()
    if argv:
        packages: set[str] = {canonicalize_name(name) for name, _ in locked() | lower_bounds()}
        snapshot = refreshed(snapshot, Path(argv[1]), packages)
        SNAPSHOT.write_bytes(msgspec.json.format(msgspec.json.encode(snapshot), indent=1) + b"\n")
    code = 0
    for package, version, advisory in audit(locked() | lower_bounds(), snapshot):
        fixed = f"fixed in {advisory.fixed}" if advisory.fixed else "not fixed in any version"
        print(f"{package} {version}: {advisory.id}, {fixed}; {advisory.not_affected or 'AFFECTED'}")
        code = code or int(advisory.not_affected is None)
    print(f"{len(snapshot.advisories)} ranges as of {snapshot.as_of}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
