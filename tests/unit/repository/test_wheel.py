"""The wheel contains what serving needs and nothing else: no tools, tests, benchmarks, pages or C sources."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath

import pytest
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).parents[3]
PACKAGES = ("engine", "kaon", "kvcache", "models", "server")
DATA = {
    *(f"{package}/py.typed" for package in PACKAGES),
    "models/demo/chat_template.jinja",
    "models/demo/checkpoint/config.json",
    "models/demo/checkpoint/generation_config.json",
    "models/demo/checkpoint/model.safetensors",
    "models/demo/checkpoint/tokenizer.json",
    "models/demo/checkpoint/tokenizer_config.json",
    "models/demo/draft_head/config.json",
    "models/demo/draft_head/model.safetensors",
}
"""Every file that is not Python code: add files that serving begins to read here, and to package-data in
pyproject.toml."""

LIBRARY = f"models/ops/cpu/_library{EXTENSION_SUFFIXES[0]}"
"""The compiled operators."""


def modules() -> set[str]:
    """Return all Python files of the packages, including those in a folder without an `__init__.py`."""
    return {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def configured_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the files that setuptools would copy into the wheel, except the compiled library."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    apply_configuration(distribution, "pyproject.toml")
    # Otherwise the files depend on those in the source distribution, and in an older *.egg-info.
    assert distribution.include_package_data is False
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    prefix = PurePosixPath(build.build_lib)
    return {str(PurePosixPath(name).relative_to(prefix)) for name in build.get_outputs(include_bytecode=False)}


def test_the_wheel_holds_the_packages_and_the_demo_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    files = configured_files(monkeypatch)
    assert files == modules() | DATA
    # Its trainer and the generator of its data are in tools/.
    assert {name for name in files if name.startswith("models/demo/")} - DATA == {"models/demo/__init__.py"}
    assert {name for name in files if PurePosixPath(name).name.startswith(("test_", "conftest", "bench"))} == set()


def built(folder: Path, umask: int) -> Path:
    """Build the wheel in a copy of the checkout, and return its path."""
    checkout = folder / "checkout"
    # Without the results of an earlier build in the checkout.
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, checkout / package, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder / "wheel")]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, cwd=checkout, env=environment, umask=umask, capture_output=True, check=True)
    (wheel,) = (folder / "wheel").iterdir()
    return wheel


@pytest.mark.parametrize(("required", "is_built"), [("", True), ("1", False)])
def test_an_error_of_the_compiler_ends_the_build_where_operators_are_required(
    tmp_path: Path, required: str, is_built: bool
) -> None:
    (tmp_path / "models/ops/cpu").mkdir(parents=True)
    (tmp_path / "models/ops/cpu/broken.c").write_text("not C")
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "KAON_MUST_COMPILE": required},
        capture_output=True,
        check=False,
    )
    assert (run.returncode == 0) is is_built


@pytest.mark.parametrize(
    ("macros", "is_refused"),
    [("__GNUC__ 4\n#define __clang__ 1", True), ("__GNUC__ 10", True), ("__GNUC__ 11", False)],
)
def test_a_compiler_that_cannot_build_the_operators_for_x86_is_refused_by_name(
    tmp_path: Path, macros: str, is_refused: bool
) -> None:
    compiler = tmp_path / "other-cc"
    version = '#define __VERSION__ "Other 7.1"\n#define __x86_64__ 1\n#define __linux__ 1'
    compiler.write_text(f"#!/bin/sh\ncat << 'END'\n#define {macros}\n{version}\nEND\n")
    compiler.chmod(0o755)
    (tmp_path / "models/ops/cpu").mkdir(parents=True)
    (tmp_path / "models/ops/cpu/one.c").write_text("int one;")
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "CC": str(compiler), "KAON_MUST_COMPILE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode != 0) is is_refused
    assert (f'CC is {compiler}, "Other 7.1"; only GCC' in run.stderr and "set CC=gcc" in run.stderr) is is_refused


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("first"), 0o022)


@pytest.mark.slow  # Compiles the library.
@pytest.mark.timeout(900)
def test_a_built_wheel_holds_these_files_and_the_compiled_library(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == modules() | DATA | {LIBRARY}


@pytest.mark.slow  # Compiles the library twice.
@pytest.mark.timeout(900)
def test_a_wheel_built_elsewhere_at_another_time_has_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    again = built(tmp_path / "a" / "longer" / "path", 0o077)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        for one, other in zip(first.infolist(), second.infolist(), strict=True):
            seen = [(each.filename, each.date_time, oct(each.external_attr >> 16), each.CRC) for each in (one, other)]
            assert seen[0] == seen[1]
    assert wheel.read_bytes() == again.read_bytes()
