"""`make install` and the targets that depend on it, with a Python that only records its arguments."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PIP = "-m pip install --disable-pip-version-check"
PIP_INSTALL = f"{PIP} -c .venv/constraints.txt"

TOOLS = ("make", "sh", "cat", "cp", "find", "grep", "head", "mkdir", "rm", "sed", "sort", "touch", "chmod")

FAKE_PYTHON = r"""#!/bin/sh
case "$1 $2 $*" in
    *sysconfig*) echo "$SITE"; exit ;;
    "-c "*) [ -z "$ANSWER" ] || { echo "$ANSWER"; exit; }
        "$REAL_PYTHON" -S -c "$2" | sed "s#|$REAL_PYTHON|#|$0|#"; exit ;;
    *"-m pip --version") exit 0 ;;
esac
echo "$*" >>"$LOG"
for last; do :; done
case "$*" in
    *--without-pip*) ;;
    "-m venv"*) [ "$VENV_MODULE" = whole ] || exit 1 ;;
    *--python*) [ "$VENV_MODULE" = "without pip" ] || exit 1 ;;
    *"-m pip install"*) [ -z "$PIP_FAILS" ] || exit 1
        printf '#!/bin/sh\necho "kaon $*" >>"$LOG"\n' >.venv/bin/kaon; chmod +x .venv/bin/kaon ;;
esac
case "$*" in "-m venv"*) mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;; esac
"""


class Clone:
    """A new clone on a machine whose only Python is the fake one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.bin = folder / "bin"
        self.site = folder / "site"
        self.devices = folder / "devices"
        self.log = folder / "log"
        for made in (self.folder / "deploy", self.bin, self.site, self.devices):
            made.mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "deploy/install.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            if found is None:
                pytest.skip(f"this machine has no {tool}")
            (self.bin / tool).symlink_to(found)
        self.add_python("python3")
        self.venv = self.folder / ".venv"
        self.environment = {
            "PATH": str(self.bin),
            "LOG": str(self.log),
            "KAON_DEVICES": str(self.devices),
            "SITE": str(self.site),
            "REAL_PYTHON": sys.executable,
            "VENV_MODULE": "whole",
        }

    def add_python(self, name: str) -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)
        return path

    def add_torch(self, version: str) -> Path:
        """A torch that the Python already has; the folder that contains it."""
        folder = self.folder.parent / "packages"
        (folder / f"torch-{version}.dist-info").mkdir(parents=True)
        (folder / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        self.environment["PYTHONPATH"] = str(folder)
        return folder

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def done(self) -> list[str]:
        """The commands since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def pip_install(extras: str = "", *locks: str) -> list[str]:
    """Locked packages are installed by hash and without their dependencies, and then the rest, which is torch."""
    files = " ".join(f"-r deploy/locks/{name}.txt" for name in ("kaon", *locks))
    locked = f"{PIP} --quiet --require-hashes --no-deps {files}"
    return [locked, f"{PIP_INSTALL} --no-build-isolation -e .{extras}"]


def test_install_makes_an_environment_and_installs_with_the_constraints(clone: Clone) -> None:
    assert clone.make("install").returncode == 0
    assert clone.done() == ["-m venv --clear .venv", *pip_install()]
    assert (clone.venv / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()


def test_the_second_time_nothing_is_installed(clone: Clone) -> None:
    clone.make("install")
    clone.done()
    assert clone.make("install").returncode == 0
    assert clone.make("serve").returncode == 0
    assert clone.done() == ["kaon serve"]


def test_a_changed_pyproject_installs_again_into_the_same_environment(clone: Clone) -> None:
    clone.make("install")
    clone.done()
    os.utime(clone.venv / ".installed", (1, 1))
    assert clone.make("install").returncode == 0
    assert clone.done() == pip_install()


def test_an_installation_that_failed_is_tried_again(clone: Clone) -> None:
    assert clone.make("install", "PIP_FAILS=1").returncode != 0
    clone.done()
    assert clone.make("install").returncode == 0
    assert clone.done() == pip_install()


def test_serve_and_chat_pass_flags_on(clone: Clone) -> None:
    assert clone.make("serve", "ARGS=--port 8123").returncode == 0
    assert clone.done()[-1] == "kaon serve --port 8123"
    assert clone.make("chat", "ARGS=--temperature 0").returncode == 0
    assert clone.done() == ["kaon chat --temperature 0"]


def test_test_installs_what_tests_need_and_that_is_enough_to_serve(clone: Clone) -> None:
    assert clone.make("test", "ARGS=tests/unit").returncode == 0
    *installed, tested = clone.done()
    assert installed == [
        "-m venv --clear .venv",
        *pip_install("[test]", "test"),
        f"{PIP_INSTALL} triton>=3.6; sys_platform == 'linux' and platform_machine == 'x86_64'",
    ]
    assert tested.endswith(" tests/unit")
    clone.make("serve")
    assert clone.done() == ["kaon serve"]


def test_the_named_python_is_used(clone: Clone) -> None:
    named = clone.add_python("my-python")
    (clone.bin / "python3").unlink()
    assert clone.make("install", f"PYTHON={named}").returncode == 0
    assert clone.done() == ["-m venv --clear .venv", *pip_install()]


def test_locks_of_torch_itself_and_no_locks_at_all_are_for_those_who_ask(clone: Clone) -> None:
    clone.environment["KAON_TORCH_LOCK"] = "deploy/locks/torch-cuda.txt"
    clone.make("install")
    assert clone.done()[1] == pip_install("", "torch-cuda")[0]
    clone.make("clean")
    del clone.environment["KAON_TORCH_LOCK"]
    clone.environment["KAON_UNLOCKED"] = "1"
    clone.make("install")
    assert clone.done() == ["-m venv --clear .venv", f"{PIP_INSTALL} -e ."]


def test_a_lock_of_torch_does_not_replace_a_torch_that_is_there(clone: Clone) -> None:
    clone.add_torch("2.9.1+rocm7.0")
    clone.environment["KAON_TORCH_LOCK"] = "deploy/locks/torch-cuda.txt"
    clone.make("install")
    assert clone.done()[1:] == pip_install()


def test_files_that_differ_from_the_locks_are_reported_with_the_way_out(clone: Clone) -> None:
    result = clone.make("install", "PIP_FAILS=1")
    assert "pip could not install what deploy/locks names" in result.stderr
    assert "KAON_UNLOCKED=1" in result.stderr
    assert clone.done() == ["-m venv --clear .venv", pip_install()[0]]


def test_a_python_that_is_too_old_is_reported_with_its_version(clone: Clone) -> None:
    clone.environment["ANSWER"] = "0|/usr/bin/python3|3.9||"
    result = clone.make("serve")
    assert result.returncode != 0
    assert "Kaon needs Python 3.11 or newer, and /usr/bin/python3 is 3.9; install one" in result.stderr
    assert not clone.venv.exists()


def test_no_python_at_all_is_reported_with_what_was_looked_for(clone: Clone) -> None:
    (clone.bin / "python3").unlink()
    result = clone.make("install")
    assert result.returncode != 0
    assert "none of python3 python3.13 python3.12 python3.11 is there" in result.stderr


def test_a_torch_that_is_there_is_used_and_pinned_as_it_is(clone: Clone) -> None:
    folder = clone.add_torch("2.9.1+rocm7.0")
    result = clone.make("install")
    assert f"using torch 2.9.1+rocm7.0 in {folder}" in result.stderr
    assert (clone.venv / "constraints.txt").read_text() == "torch==2.9.1+rocm7.0\n"
    assert (clone.site / "present-torch.pth").read_text() == f"import site; site.addsitedir('{folder}')\n"


@pytest.mark.parametrize(
    ("hip", "devices", "is_told", "is_present"),
    [
        (None, ["kfd"], True, True),
        (None, ["kfd"], True, False),
        ("7.0", ["kfd"], False, True),
        (None, [], False, True),
        (None, ["kfd", "nvidiactl"], False, False),
    ],
)
def test_an_amd_gpu_that_torch_is_not_built_for_is_reported(
    clone: Clone, hip: str | None, devices: list[str], is_told: bool, is_present: bool
) -> None:
    folder = clone.add_torch("2.13.0" if is_present else "2.4.0")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"hip = {hip!r}\n")
    for name in devices:
        (clone.devices / name).touch()
    result = clone.make("install")
    assert result.returncode == 0
    assert ("torch is not built for ROCm: models run on the CPU" in result.stderr) == is_told
    assert ("into that Python" in result.stderr) == (is_told and is_present)
    assert ("PIP_EXTRA_INDEX_URL" in result.stderr) == (is_told and not is_present)


@pytest.mark.parametrize("version", ["2.9.1.post303", "2.9.1a0+git1", "2.10.0"])
def test_a_torch_that_pip_takes_for_2_9_or_newer_is_used(clone: Clone, version: str) -> None:
    clone.add_torch(version)
    assert f"using torch {version} in" in clone.make("install").stderr


def test_a_triton_that_came_with_torch_is_left_alone(clone: Clone) -> None:
    (clone.add_torch("2.9.1+rocm7.0") / "triton").mkdir()
    assert clone.make("test").returncode == 0
    assert "triton>=" not in "".join(clone.done())


@pytest.mark.parametrize("version", ["2.4.0", "2.9.0a0+git1c57644"])
def test_a_torch_that_is_too_old_is_left_alone_and_said_so(clone: Clone, version: str) -> None:
    clone.add_torch(version)
    result = clone.make("install")
    assert f"torch {version}" in result.stderr
    assert "older than 2.9" in result.stderr
    assert (clone.venv / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
    assert not list(clone.site.iterdir())


def test_an_environment_that_comes_without_pip_gets_it_from_the_python_s_own(clone: Clone) -> None:
    clone.environment["VENV_MODULE"] = "without pip"
    assert clone.make("install").returncode == 0
    assert "-m pip --python .venv/bin/python install --quiet pip" in clone.done()


def test_a_python_that_cannot_make_environments_is_reported_with_the_remedy(clone: Clone) -> None:
    clone.environment["VENV_MODULE"] = "missing"
    result = clone.make("install")
    assert result.returncode != 0
    assert "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" in result.stderr
    assert not (clone.venv / ".installed").exists()
