"""The hosts of one server: their common key, the settings that must be equal, and the position of ranks and replicas.

Both ends of a connection derive their CURVE keys from the cluster key, which comes from the environment or a file.
There is no flag for it, because a process list shows flags. When a host joins, its `HostAgreement` (Kaon's version,
settings that affect computation, the checkpoint) is compared with the first host's. `Cluster` places ranks or replicas
on hosts, and starts the hosts.
"""

import hashlib
import logging
import os
import stat
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from engine.config.config import CLUSTER_KEY_ENV, Config, ParallelConfig
from engine.config.paths import why_unreadable
from engine.config.release import release

_log = logging.getLogger(__name__)

MIN_CHARACTERS = 16
"""Fewest characters of a key: a shorter one can be guessed from a recorded connection."""

_COST = 2**14
"""Cost parameter of scrypt: one guess takes tens of milliseconds."""


class CurvePair(NamedTuple):
    """A Curve25519 key pair, as ZMQ writes it."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "CurvePair":
        """A new random pair."""
        return cls(*zmq.curve_keypair())


class ClusterKeys(NamedTuple):
    """The key pairs of both ends of a connection. Every host derives both from the cluster key."""

    core: CurvePair
    host: CurvePair

    @classmethod
    def of(cls, key: str) -> "ClusterKeys":
        """Derive the pairs from `key` by scrypt (RFC 7914), each with its own salt."""
        return cls(_pair(key, b"kaon cluster: core"), _pair(key, b"kaon cluster: host"))


def read_cluster_key(file: str | None, master_addr: str) -> str:
    """Read the key from `file` or else the environment; "" if there is none and `master_addr` is a loopback address.

    Raises `ValueError`, which does not show the key, if a needed key is missing or unusable.
    """
    # The content of a file ends with a line break, even if it was passed through a variable.
    key, name = os.environ.get(CLUSTER_KEY_ENV, "").strip(), CLUSTER_KEY_ENV
    if file is not None:
        name = "cluster_key_file"
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
            if Path(file).stat().st_mode & stat.S_IROTH:
                _log.warning("cluster_key_file is %s, which every user of this machine can read; chmod 600 it", file)
        except (OSError, ValueError) as error:
            raise ValueError(f"cluster_key_file is {file}, which cannot be read: {why_unreadable(error)}") from error
    elif not key:
        if is_loopback(master_addr):
            return ""
        raise ValueError(
            f"master_addr is {master_addr}, which other machines can reach, but no key authenticates the hosts; set "
            f"{CLUSTER_KEY_ENV} or cluster_key_file to the same on all of them"
        )
    if len(key) < MIN_CHARACTERS:
        raise ValueError(f"{name} holds {len(key)} characters; a key must have at least {MIN_CHARACTERS}")
    return key


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _pair(key: str, salt: bytes) -> CurvePair:
    secret = z85.encode(hashlib.scrypt(key.encode(), salt=salt, n=_COST, r=8, p=1, dklen=32))
    return CurvePair(zmq.curve_public(secret), secret)


_OF_ONE_HOST = {
    "model",
    "server_config",
    "node_rank",
    "cluster_interface",
    "cluster_key_file",
    "generation_config",
    "cpu_threads",
    "num_kvcache_blocks",
    "max_core_restarts",
    "core_restart_window",
    "stall_timeout",
    "rank_start_timeout",
}
"""Settings that may differ between hosts, or that only the first host uses.

The checkpoint's path may differ too; `num_kvcache_blocks` is agreed on later."""


class HostAgreement(msgspec.Struct, frozen=True):
    """The version, settings and checkpoint of one host, which must be equal on all hosts."""

    version: str
    settings: dict[str, str]
    checkpoint: str
    """Digest of the checkpoint's config.json."""

    @classmethod
    def of(cls, config: Config, path: Path) -> "HostAgreement":
        """The agreement of this host, whose checkpoint is at `path`. Raises `OSError` where it cannot be read."""
        digest = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
        return cls(release(), _leaves(config.model_dump(mode="json")), digest)

    def difference(self, other: "HostAgreement") -> str | None:
        """Return the first difference of `other`, as the end of a sentence about that host; None if there is none."""
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
    """Return every setting as text, by its flat name."""
    leaves: dict[str, str] = {}
    for name, value in section.items():
        if name in _OF_ONE_HOST:
            continue
        if isinstance(value, dict):
            leaves |= _leaves(value)
        else:
            leaves[name] = str(value)
    return leaves


class HostPosition(NamedTuple):
    """The host of a rank or a replica, and its index there."""

    node: int
    """Number of its host; host 0 runs rank 0, or the front end."""
    local_index: int
    """Index among the ranks or replicas of its host, which divide its GPUs or cores."""
    num_local: int
    """Number of ranks or replicas on its host."""


def spread_evenly(count: int, nnodes: int) -> list[HostPosition]:
    """Place an equal number of ranks or replicas on each host, consecutive ones together. `nnodes` divides `count`."""
    per_node = count // nnodes
    return [HostPosition(*divmod(index, per_node), per_node) for index in range(count)]


class Cluster:
    """The hosts of one server, each started by `kaon serve` with a `node_rank`. `RayCluster` starts its own."""

    def __init__(self, positions: Sequence[HostPosition], address: str = "", keys: ClusterKeys | None = None) -> None:
        """`positions` are by rank or replica. With several hosts, `address` is that of the first one, and `keys` are
        those of its connections."""
        self.positions, self.address, self.keys = positions, address, keys

    @classmethod
    def of_hosts(cls, parallel: ParallelConfig, count: int) -> "Cluster":
        """Place `count` ranks or replicas on `nnodes` hosts. Raises `ValueError` with a sentence if the key is
        missing."""
        keys = ClusterKeys.of(read_cluster_key(parallel.cluster_key_file, parallel.master_addr))
        return cls(spread_evenly(count, parallel.nnodes), parallel.master_addr, keys)

    def start(self, joining: str, on_failure: Callable[[int, str], object]) -> None:
        """Start the hosts other than 0, which join at `joining`. `on_failure` is called with the number of a host that
        cannot join, and the reason."""
        num_hosts = 1 + max(position.node for position in self.positions)
        _log.info("waiting for %d of %d hosts to join at %s", num_hosts - 1, num_hosts, joining)

    def close(self) -> None:
        """End the hosts that `start` started."""
