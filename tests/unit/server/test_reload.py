"""Changed settings are applied, or reported to need a restart."""

import logging

import pytest
from pydantic import SecretStr

from engine.config.config import Config, ServerConfig
from server.reload import Reloader


@pytest.fixture(autouse=True)
def _log_level() -> object:
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


def test_what_may_change_is_applied_once_and_the_rest_is_named() -> None:
    new = Config(max_num_seqs=5, server_config=ServerConfig(max_queued_requests=3, port=1, log_level="error"))
    reloader = Reloader(Config(server_config=ServerConfig(api_key=(SecretStr("sk-one"),))), lambda: new)
    applied: list[ServerConfig] = []
    reloader.add(applied.append)
    found = reloader.reload()
    assert sorted(found.changed) == ["log_level", "max_queued_requests"]
    assert sorted(found.need_restart) == ["max_num_seqs", "port"]
    assert (reloader.settings.max_queued_requests, reloader.settings.port) == (3, 8000)
    assert logging.getLogger().level == logging.ERROR
    assert reloader.reload().changed == []
    assert applied == [reloader.settings]


def test_a_wrong_configuration_changes_nothing() -> None:
    def read() -> Config:
        raise ValueError("port is 0.5; it must be an integer")

    reloader = Reloader(Config(), read)
    reloader.add(lambda settings: pytest.fail("nothing has changed"))
    with pytest.raises(ValueError, match="port is"):
        reloader.reload()
    with pytest.raises(ValueError, match="has no configuration to read again"):
        Reloader(Config(), None).reload()
