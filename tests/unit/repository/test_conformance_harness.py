"""The counts, pins and error messages of `make conformance`, without running its suites."""

import json
from pathlib import Path

import pytest

from tests.conformance.environments import HERE, requirements
from tests.conformance.results import Result, version_of
from tests.conformance.server import is_server_error
from tests.conformance.suites import SUITES, Suite

JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="note" value="Fast."/></properties></testcase>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><error message="no"/></testcase>
<testcase name="d"><skipped type="pytest.xfail" message="the model
 is small"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_suite_has_its_tests_and_pins_its_clients(suite: Suite) -> None:
    assert all((HERE / file).is_file() for file in (*suite.tests, suite.script or suite.tests[0]))
    assert all(version_of(suite, package)[0].isdigit() for package in suite.packages)


@pytest.mark.parametrize(
    "suite", [suite for suite in SUITES if not (suite.is_node or suite.has_npm)], ids=lambda suite: suite.name
)
def test_everything_that_pip_installs_has_a_version(suite: Suite) -> None:
    lines = requirements(suite).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#") and "==" not in line] == []


@pytest.mark.parametrize(
    "suite", [suite for suite in SUITES if suite.is_node or suite.has_npm], ids=lambda suite: suite.name
)
def test_everything_that_npm_installs_has_a_version_and_no_host(suite: Suite) -> None:
    packages = json.loads(requirements(suite).read_text(encoding="utf-8"))["packages"]
    assert all(each["version"] and each["integrity"] for name, each in packages.items() if name)
    assert not any("resolved" in each for each in packages.values())


def test_a_junit_file_is_counted(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    result = Result(SUITES[0])
    result.read(tmp_path / "junit.xml")
    assert (result.tests, result.passed, result.failures) == (4, 1, ["b", "c"])
    assert result.excluded == {"the model is small": ["d"]}
    assert result.notes == ["Fast."]


def test_a_suite_that_left_no_results_has_failed(tmp_path: Path) -> None:
    result = Result(SUITES[0])
    result.read(tmp_path / "junit.xml")
    assert result.failures


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"path":"/v1/models","status":500}', True),
        ('{"path":"/v1/models","status":503}', True),
        ('{"path":"/v1/models","status":499}', False),
        ("kaon-api INFO server: 500", False),
        ("500", False),
    ],
)
def test_an_answer_5xx_in_the_access_log_is_seen(line: str, wrong: bool) -> None:
    assert is_server_error(line) is wrong
