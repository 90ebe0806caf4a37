"""What the hosts of one server must have in common: Kaon's version, the settings that ranks compute by, the model.

Compared by the engine core when a host joins.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from engine.config import Config
from engine.release import release

_OF_ONE_HOST = {
    "model",
    "server_config",
    "node_rank",
    "cluster_key_file",
    "generation_config",
    "cpu_threads",
    "num_kvcache_blocks",
    "max_core_restarts",
    "core_restart_window",
    "stall_timeout",
    "rank_start_timeout",
}
"""Settings that each host may have its own value of, or that only the first one looks at.

The checkpoint may lie elsewhere on each; `num_kvcache_blocks` is agreed on later."""


class CommonGround(msgspec.Struct, frozen=True):
    """One host's version of it."""

    version: str
    settings: dict[str, str]
    checkpoint: str
    """Digest of the checkpoint's config.json."""

    @classmethod
    def of(cls, config: Config, path: Path) -> "CommonGround":
        """That of this host, whose checkpoint is at `path`. Raises `OSError` where it cannot be read."""
        digest = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
        return cls(release(), _leaves(config.model_dump(mode="json")), digest)

    def difference(self, other: "CommonGround") -> str | None:
        """What first differs on `other`, as the end of a sentence about that host; None where nothing does."""
        if other.version != self.version:
            return f"runs Kaon {other.version}, and the first host {self.version}; install the same on both"
        for name in sorted(self.settings.keys() | other.settings.keys()):
            theirs, ours = other.settings.get(name, "missing"), self.settings.get(name, "missing")
            if theirs != ours:
                return f"has {name} {theirs}, and the first host {ours}; start both with the same settings"
        if other.checkpoint != self.checkpoint:
            return "has another model than the first host; the config.json of both must be the same file"
        return None


def _leaves(section: dict[str, Any]) -> dict[str, str]:
    """Every setting as text, by its flat name."""
    leaves: dict[str, str] = {}
    for name, value in section.items():
        if name in _OF_ONE_HOST:
            continue
        if isinstance(value, dict):
            leaves |= _leaves(value)
        else:
            leaves[name] = str(value)
    return leaves
