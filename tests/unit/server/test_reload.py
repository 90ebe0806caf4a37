"""Changed settings are applied, or reported to need a restart."""

import logging
from pathlib import Path

import pytest
from pydantic import SecretStr

from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.config.settings import read_models
from server.limits.keys import ApiKeys
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


@pytest.mark.parametrize("models", ["models: [{model: a}]", "models: [{model: a}, {model: b}]"])
def test_a_changed_file_of_models_needs_a_restart_and_an_equal_one_does_not(models: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(models)
    config = Config(server_config=ServerConfig(models=str(file)))
    reloader = Reloader(config, lambda: config, read_models(config))
    assert reloader.reload() == ([], [])
    file.write_text("models: [{model: a, max_num_seqs: 3}]")
    assert reloader.reload() == ([], ["models"])
    file.write_text("models: []")
    with pytest.raises(ValueError, match="lists no models"):
        reloader.reload()


def test_a_changed_file_of_keys_is_named_as_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    config = Config(server_config=ServerConfig(api_key_file=str(file)))
    reloader = Reloader(config, lambda: config)
    reloader.also_reload(ApiKeys.of(config.server_config).reload)
    assert reloader.reload() == ([], [])
    file.write_text("sk-one\nsk-two\n")
    assert reloader.reload() == (["api_key_file"], [])
    assert reloader.reload() == ([], [])
