"""`Reloader`: applies changed settings to the running server, after SIGHUP or by a call."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.config.config import Config
from engine.config.server import ServerConfig
from engine.config.settings import ModelList, read_models

_log = logging.getLogger(__name__)

RELOADED = (
    "log_level",
    "max_queued_requests",
    "max_queued_tokens",
    "max_requests_per_key",
    "requests_per_minute",
    "prompt_tokens_per_minute",
    "output_tokens_per_minute",
)
"""Settings that can change while the server runs. Files of API keys and certificates are read again in any case."""
_SECRET = ("api_key",)
"""Settings that are not compared: after the start they are no longer in the environment and the command line."""


class Reloaded(NamedTuple):
    """Names of the settings that a reload found changed."""

    changed: list[str]
    """Changed settings that now apply."""
    need_restart: list[str]
    """Changed settings that apply only after a restart."""


class Reloader:
    """Reads the configuration again and applies the changes. Used from the event loop's thread only."""

    def __init__(self, config: Config, read: Callable[[], Config] | None, models: ModelList | None = None) -> None:
        """`config` is the present configuration. `read` reads it again, and raises `ValueError` with a sentence if it
        is invalid. `models` are the models of the file that `config` names, if it names one."""
        self._config = config
        self._models = models
        self._read = read
        self._apply: list[Callable[[ServerConfig], object]] = [_set_log_level]
        self._more: list[Callable[[], Sequence[str]]] = []

    @property
    def settings(self) -> ServerConfig:
        """The settings that apply now."""
        return self._config.server_config

    def add(self, apply: Callable[[ServerConfig], object]) -> None:
        """Register `apply`, which is called with the settings when one of `RELOADED` has changed."""
        self._apply.append(apply)

    def also_reload(self, reload: Callable[[], Sequence[str]]) -> None:
        """Register `reload`, which is called at every reload and returns the settings whose files have changed. If it
        raises `ValueError`, no setting changes."""
        self._more.append(reload)

    def reload(self) -> Reloaded:
        """Read the configuration again and apply the settings that may change.

        Raises `ValueError` with a sentence if the configuration or the file of keys is invalid; then no setting has
        changed.
        """
        if self._read is None:
            raise ValueError("this server was not started by kaon serve, and has no configuration to read again")
        new = self._read()
        models_differ = new.server_config.models is not None and read_models(new) != self._models
        changed_files = [name for each in self._more for name in each()]
        old, differing = self._config, _differing(self._config, new)
        if models_differ and "models" not in differing:
            differing.append("models")
        changed = [name for name in differing if name in RELOADED]
        if changed:
            update = {name: getattr(new.server_config, name) for name in changed}
            settings = old.server_config.model_copy(update=update)
            self._config = old.model_copy(update={"server_config": settings})
            for apply in self._apply:
                apply(settings)
        return Reloaded([*changed, *changed_files], [name for name in differing if name not in RELOADED])

    def reload_and_log(self) -> None:
        """Reload after a signal, and log which settings have changed, or why none has."""
        try:
            reloaded = self.reload()
        except ValueError as error:
            _log.error("the settings stay as they are: %s", error)
            return
        _log.warning("the settings were read again; changed: %s", ", ".join(reloaded.changed) or "none")
        if reloaded.need_restart:
            _log.warning("a restart is needed to change %s", ", ".join(reloaded.need_restart))


def _differing(old: Config, new: Config) -> list[str]:
    """Return the names of the fields, sections included, in which two configurations differ."""
    names: list[str] = []
    for field in type(old).model_fields:
        before, after = getattr(old, field), getattr(new, field)
        if field == "server_config":
            fields = type(old.server_config).model_fields
            names += [name for name in fields if getattr(before, name) != getattr(after, name) and name not in _SECRET]
        elif before != after:
            names.append(field)
    return names


def _set_log_level(settings: ServerConfig) -> None:
    logging.getLogger().setLevel(settings.log_level.upper())
