"""The container's targets: the files that they copy are sufficient for what they run."""

import fnmatch
import os
import re
import shutil
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[3]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()


def stages() -> dict[str, list[str]]:
    """The instructions of each target, including those of the target from which it is built."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in LINES:
        if match := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            name = match[2]
            found[name] = [*found.get(match[1], ()), line]
        elif name and line and not line.startswith("#"):
            found[name].append(line)
    return found


def test_rocm_is_what_is_built_when_nothing_is_named() -> None:
    assert list(stages()) == ["model", "build", "cpu", "cuda", "rocm"]


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_each_target_runs_as_a_user_of_its_own_and_reports_its_health(target: str) -> None:
    instructions = [line.partition(" ")[0] for line in stages()[target]]
    assert {"USER", "HEALTHCHECK", "ENTRYPOINT", "CMD", "EXPOSE"} <= set(instructions)
    assert "USER kaon" in stages()[target]
    # The form without a shell passes signals on to the server.
    for line in stages()[target]:
        if line.startswith(("ENTRYPOINT", "CMD")):
            assert line.partition(" ")[2].startswith("[")
    assert instructions.index("RUN") < instructions.index("USER")


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_what_is_downloaded_and_compiled_is_kept_on_the_volume(target: str) -> None:
    found = " ".join(line for line in stages()[target] if line.startswith("ENV "))
    folders = dict(re.findall(r"(\w+)=(/\S+)", found))
    # The CPU's operators do not need Triton.
    needed = {"HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"}
    assert needed | ({"TRITON_CACHE_DIR"} if target != "cpu" else set()) == set(folders)
    assert all(Path(folder).is_relative_to("/var/cache/kaon") for folder in folders.values())
    assert "install -d -o kaon /var/cache/kaon" in (ROOT / "deploy" / "container.sh").read_text()


def test_the_image_for_amd_s_gpus_begins_with_a_certain_one_and_keeps_its_torch() -> None:
    (base,) = (line.partition("=")[2] for line in LINES if line.startswith("ARG ROCM_BASE="))
    _, _, tag = base.partition("@")[0].partition(":")
    version = re.search(r"py3\.(\d+)_pytorch_release_(\d+)\.(\d+)", tag)
    assert version is not None
    assert int(version[1]) >= 11
    assert (int(version[2]), int(version[3])) >= (2, 9)
    assert "RUN sh deploy/container.sh rocm" in stages()["rocm"]


def test_the_image_for_cpus_has_the_installation_and_no_compiler() -> None:
    lines = stages()["cpu"]
    assert "COPY --from=build /opt/kaon /opt/kaon" in lines
    assert [line for line in lines if line.startswith("RUN ")] == ["RUN sh deploy/container.sh user"]
    assert "FROM ${PYTHON_BASE} AS build" in stages()["build"], "the Python that the installation refers to"
    assert "FROM ${PYTHON_BASE} AS cpu" in lines


@pytest.mark.parametrize(
    ("argument", "hip", "code"), [("rocm", "7.2", 0), ("rocm", "None", 1), ("", "None", 0), ("user", "None", 0)]
)
def test_an_image_for_amd_s_gpus_is_not_made_with_a_torch_for_others(
    argument: str, hip: str, code: int, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    tools.mkdir()
    for name in ("make", "cc", "useradd", "install"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/done\n")
        (tools / name).chmod(0o755)
    (tmp_path / "torch.py").write_text(f"class version:\n    hip = {None if hip == 'None' else hip!r}\n")
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    kaon = tmp_path / ".venv" / "bin" / "kaon"
    kaon.write_text(f'#!/bin/sh\n[ -z "${{KAON_TORCH_LOCK+set}}" ] && echo "$1" >>{tmp_path}/done\n')
    kaon.chmod(0o755)
    tests = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "sympy" / "core" / "tests"
    tests.mkdir(parents=True)
    done = subprocess.run(
        ["sh", str(ROOT / "deploy" / "container.sh"), *argument.split()],
        cwd=tmp_path,
        env={"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "KAON_TORCH_LOCK": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert ("torch is not built for ROCm" in done.stderr) == (code == 1)
    user = ["useradd", "install"]
    # The second is the first answer, after which the imported modules are compiled.
    expected = ["make"] if code else user if argument == "user" else ["make", "run-batch", *user]
    assert (tmp_path / "done").read_text().split() == expected
    assert tests.exists() == (argument == "user" or bool(code))


def copied(into: Path) -> None:
    """The files under version control that `COPY . /opt/kaon` copies."""
    ignored = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()]
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listing.splitlines():
        parts = [*map(str, Path(name).parents), name]
        if any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in ignored if part != "."):
            continue
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone: git lists the files of an image")
def test_an_image_holds_what_its_installation_names(tmp_path: Path) -> None:
    copied(tmp_path)
    for name in ("Makefile", "README.md", "deploy/container.sh", "deploy/install.sh", "server/healthcheck.py"):
        assert (tmp_path / name).exists(), name
    assert not (tmp_path / "tests").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone: git lists the files of an image")
def test_the_installation_of_an_image_works_in_a_clean_environment(tmp_path: Path) -> None:
    copied(tmp_path)
    script = (tmp_path / "deploy" / "container.sh").read_text()
    (command,) = re.findall(r"^PIP_NO_CACHE_DIR=1 (make install .*)$", script, flags=re.MULTILINE)
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME") or name.startswith("PIP_")}
    subprocess.run([*command.split(), f"PYTHON={sys.executable}"], cwd=tmp_path, env=clean, check=True)
    asked = subprocess.run(
        [tmp_path / ".venv/bin/kaon", "--version"], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
    )
    assert asked.stdout.startswith("kaon ")


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_health_check_distinguishes_a_server_that_answers_from_none() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = Thread(target=lambda: [server.handle_request() for _ in range(2)])
    thread.start()
    ask = [sys.executable, "-m", "server.healthcheck"]
    environment = {**os.environ, "KAON_PORT": str(server.server_port)}
    assert subprocess.run(ask, cwd=ROOT, env=environment, check=False).returncode == 0
    assert subprocess.run([*ask, "/readyz"], cwd=ROOT, env=environment, check=False).returncode == 1
    thread.join()
    server.server_close()
    with socket.socket() as silent:  # The port is taken, so that no other process can listen there.
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        environment["KAON_PORT"] = str(port)
        refused = subprocess.run(ask, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"http://127.0.0.1:{port}/livez" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_health_check_asks_nothing_of_a_host_that_serves_no_http() -> None:
    ask = [sys.executable, "-m", "server.healthcheck", "/readyz"]
    for node_rank, code in (("0", 1), ("1", 0)):
        environment = {**os.environ, "KAON_PORT": "9", "KAON_NODE_RANK": node_rank}
        done = subprocess.run(ask, cwd=ROOT, env=environment, capture_output=True, check=False)
        assert done.returncode == code
