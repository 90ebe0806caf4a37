"""`Contestant`: what the run needs to know of Kaon and of each peer. One file a peer holds the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import Checkpoint
from benchmarks.peers.environments import InstallError


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started: in `folder`, with `environment` on top of this process's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """The command as documentation shows it: programs without their folders."""
        settings = [f"{name}={_short(value)}" for name, value in self.environment.items() if value]
        return " ".join([*settings, *(_short(argument) for argument in self.arguments)])


def _short(text: str) -> str:
    return ":".join(part.rpartition("/")[2] if part.startswith("/") else part for part in text.split(":"))


class Contestant(ABC):
    """A server, in one precision of weights."""

    name: str
    """What `--peers` calls it."""
    title: str
    precision: str
    """`bf16` or `int8`: contestants are compared within one."""
    path = "/v1/completions"
    extra: Mapping[str, Any] = {}
    """Fields that its requests need beside those that every server gets."""
    ready_seconds = 300.0

    @abstractmethod
    def install(self) -> None:
        """Make its environment, unless it is there. Raises `InstallError`."""

    @abstractmethod
    def version(self) -> str:
        """Its name and version, and what it stands on."""

    def model(self, folder: Path) -> Path:
        """What it loads of the checkpoint in `folder`."""
        return folder

    def prepare(self, folder: Path) -> None:
        """Make `model`, unless it is there. Raises `InstallError`."""
        if not self.model(folder).exists():
            raise InstallError(f"{self.name}: {self.model(folder)} is not there")

    def served_name(self, checkpoint: Checkpoint, model: Path) -> str:
        """What requests call the model."""
        return checkpoint.name

    @abstractmethod
    def command(self, checkpoint: Checkpoint, model: Path, port: int) -> Command:
        """Serves `model`, which `prepare` has made."""
