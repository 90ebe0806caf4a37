"""`make test-ops`: what needs programs that are no Python packages. A program that is missing fails its tests."""

import shutil

import pytest


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The path of Debian's Prometheus, next to which is `promtool`."""
    path = shutil.which("prometheus")
    assert path is not None, "prometheus is not installed: apt-get install prometheus"
    return path
