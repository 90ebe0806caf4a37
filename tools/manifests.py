"""`python -m tools.manifests [--check]`: writes deploy/kubernetes/kaon.yaml, the chart rendered with its own values.

It also writes the chart's copy of the alert rules.

Needs the extra `kaon[ops]`, whose helm-python-sdk is Helm as a library: `helm template kaon deploy/helm/kaon` renders
the same. So the base for kustomize and the chart are one source.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.written import write_or_compare

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "kaon"
BASE = ROOT / "deploy" / "kubernetes" / "kaon.yaml"
PROMETHEUS = ROOT / "deploy" / "prometheus" / "rules.yaml"
RULES = CHART / "rules.yaml"
"""A chart reads no files outside of its own folder."""
_RULES_HEADER = "# Written by `make rendered`: a copy of deploy/prometheus/rules.yaml.\n"

_HEADER = """\
# Written by `make rendered` from deploy/helm/kaon with its own values: change those, or make an overlay of this folder
# (docs/deploy/kubernetes.md). It takes an image built from the Dockerfile, and API keys (several with commas between
# them), without which no pod starts:
#   kubectl create secret generic kaon-api-keys --from-literal=keys="$(openssl rand -hex 32)"
#   kubectl apply -k deploy/kubernetes
"""


def rendered(values: Mapping[str, Any] | None = None, name: str = "kaon") -> str:
    """The objects of a release, as one YAML text. Raises the library's `HelmError` for values that do not fit."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        given = dict(values or {})
        chart.validate_schema(given)
        templates: dict[str, str] = chart.render(given, name=name, namespace="default")
    texts = [text for path, text in sorted(templates.items(), reverse=True) if path.endswith(".yaml")]
    documents = [part.strip("\n") for text in texts for part in re.split(r"^---$", text, flags=re.M) if part.strip()]
    return "---\n".join(re.sub(r"[ \t]+$", "", document, flags=re.M) + "\n" for document in documents)


def main(arguments: Sequence[str]) -> int:
    """Write or check the files. Returns the exit code."""
    texts = {RULES: _RULES_HEADER + PROMETHEUS.read_text()}
    if list(arguments) != ["--check"]:
        write_or_compare(texts, [], "")  # The chart renders the files in its folder.
    return write_or_compare({**texts, BASE: _HEADER + rendered()}, arguments, "python -m tools.manifests")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
