"""`make test-ops`: tests that need programs outside Python packages, or the extra `kaon[ops]`.

A missing program fails its tests; without a builder of images, the image's tests are skipped. `make test` collects
this folder without the extra, and runs none of it.
"""

import importlib.util
import shutil

import pytest

_NEED_THE_EXTRA = ["test_cluster.py", "test_manifests.py", "test_prometheus.py"]
collect_ignore = [] if importlib.util.find_spec("helm_python") else _NEED_THE_EXTRA


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The path of Debian's Prometheus, next to which is `promtool`."""
    path = shutil.which("prometheus")
    assert path is not None, "prometheus is not installed: apt-get install prometheus"
    return path
