"""Dashboards, rules and the compose file use Kaon's names, and each alert has its runbook and its test.

`make test-ops` uses a real Prometheus.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config.settings import SETTINGS
from server.metrics import Metrics
from tools.dashboards import FOLDER, PAGES

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
NAMES = sorted({alert["alert"] for alert in ALERTS})
EXPRESSIONS = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]


def known_names() -> set[str]:
    """Names of samples, and of recording rules."""
    metrics = Metrics("1", 2)
    metrics.show_models(lambda: {"one": True})
    metrics.show_owners(list)
    text = metrics.render().decode()
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    names = set(families)
    for name, kind in families.items():
        if kind == "histogram":
            names |= {f"{name}_{suffix}" for suffix in ("bucket", "count", "sum")}
    return names | {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def named(expression: str) -> set[str]:
    """Kaon's metrics in an expression."""
    return set(re.findall(r"\bkaon[:_][\w:]+", expression))


def test_panels_ask_for_metrics_that_exist() -> None:
    queries = [
        query for page in PAGES for row in page.rows.values() for panel in row for query in panel.queries.values()
    ]
    assert queries
    assert set().union(*map(named, queries)) - known_names() == set()


def test_rules_ask_for_metrics_that_exist() -> None:
    assert set().union(*map(named, EXPRESSIONS)) - known_names() == set()


def test_the_bound_of_the_objective_is_one_of_the_histogram_s() -> None:
    text = Metrics("1").render().decode()
    bounds = set(re.findall(r'kaon_time_to_first_token_seconds_bucket{le="([^"]+)"}', text))
    used = {bound for expression in EXPRESSIONS for bound in re.findall(r'le="([^"]+)"', expression)}
    assert used == {"2.5"}
    assert used <= bounds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_the_dashboard_s_file_has_the_page_s_panels(page: Any) -> None:
    """If this fails, run `make rendered`."""
    board = json.loads((FOLDER / f"{page.uid}.json").read_text())
    assert (board["uid"], board["title"]) == (page.uid, page.title)
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == list(page.rows)
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    panels = [panel for row in page.rows.values() for panel in row]
    for file, panel in zip(shown, panels, strict=True):
        assert file["title"] == panel.title
        assert {target["legendFormat"]: target["expr"] for target in file["targets"]} == panel.expressions


def test_every_alert_has_a_runbook_and_a_test() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    # KaonAbsent is defined by the chart, which knows its release's job.
    headings = [*dict.fromkeys(alert["alert"] for alert in ALERTS), "KaonAbsent"]
    assert re.findall(r"^## (\w+)$", runbooks, re.M) == headings
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yaml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert sorted(fired) == NAMES
    for alert in ALERTS:
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_the_dashboards_show_every_metric_that_a_runbook_names() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    queries = [
        query for page in PAGES for row in page.rows.values() for panel in row for query in panel.queries.values()
    ]
    assert named(runbooks) - set().union(*map(named, queries)) == set()


def test_the_compose_file_sets_settings_that_exist_and_opens_loopback_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["kaon"]["environment"].keys() <= {setting.env for setting in SETTINGS}
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()
