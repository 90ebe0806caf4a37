"""Virtual environments of the peers, under `.peers/`, each made once for each state of what it is asked to hold."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
CONSTRAINTS = ("torch==2.13.0",)
"""Kaon's own torch. Where the registry's is built for GPUs, name an index of CPU builds to pip, or peers take
gigabytes."""


class InstallError(RuntimeError):
    """A peer cannot be installed; the message is the installer's."""


def python_of(name: str) -> Path:
    return PEERS / name / "bin" / "python"


def install(name: str, requirements: Sequence[str], remove: Sequence[str] = ()) -> bool:
    """Make the environment `name` of `requirements`, less the packages in `remove`; whether it had to be made."""
    folder = PEERS / name
    stamp = folder / "installed.txt"
    wanted = "\n".join([*CONSTRAINTS, *requirements, *(f"without {package}" for package in remove)]) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(CONSTRAINTS) + "\n", encoding="utf-8")
    run(*pip(name), "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints), *requirements)
    if remove:
        run(*pip(name), "uninstall", "--quiet", "--yes", *remove)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def pip(name: str) -> tuple[str, ...]:
    """The command for this process's pip, working on the environment `name`."""
    return sys.executable, "-m", "pip", "--python", str(python_of(name))


def versions(name: str, *packages: str) -> str:
    """`package version` of each, as the environment `name` has it."""
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps([version(name) for name in sys.argv[1:]]))"
    )
    found = json.loads(subprocess.check_output([str(python_of(name)), "-c", script, *packages], text=True))
    return ", ".join(f"{package} {version}" for package, version in zip(packages, found, strict=True))


def run(*command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
    """Run `command` to its end. Raises `InstallError` with what it wrote."""
    settings = {**os.environ, "PIP_NO_INPUT": "1", **(environment or {})}
    done = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
