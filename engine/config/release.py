"""`release`: the version of Kaon, which users see and which all hosts of a server must share."""

import tomllib
from importlib import metadata
from pathlib import Path


def release() -> str:
    """Return the installed version; if Kaon runs from sources that are not installed, that of pyproject.toml."""
    try:
        return metadata.version("kaon")
    except metadata.PackageNotFoundError:
        sources = Path(__file__).parents[2]
        project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
        return str(project["version"])
