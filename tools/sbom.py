"""`python -m tools.sbom [--check]`: writes deploy/sbom.cdx.json, the contents of an image, as CycloneDX 1.6.

These are the packages of deploy/locks that images install, with their files' hashes, and torch at the version of
constraints.txt.
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from tools.locks import FOLDER, ROOT, pins
from tools.written import write_or_compare

FILE = ROOT / "deploy" / "sbom.cdx.json"
LOCKS = ("kaon", "jwt", "otel")
"""The locks that deploy/container.sh installs."""
_REF = "pkg:pypi/kaon@{version}"


def document() -> dict[str, Any]:
    """The bill of materials. It has no time and no serial number: equal locks give equal bytes."""
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert version is not None
    assert torch is not None
    packages = {("torch", torch[1])}.union(*(pins((FOLDER / f"{name}.txt").read_text()) for name in LOCKS))
    components = [_component(name, pin) for name, pin in packages]
    components.sort(key=lambda component: component["bom-ref"])
    own = _REF.format(version=version[1])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "kaon",
                "version": version[1],
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _component(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main(arguments: Sequence[str]) -> int:
    """Write or check the file. Returns the exit code."""
    return write_or_compare({FILE: json.dumps(document(), indent=1) + "\n"}, arguments, "python -m tools.sbom")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
