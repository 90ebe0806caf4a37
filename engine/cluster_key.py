"""The key that the hosts of one server share, and the CURVE keys that both ends of a connection make of it.

Read by the engine core and by the hosts that join it. There is no flag for the key: a process list shows flags.
"""

import hashlib
import logging
import os
import stat
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from engine.config import CLUSTER_KEY_ENV
from engine.unreadable import why_unreadable

_log = logging.getLogger(__name__)

MIN_CHARACTERS = 16
"""Of a key: shorter ones can be guessed by whoever records a connection."""

_COST = 2**14
"""Of scrypt, at which one guess takes tens of milliseconds."""


class CurvePair(NamedTuple):
    """A Curve25519 key pair, as ZMQ writes it."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "CurvePair":
        """A pair that nobody has had before."""
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
