"""Results of the suites: read from JUnit files, written into docs/conformance.md."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.environments import requirements
from tests.conformance.suites import Suite

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"


@dataclass
class Result:
    """One suite's run."""

    suite: Suite
    tests: int = 0
    failures: list[str] = field(default_factory=list)
    excluded: dict[str, list[str]] = field(default_factory=dict)
    """Tests that were skipped or are expected to fail, by reason."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_excluded(self) -> int:
        return sum(map(len, self.excluded.values()))

    @property
    def passed(self) -> int:
        return self.tests - self.num_excluded - len(self.failures)

    def read(self, junit: Path) -> None:
        """Add the results in a JUnit file."""
        if not junit.exists():
            self.failures.append(f"{self.suite.name}: nothing ran")
            return
        root = ElementTree.parse(junit).getroot()
        for case in root.iter("testcase"):
            self.tests += 1
            name = case.get("name", "")
            if (skipped := case.find("skipped")) is not None:
                self.excluded.setdefault(_reason(skipped), []).append(name)
            elif case.find("failure") is not None or case.find("error") is not None:
                self.failures.append(name)
            self.notes += [each.get("value", "") for each in case.iter("property") if each.get("name") == "note"]


def _counted(names: list[str]) -> str:
    """Each name once, with its count."""
    counts = Counter(name.partition("[")[0] for name in names)
    return ", ".join(f"`{name}`" + (f" ({count} times)" if count > 1 else "") for name, count in counts.items())


def _reason(skipped: ElementTree.Element) -> str:
    reason = skipped.get("message") or skipped.text or "no reason given"
    return " ".join(reason.removeprefix("Skipped: ").split()).rstrip(".")


def version_of(suite: Suite, package: str) -> str:
    """The version that the requirement file pins."""
    text = requirements(suite).read_text(encoding="utf-8")
    if suite.is_node or suite.has_npm:
        version: str = json.loads(text)["packages"][f"node_modules/{package}"]["version"]
        return version
    found = re.search(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE | re.IGNORECASE)
    assert found, f"{requirements(suite).name} does not pin {package}"
    return found[1]


def write(results: Iterable[Result]) -> None:
    """Write the results of a whole run into the page."""
    results = list(results)
    lines = ["| suite | shows | tests | passed | excluded |", "|---|---|---:|---:|---:|"]
    for result in results:
        clients = ", ".join(f"{package} {version_of(result.suite, package)}" for package in result.suite.packages)
        counts = f"{result.tests} | {result.passed} | {result.num_excluded}"
        lines.append(f"| {clients} | {result.suite.what} | {counts} |")
    for result in results:
        if result.notes:
            lines += ["", f"**{result.suite.packages[0]}.** " + " ".join(result.notes)]
    if any(result.excluded for result in results):
        lines += ["", "Excluded, with the reason:", ""]
        for result in results:
            for reason, names in sorted(result.excluded.items()):
                lines.append(f"- **{result.suite.packages[0]}**, {reason}: {_counted(names)}")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n" + "\n".join(lines) + f"\n{_END}{after}", encoding="utf-8")
