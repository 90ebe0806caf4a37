"""`install`: makes a suite's environment under `.conformance/`, once for each state of its requirement file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conformance.suites import Suite

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".conformance"


class InstallError(RuntimeError):
    """An environment cannot be made; the message is the installer's."""


def requirements(suite: Suite) -> Path:
    """The file that pins the suite's clients."""
    if suite.is_node:
        return (HERE / suite.tests[0]).with_name("package-lock.json")
    return HERE / suite.name / "package-lock.json" if suite.has_npm else _pip_requirements(suite)


def _pip_requirements(suite: Suite) -> Path:
    return HERE / "requirements" / f"{suite.name}.txt"


def python_of(suite: Suite) -> Path:
    return ENVIRONMENTS / suite.name / "bin" / "python"


def install(suite: Suite) -> None:
    """Make the environment, unless it exists as the requirement file specifies. Raises `InstallError`."""
    folder = ENVIRONMENTS / suite.name
    stamp = folder / "installed.txt"
    wanted = requirements(suite).read_text(encoding="utf-8")
    if suite.has_npm:
        wanted += _pip_requirements(suite).read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    stamp.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not suite.is_node:
        _install_python(suite, folder)
    if suite.is_node or suite.has_npm:
        _install_node(requirements(suite).parent, folder)
    stamp.write_text(wanted, encoding="utf-8")


def _install_python(suite: Suite, folder: Path) -> None:
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    _run(
        *(sys.executable, "-m", "pip", "--python", str(python_of(suite)), "install", "--quiet"),
        *("--disable-pip-version-check", "-r", str(_pip_requirements(suite))),
    )


def _install_node(source: Path, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise InstallError("npm is not installed; the suites of npm's packages need Node 20 or newer")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, folder / name)
    # `npm ci` would refuse a lock file without an optional package of another platform, which a registry may lack.
    shutil.rmtree(folder / "node_modules", ignore_errors=True)
    _run("npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PIP_NO_INPUT": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command[:6])} … failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
