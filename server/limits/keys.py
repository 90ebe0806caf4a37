"""`ApiKeys`: the accepted API keys, kept as digests. `Owner`: the party that a request is accounted to."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from engine.config.config import ServerConfig
from engine.config.paths import why_unreadable


class Owner(NamedTuple):
    """The party that a request is accounted to: the holder of an API key or, where none is needed, an address."""

    party: str = "local"
    """Among whom limits and the engine's time are shared: the digest of the key, or the client's address."""
    key: str | None = None
    """Digest of the key, which separates stored responses and cached prefixes; None where no key is needed."""
    weight: float = 1.0
    """Its share of the engine's time and of other work, where owners compete."""

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return self.party[:12] if self.key is not None else self.party

    @classmethod
    def of_key(cls, digest: str) -> Self:
        """The holder of the key with this digest."""
        return cls(digest, digest)

    @classmethod
    def of_address(cls, host: str | None) -> Self:
        """A client without a key. IPv6 addresses of one /64 network are one party: a host may use them all."""
        if host is None:
            return cls()
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return cls(host)
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is None:
                return cls(str(ipaddress.ip_network((address, 64), strict=False)))
            address = address.ipv4_mapped
        return cls(str(address))


ANYONE = Owner()


class ApiKeys:
    """Digests of the accepted keys. Without any key, the server accepts every request."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises `ValueError`, without showing the key, for one that cannot be sent in a header."""
        self._digests = [_digest(_checked(key).encode()) for key in keys]

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """The keys of `api_key` and `api_key_file`. Raises `ValueError` with a sentence for the user."""
        keys = [key.get_secret_value() for key in config.api_key]
        if config.api_key_file is not None:
            keys += _read_keys(Path(config.api_key_file))
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes) -> Owner | None:
        """The holder of `key`; None if the key is not accepted.

        Takes equally long for a wrong and a right key.
        """
        digest = _digest(key)
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(each, digest)
        return Owner.of_key(digest.hex()) if known else None


def _read_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"api_key_file is {file}, which cannot be read: {why_unreadable(error)}") from error
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise ValueError(f"api_key_file is {file}, which holds no key; write one a line, or leave api_key_file out")
    return keys


def _checked(key: str) -> str:
    if not key or any(not "!" <= character <= "~" for character in key):
        raise ValueError("an API key is empty, or holds a space or a character beyond ASCII; no client could send it")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
