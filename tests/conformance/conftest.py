"""Where the server is, for the suites' tests. Runs in each client's own environment: imports nothing but pytest."""

import os

import pytest


@pytest.fixture(scope="session")
def base_url() -> str:
    """The clients' base URL, which ends in /v1."""
    return os.environ["OPENAI_BASE_URL"]


@pytest.fixture(scope="session")
def api_key() -> str:
    return os.environ["OPENAI_API_KEY"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["KAON_MODEL"]
