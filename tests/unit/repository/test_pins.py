"""External images and actions are found wherever they are named, and named by digest and commit."""

import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.pins import ROOT, commit_of, digest_of, main, pinned, unpinned

PINNED = re.compile(r"(?:_BASE=|image: )([\w./-]+):([\w.-]+)@sha256:[0-9a-f]{64}\b")
DIGEST, COMMIT = f"sha256:{'a' * 64}", "b" * 40

WORKFLOW = """\
      - uses: actions/checkout@v4
      - uses: actions/setup-python@1111111111111111111111111111111111111111 # v5
        with:
"""
COMPOSE = """\
    image: kaon
    image: prom/prometheus:v3.7.3
    image: 127.0.0.1:5000/grafana/grafana:12.3.0@sha256:0000
"""
DOCKERFILE = """\
ARG PYTHON_BASE=python:3.12-slim
FROM ${PYTHON_BASE} AS cpu
"""


def test_what_has_a_tag_only_is_listed_with_its_line() -> None:
    assert list(unpinned(WORKFLOW)) == [(1, "actions/checkout@v4")]
    assert list(unpinned(COMPOSE)) == [
        (2, "prom/prometheus:v3.7.3"),
        (3, "127.0.0.1:5000/grafana/grafana:12.3.0@sha256:0000"),
    ]
    assert list(unpinned(DOCKERFILE)) == [(1, "python:3.12-slim")]


@pytest.mark.parametrize(
    "line",
    [
        "FROM python:3.12-slim AS build",
        "FROM --platform=linux/amd64 python AS build",
        "FROM ${BASE}",
        "COPY --from=nginx:1 /etc/nginx /etc/nginx",
        "# syntax=docker/dockerfile:1",
        "ARG ROCM_BASE=rocm/pytorch",
        "    image: redis",
        "    image: 'redis:8'  # the cache",
        "  - image: redis:8@sha256:0000",
        "      - uses: actions/checkout@v4  # two spaces",
        "      - uses: github/codeql-action/init@v3",
        "      uses: some/repository/.github/workflows/test.yml@main",
        "      - uses: docker://alpine:3",
    ],
)
def test_what_can_be_replaced_is_listed_in_every_form(line: str) -> None:
    assert [each.line for each in unpinned(f"# a comment\n{line}\n")] == [2]


@pytest.mark.parametrize(
    "text",
    [
        f"ARG PYTHON_BASE=python:3.12@{DIGEST}\nFROM scratch AS model\nFROM ${{PYTHON_BASE}} AS build\n"
        "FROM build AS cpu\n"
        "COPY --from=build /opt /opt\n",
        f"    image: kaon\n    image: kaon-ray\n    image: 'redis:8@{DIGEST}'  # the cache\n",
        f"      - uses: ./.github/actions/build\n      - uses: github/codeql-action/init@{COMMIT} # v3\n",
        f"      - uses: docker://alpine:3@{DIGEST}\n",
    ],
)
def test_what_is_pinned_or_built_here_is_not_listed(text: str) -> None:
    assert list(unpinned(text)) == []


def test_tags_stay_next_to_what_they_stand_for() -> None:
    asked: list[tuple[str, ...]] = []

    def digest(image: str) -> str:
        asked.append((image,))
        return DIGEST

    def commit(repository: str, tag: str) -> str:
        asked.append((repository, tag))
        return COMMIT

    written = pinned(WORKFLOW + COMPOSE + DOCKERFILE, digest, commit)
    assert asked == [
        ("prom/prometheus:v3.7.3",),
        ("127.0.0.1:5000/grafana/grafana:12.3.0",),
        ("python:3.12-slim",),
        ("actions/checkout", "v4"),
        ("actions/setup-python", "v5"),
    ]
    assert f"uses: actions/setup-python@{COMMIT} # v5\n" in written
    assert f"ARG PYTHON_BASE=python:3.12-slim@{DIGEST}\n" in written
    assert f"image: 127.0.0.1:5000/grafana/grafana:12.3.0@{DIGEST}\n" in written
    assert "image: kaon\n" in written
    assert list(unpinned(written)) == []
    assert pinned(written, digest, commit) == written


def test_the_repository_names_every_image_and_action_of_others_by_digest_or_commit() -> None:
    texts = [
        path.read_text()
        for pattern in ("Dockerfile", "deploy/**/*.yaml", ".github/**/*.y*ml")
        for path in ROOT.glob(pattern)
    ]
    assert [each for text in texts for each in unpinned(text)] == []
    named = {(image, tag) for text in texts for image, tag in PINNED.findall(text)}
    assert {"python", "rocm/pytorch", "prom/prometheus", "grafana/grafana"} == {image for image, _ in named}
    assert main(["--check"]) == 0


def test_a_check_lists_the_lines_without_a_pin_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/compose.yaml").write_text(COMPOSE)
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Dockerfile:1: python:3.12-slim can be replaced by its owner",
        "deploy/compose.yaml:2: prom/prometheus:v3.7.3 can be replaced by its owner",
        "deploy/compose.yaml:3: 127.0.0.1:5000/grafana/grafana:12.3.0@sha256:0000 can be replaced by its owner",
        "3 images and actions are named without a pin; run make pins",
    ]


class Registry(BaseHTTPRequestHandler):
    """Reports a digest to clients with a token, as Docker's registry does."""

    def do_GET(self) -> None:
        assert self.path == "/token?service=reg&scope=repository%3Agrafana%2Fgrafana%3Apull"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"token": "t"}')

    def do_HEAD(self) -> None:
        assert self.path == "/v2/grafana/grafana/manifests/12.3.0"
        is_known = self.headers["Authorization"] == "Bearer t"
        self.send_response(200 if is_known else 401)
        realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
        challenge = f'Bearer realm="{realm}",service="reg",scope="repository:grafana/grafana:pull"'
        self.send_header(*(("Docker-Content-Digest", DIGEST) if is_known else ("WWW-Authenticate", challenge)))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_registry_reports_the_digest_of_a_tag(registry: int) -> None:
    assert digest_of(f"127.0.0.1:{registry}/grafana/grafana:12.3.0") == DIGEST


def test_a_repository_has_the_commit_of_a_tag(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    git("tag", "v1")
    git("tag", "-a", "v2", "-m", "an object of its own")
    commit = git("rev-parse", "HEAD")
    assert [commit_of("", tag, str(tmp_path)) for tag in ("v1", "v2")] == [commit, commit]
    with pytest.raises(OSError, match="has no tag v3"):
        commit_of("", "v3", str(tmp_path))
