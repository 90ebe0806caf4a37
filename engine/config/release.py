"""`release`: the version of Kaon. Users see it, and all hosts of a server must run the same."""

import tomllib
from importlib import metadata
from pathlib import Path


def release() -> str:
    """The version that is installed; where sources run that are not, what they say of themselves."""
    try:
        return metadata.version("kaon")
    except metadata.PackageNotFoundError:
        sources = Path(__file__).parents[2]
        project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
        return str(project["version"])
