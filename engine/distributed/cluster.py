"""The hosts of one server: the key they share, the settings they must agree on, and what runs on which of them.

The cluster key, from which both ends of a connection derive their CURVE keys, comes from the environment or a file.
There is no flag for it: a process list shows flags. When a host joins, its `HostAgreement` (Kaon's version, the
settings that ranks compute by, the checkpoint) is compared with the first host's. `Cluster` says which rank or replica
runs on which host, and starts the hosts.
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
    """What two hosts prove to each other, each knowing both of them."""

    core: CurvePair
    host: CurvePair

    @classmethod
    def of(cls, key: str) -> "ClusterKeys":
        """The pairs that everybody who knows `key` makes of it (scrypt, RFC 7914; a pair by its own salt)."""
        return cls(_pair(key, b"kaon cluster: core"), _pair(key, b"kaon cluster: host"))


def read_cluster_key(file: str | None, master_addr: str) -> str:
    """The key of `file`, or else of the environment; "" where there is none and `master_addr` is a loopback address.

    Raises `ValueError`, which shows no key, where one is needed and missing, or cannot be used.
    """
    # What comes from a file, by whatever way, ends in a new line.
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
            f"master_addr is {master_addr}, which other machines reach, but there is no key to know the hosts by; set "
            f"{CLUSTER_KEY_ENV} or cluster_key_file to the same on all of them"
        )
    if len(key) < MIN_CHARACTERS:
        raise ValueError(f"{name} holds {len(key)} characters; a key must have at least {MIN_CHARACTERS}")
    return key


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
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
"""Settings that each host may have its own value of, or that only the first one looks at.

The checkpoint may lie elsewhere on each; `num_kvcache_blocks` is agreed on later."""


class HostAgreement(msgspec.Struct, frozen=True):
    """One host's version of it."""

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


class Placement(NamedTuple):
    """Where a rank or a replica runs."""

    node: int
    """Number of its host; host 0 runs rank 0, or the front end."""
    local_index: int
    """Among the ranks or replicas of its host, which share out its GPUs or its cores."""
    num_local: int
    """How many those are."""


def place_evenly(count: int, nnodes: int) -> list[Placement]:
    """By rank or replica: as many on each host, neighbours together. `nnodes` divides `count`."""
    per_node = count // nnodes
    return [Placement(*divmod(index, per_node), per_node) for index in range(count)]


class Cluster:
    """The hosts of one server, each started by `kaon serve` with a `node_rank`. `RayCluster` starts its own."""

    def __init__(self, placements: Sequence[Placement], address: str = "", keys: ClusterKeys | None = None) -> None:
        """`placements`: by rank or replica. The others are for several hosts: where they reach the first, by which
        keys.
        """
        self.placements, self.address, self.keys = placements, address, keys

    @classmethod
    def of_hosts(cls, parallel: ParallelConfig, count: int) -> "Cluster":
        """That many ranks or replicas on `nnodes` hosts. Raises `ValueError`, a sentence, for a missing key."""
        keys = ClusterKeys.of(read_cluster_key(parallel.cluster_key_file, parallel.master_addr))
        return cls(place_evenly(count, parallel.nnodes), parallel.master_addr, keys)

    def start(self, joining: str, on_failure: Callable[[int, str], object]) -> None:
        """Start the hosts other than 0, which join at `joining`. `on_failure` is given the number of a host that
        cannot, and why.
        """
        num_hosts = 1 + max(placement.node for placement in self.placements)
        _log.info("waiting for %d of %d hosts to join at %s", num_hosts - 1, num_hosts, joining)

    def close(self) -> None:
        """End the hosts that `start` has started."""
