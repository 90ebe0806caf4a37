"""Rules and dashboards against a real Prometheus that scrapes a loaded server of two replicas."""

import http.server
import json
import math
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests import ports
from tests.e2e.kaon_server import MODEL, KaonServer, eventually, free_port
from tests.e2e.processes import LoggedProcess
from tools.dashboards import FOLDER, PAGES, Panel, files

pytestmark = pytest.mark.ops

PROMETHEUS = FOLDER.parent / "prometheus"
EXPORTERS = """\
gpu_gfx_activity{gpu_id="0",hostname="a"} 81
gpu_used_vram{gpu_id="0",hostname="a"} 150000
gpu_package_power{gpu_id="0",hostname="a"} 610
gpu_ecc_uncorrect_total{gpu_id="0",hostname="a"} 0
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="b"} 93
DCGM_FI_DEV_FB_USED{gpu="0",Hostname="b"} 70000
DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="b"} 480
DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="b"} 0
"""
"""The GPU metrics of AMD's and NVIDIA's exporters that the dashboard shows: there is no GPU here."""


def promtool(prometheus: str, *arguments: str | Path, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [str(Path(prometheus).with_name("promtool")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **keywords)


def test_prometheus_accepts_configuration_and_rules(prometheus: str) -> None:
    checked = promtool(prometheus, "check", "config", PROMETHEUS / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


def test_each_alert_fires_when_it_must_and_not_before(prometheus: str) -> None:
    tested = promtool(prometheus, "test", "rules", "rules_test.yaml", cwd=PROMETHEUS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_rule_that_never_fires_fails_the_test_of_the_rules(prometheus: str, tmp_path: Path) -> None:
    (tmp_path / "rules_test.yaml").write_text((PROMETHEUS / "rules_test.yaml").read_text())
    rules = (PROMETHEUS / "rules.yaml").read_text()
    (tmp_path / "rules.yaml").write_text(
        rules.replace("expr: increase(kaon_core_restarts_total[15m]) > 2", "expr: 0 > 2")
    )
    assert promtool(prometheus, "test", "rules", "rules_test.yaml", cwd=tmp_path).returncode != 0


def test_the_dashboards_are_rendered() -> None:
    assert {path: path.read_text() for path, _ in files()} == dict(files())


# -- a loaded server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KaonServer]:
    """Two replicas under load until the module ends."""
    settings: dict[str, Any] = {"parallel_config": {"data_parallel_size": 2}, "speculative_config": {}}
    running = KaonServer(tmp_path_factory.mktemp("server") / "log", free_port(), **settings).ready()
    ended = threading.Event()

    def load(client: int) -> None:
        # The load is bounded, also if the test fails.
        for number in range(2000):
            if ended.is_set():
                return
            prompt = f"The story of client {client}: " + "once upon a time " * (number % 8)
            running.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 24})
            if number % 5 == 0:
                running.get("/v1/none")

    clients = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    yield running
    ended.set()
    for client in clients:
        client.join()
    assert running.stop() == 0


class _Exporter(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(EXPORTERS.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def exporters() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Exporter) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served.server_port
        served.shutdown()


class Scraper:
    """A Prometheus that scrapes every second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = httpx.post(f"{self._url}/api/v1/query", data={"query": expression}, timeout=60).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def started(prometheus: str, folder: Path, *flags: str) -> Iterator[Scraper]:
    """A Prometheus with the configuration in a folder, and with further flags."""
    port = ports.free_ports()
    own = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [prometheus, *own, f"--web.listen-address=127.0.0.1:{port}", *flags], stdout=log, stderr=log
        )
    try:
        found = Scraper(f"http://127.0.0.1:{port}")
        eventually(found.is_ready)
        yield found
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def scraper(
    prometheus: str, server: KaonServer, exporters: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraper]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    config["scrape_configs"].append({"job_name": "gpus", "static_configs": [{"targets": [f"127.0.0.1:{exporters}"]}]})
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    with started(prometheus, folder) as found:
        eventually(lambda: any(float(each["value"][1]) >= 12 for each in found.query("count_over_time(up[1m])")))
        yield found


def values(scraper: Scraper, panel: Panel, expression: str) -> list[float]:
    expression = expression.replace('job=~"$job"', 'job=~".+"').replace('instance=~"$instance"', 'instance=~".+"')
    found = scraper.query(expression.replace("$__rate_interval", "10s"))
    return [float(each["value"][1]) for each in found]


PANELS = [(page, panel) for page in PAGES for panels in page.rows.values() for panel in panels]


@pytest.mark.parametrize(("page", "panel"), PANELS, ids=[f"{page.uid}: {panel.title}" for page, panel in PANELS])
def test_every_query_of_a_panel_returns_data(scraper: Scraper, page: Any, panel: Panel) -> None:
    for legend, expression in panel.expressions.items():
        found: list[float] = []

        def has_data(expression: str = expression, found: list[float] = found) -> bool:
            found[:] = [each for each in values(scraper, panel, expression) if not math.isnan(each)]
            return bool(found)

        eventually(has_data)
        assert all(each >= 0 for each in found), (legend, found)
        if panel.top is not None:
            assert all(each <= panel.top * 1.001 for each in found), (legend, found)


def test_what_is_shown_is_what_clients_did(scraper: Scraper) -> None:
    def value(expression: str) -> float:
        [found] = scraper.query(expression)
        return float(found["value"][1])

    assert value("sum (kaon_core_serving)") == 2
    assert value("sum (rate(kaon_generation_tokens_total[10s]))") > 0
    assert value('sum (rate(kaon_http_requests_total{status="404"}[10s]))') > 0
    assert value("sum by (job) (kaon:request_errors:ratio_rate5m)") == 0
    assert scraper.query('ALERTS{alertstate="firing",severity="critical",alertname!="KaonSlowFirstToken"}') == []


def test_the_metrics_themselves_pass_prometheus_s_lint(prometheus: str, server: KaonServer) -> None:
    checked = promtool(prometheus, "check", "metrics", input=server.get("/metrics").text)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_dashboards_files_ask_for_nothing_else(scraper: Scraper) -> None:
    """The files contain the queries that were tested above."""
    for page in PAGES:
        board = json.loads((FOLDER / f"{page.uid}.json").read_text())
        asked = {target["expr"] for panel in board["panels"] for target in panel.get("targets") or ()}
        assert asked == {
            query for panels in page.rows.values() for each in panels for query in each.expressions.values()
        }


def test_the_dashboards_have_the_schema_of_grafana() -> None:
    """Grafana's own models read each file, and write the same."""
    for path in sorted(FOLDER.glob("kaon-*.json")):
        board = json.loads(path.read_text())
        assert json.loads(JSONEncoder().encode(Dashboard.from_json(board))) == board


def test_the_server_and_the_prometheus_of_the_compose_file_work_together(prometheus: str, tmp_path: Path) -> None:
    """Their commands and variables, without containers: no registry of images can be reached by the tests."""
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]
    port, values = free_port(), {"KAON_API_KEY": "a-key-of-an-api-client", "KAON_MODEL": ""}
    environment = {
        name: re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], value)
        for name, value in services["kaon"]["environment"].items()
    }
    command, host = services["kaon"]["command"]
    assert (command, host) == ("serve", "--host=0.0.0.0")
    arguments = (command, "--host=127.0.0.1", f"--port={port}", "--cpu-kvcache-gib=0.25")
    server = LoggedProcess([sys.executable, "-m", "server", *arguments], tmp_path / "server", **environment)
    try:
        assert "serving kaon-demo on" in server.process.stdout.readline(), server.stderr
        url = f"http://127.0.0.1:{port}"
        key = {"Authorization": f"Bearer {values['KAON_API_KEY']}"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200

        config = (PROMETHEUS / "compose.yml").read_text()
        assert '"kaon:8000"' in config
        (tmp_path / "prometheus.yml").write_text(config.replace("kaon:8000", f"127.0.0.1:{port}").replace("15s", "1s"))
        (tmp_path / "rules.yaml").write_text((PROMETHEUS / "rules.yaml").read_text())
        _, *flags = services["prometheus"]["command"]
        with started(prometheus, tmp_path, *flags) as scraper:
            eventually(lambda: scraper.query('up{job="kaon"} == 1') != [])
            eventually(lambda: scraper.query("kaon_core_serving == 1") != [])
    finally:
        assert server.end_by(signal.SIGTERM) == 0
