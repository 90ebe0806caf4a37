"""The image for CPUs, built by buildah on a Debian base: it runs as its own user, adds little to torch, and serves.

Needs root, buildah and debootstrap (apt-get install buildah debootstrap), and the registries of Debian and Python; if
one is missing, the tests are skipped. No image is pulled: the base is made by debootstrap, with the torch of the
Python that runs the tests. The configuration that a runtime reads from the image (user, variables, entry point) is
read here too, and its root is mounted read-only, as in the manifests.

If podman is installed (apt-get install podman runc catatonit netavark iptables), it starts the pod of
deploy/kubernetes/kaon.yaml from that image, with the manifest's user, capabilities, volumes and secret.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from packaging.utils import canonicalize_name

from tests.e2e.kaon_server import eventually, free_port

pytestmark = [pytest.mark.ops, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's releases by their Python, which must be that of the copied torch."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
MOST_BYTES = 250 * 10**6
"""Largest size of the image beyond its base, which has torch, and beyond torch's requirements."""
OF_TORCH = ("filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy")
"""Packages that torch requires, which the image installs, since the base has only torch."""
BASE, IMAGE = "localhost/kaon-test-base", "localhost/kaon"
EPOCH = "1700000000"
"""The time of everything in the image, as `SOURCE_DATE_EPOCH` gives it."""


class Buildah:
    """buildah with a store of its own: files in place of mounts, chroot in place of namespaces."""

    def __init__(self, store: Path) -> None:
        program = shutil.which("buildah")
        if program is None or shutil.which("debootstrap") is None:
            pytest.skip("no builder of images: apt-get install buildah debootstrap, then make test-ops as root")
        if os.geteuid() != 0:
            pytest.skip("building the image needs root: make test-ops as root, or by `buildah unshare`")
        self.command = [
            program,
            "--storage-driver",
            "vfs",
            "--root",
            str(store / "root"),
            "--runroot",
            str(store / "run"),
        ]

    def __call__(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            [*self.command, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()


def make_base(directory: Path) -> None:
    """Debian with its Python and this Python's torch, in place of `docker.io/library/python` with torch."""
    suite = SUITES.get(sys.version_info[:2])
    assert suite is not None, f"run the tests with one of Python {SUITES}, whose torch Debian's Python can load"
    include = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", include, suite, directory, MIRROR], check=True)
    shutil.copy(CERTIFICATES, directory / CERTIFICATES.relative_to("/"))
    version = sysconfig.get_python_version()
    packages = directory / f"usr/local/lib/python{version}/dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info"):
        for path in Path(sysconfig.get_path("purelib")).glob(pattern):
            shutil.copytree(path, packages / path.name, symlinks=True)


def num_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    files = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sum(path.lstat().st_size for path in files)


def make_context(directory: Path) -> Path:
    """A copy of the repository's files, as a fresh clone is: with times of its own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name, follow_symlinks=False)
    return directory


def build(buildah: Buildah, context: Path, name: str, target: str, *arguments: str) -> None:
    options = ("--isolation", "chroot", "--layers=false", "--target", target, "--timestamp", EPOCH)
    buildah("bud", *options, *arguments, "--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}", "-t", name, context)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    directory = tmp_path_factory.mktemp("image")
    run = Buildah(directory / "store")
    make_base(directory / "base")
    container = run("from", "scratch")
    run("add", "--quiet", container, directory / "base", "/")
    run("commit", "--quiet", "--rm", container, BASE)
    build(run, make_context(directory / "context"), IMAGE, "cpu", "--build-arg", f"PYTHON_BASE={BASE}")
    yield run
    # The files of a build belong to other users, and have gigabytes.
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    return buildah("from", IMAGE)


def run(buildah: Buildah, container: str, *command: str) -> str:
    return buildah("run", "--isolation", "chroot", container, "--", *command)


@pytest.fixture(scope="module")
def config(buildah: Buildah) -> dict[str, Any]:
    """Digests of the image, by OCI's names."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    return found


def test_it_runs_as_a_user_of_its_own(buildah: Buildah, container: str, config: dict[str, Any]) -> None:
    assert config["User"] == "kaon"
    assert config["Entrypoint"] == ["/opt/kaon/.venv/bin/kaon"]
    assert run(buildah, container, "id", "-u") == "10001"
    refused = subprocess.run(
        [*buildah.command, "run", "--isolation", "chroot", container, "--", "touch", "/opt/kaon/server/app.py"],
        capture_output=True,
        check=False,
    )
    assert refused.returncode != 0


def test_it_is_small_over_torch_and_has_no_compiler(buildah: Buildah, container: str) -> None:
    base = buildah("from", BASE)
    root = Path(buildah("mount", container))
    added = num_bytes(root) - num_bytes(Path(buildah("mount", base)))
    (packages,) = root.glob("opt/kaon/.venv/lib/python3*/site-packages")
    of_torch = sum(num_bytes(packages / name) for name in OF_TORCH)
    sys.stdout.write(f"over torch's files {added / 10**6:.0f} MB, of which {of_torch / 10**6:.0f} MB torch requires\n")
    assert 0 < added - of_torch <= MOST_BYTES
    assert not list(root.glob("usr/bin/*gcc*"))
    assert list(root.glob("opt/kaon/models/ops/cpu/_library*.so")), "the operators in C were not compiled"


def test_it_holds_what_its_bill_of_materials_lists(buildah: Buildah, container: str) -> None:
    """The bill has packages for every Python, of which an image has a part."""
    bill = json.loads((ROOT / "deploy" / "sbom.cdx.json").read_text())
    listed = {(canonicalize_name(each["name"]), each["version"]) for each in bill["components"]}
    (packages,) = Path(buildah("mount", container)).glob("opt/kaon/.venv/lib/python3*/site-packages")
    found = {
        (canonicalize_name(each.metadata["Name"]), each.version)
        for each in importlib.metadata.distributions(path=[str(packages)])
    }
    names = {name for name, _ in found}
    assert {"kaon", "pip", "opentelemetry-sdk", "pyjwt", "pyzmq"} <= names
    assert {each for each in found if each[0] not in ("kaon", "pip", *OF_TORCH)} - listed == set()


def layers(buildah: Buildah, image: str) -> list[str]:
    found: list[str] = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["rootfs"]["diff_ids"]
    return found


def test_equal_sources_give_equal_layers(buildah: Buildah, container: str, tmp_path: Path) -> None:
    again = "localhost/kaon-again"
    build(buildah, make_context(tmp_path / "clone"), again, "cpu", "--build-arg", f"PYTHON_BASE={BASE}")
    roots = [Path(buildah("mount", each)) for each in (container, buildah("from", again))]
    differing = subprocess.run(
        ["diff", "-rq", "--no-dereference", *(root / "opt/kaon" for root in roots)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert differing.stdout == ""
    assert layers(buildah, again) == layers(buildah, IMAGE)


@pytest.mark.parametrize(
    ("target", "argument", "build_of"), [("cuda", "PYTHON_BASE", "cuda"), ("rocm", "ROCM_BASE", "hip")]
)
def test_the_images_for_gpus_are_built_on_a_base_that_says_it_has_their_torch(
    target: str, argument: str, build_of: str, buildah: Buildah, tmp_path: Path
) -> None:
    """Each line of the Dockerfile runs. No vendor's base is here: torch is the one for CPUs under another name."""
    base, image = f"localhost/kaon-{target}-base", f"localhost/kaon-{target}"
    made = buildah("from", BASE)
    (version,) = Path(buildah("mount", made)).glob("usr/local/lib/python3*/dist-packages/torch/version.py")
    with version.open("a") as file:
        file.write(f"\n{build_of} = '99.9'\n")
    buildah("commit", "--quiet", "--rm", made, base)
    build(buildah, make_context(tmp_path / "clone"), image, target, "--build-arg", f"{argument}={base}")
    made = buildah("from", image)
    config = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert config["User"] == "kaon"
    assert run(buildah, made, "/opt/kaon/.venv/bin/kaon", "--version").startswith("kaon ")
    assert run(buildah, made, "sh", "-c", "command -v cc && id -u").endswith("10001")
    assert run(buildah, made, "sh", "-c", 'touch "$TRITON_CACHE_DIR" && echo written') == "written"


def test_a_base_without_a_torch_for_rocm_is_refused(buildah: Buildah, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="torch is not built for ROCm: name a base image"):
        build(buildah, make_context(tmp_path / "clone"), "localhost/none", "rocm", "--build-arg", f"ROCM_BASE={BASE}")


READ_ONLY = """
set -e
root=$0
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o uid=10001 tmpfs "$root/var/cache/kaon"
! touch "$root/opt/written" 2>/dev/null
exec chroot --userspec=10001:10001 "$root" env -i "$@"
"""
"""Run a container like the pods of the manifests: only /tmp, shared memory and the cache are writable."""


def test_it_serves_from_a_read_only_root_and_ends_in_order(
    buildah: Buildah, container: str, config: dict[str, Any], tmp_path: Path
) -> None:
    port = free_port()
    serve = [*config["Env"], *config["Entrypoint"], "serve", f"--port={port}", "--cpu-kvcache-gib=0.25"]
    with (tmp_path / "log").open("w") as log:
        server = psutil.Popen(
            ["unshare", "--mount", "sh", "-c", READ_ONLY, buildah("mount", container), *serve],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd="/",
        )
        try:
            assert "serving kaon-demo on" in server.stdout.readline(), (tmp_path / "log").read_text()
            assert server.name() == "kaon-api"
            assert server.uids().effective == 10001
            url = f"http://127.0.0.1:{port}"
            assert httpx.get(f"{url}/readyz").status_code == 200
            body = {"model": "kaon-demo", "prompt": "Once upon a time", "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.json()["usage"]["completion_tokens"] == 8
            server.terminate()
            assert server.wait(120) == 0
        finally:
            for each in (*server.children(recursive=True), server) if server.is_running() else ():
                each.kill()
    assert "operators" in (tmp_path / "log").read_text(), "torch computes in place of the operators in C"


class Podman:
    """podman with the store that buildah has filled."""

    def __init__(self, buildah: Buildah, directory: Path) -> None:
        needed = ("podman", "runc", "catatonit", "iptables")
        if missing := [name for name in needed if shutil.which(name) is None]:
            pytest.skip(f"no {', '.join(missing)}: apt-get install podman runc catatonit netavark iptables")
        settings = directory / "containers.conf"
        # podman's own limits are higher than a test's process may set.
        limits = '["nofile=4096:4096", "nproc=4096:4096"]'
        settings.write_text(f'[containers]\ndefault_ulimits={limits}\n[engine]\nruntime="runc"\n')
        self._environment = {**os.environ, "CONTAINERS_CONF": str(settings)}
        self._command = ["podman", *buildah.command[1:]]

    def __call__(self, *arguments: str | Path, given: str = "") -> str:
        done = subprocess.run(
            [*self._command, *map(str, arguments)],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()


def is_ready(client: httpx.Client, podman: Podman, container: str) -> bool:
    assert podman("inspect", "--format", "{{.State.Running}}", container) == "true", podman("logs", container)
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:  # no process listens yet
        return False


def test_the_manifests_pod_starts_and_ends_without_losing_a_stream(buildah: Buildah, tmp_path: Path) -> None:
    podman = Podman(buildah, tmp_path)
    parts = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "kaon.yaml").read_text()))
    (deployment,) = (part for part in parts if part and part["kind"] == "Deployment")
    port = free_port()
    deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["hostPort"] = port
    manifest = tmp_path / "deployment.yaml"
    manifest.write_text(yaml.safe_dump(deployment))
    # In the form in which podman 4.3, Debian's release, reads the secrets of a pod.
    podman("secret", "create", "kaon-api-keys", "-", given=json.dumps({"keys": b64encode(b"a-key").decode()}))
    podman("kube", "play", manifest)
    try:
        url, container = f"http://127.0.0.1:{port}", "kaon-pod-0-kaon"
        with httpx.Client(base_url=url, timeout=120, headers={"Authorization": "Bearer a-key"}) as client:
            eventually(lambda: is_ready(client, podman, container))
            body = {
                "model": "kaon-demo",
                "prompt": "Once upon a time",
                "max_tokens": 400,
                "temperature": 0,
                "ignore_eos": True,
            }
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert podman("exec", container, "id", "-u") == "10001"
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
                received = [next(lines)]
                with ThreadPoolExecutor(1) as pool:
                    stopped = pool.submit(podman, "stop", "--time", "50", container)
                    received += lines
                    stopped.result()
        assert received.pop() == "[DONE]"
        assert "".join(json.loads(each)["choices"][0]["text"] for each in received) == whole
        assert podman("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        podman("kube", "down", manifest)
