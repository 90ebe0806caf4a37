"""`Owner`: the party that a request is accounted to, with its rights and quotas."""

import hashlib
import ipaddress
import time
from typing import Literal, NamedTuple, Self, get_args

Scope = Literal["inference", "admin", "metrics"]
"""The paths that a key opens: `inference` all that run or show requests, `admin` those that concern other owners,
`metrics` `/metrics`."""

ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))

_MAX_HOST = 64
"""Most characters of a host that is no address: whatever a proxy on this machine reports as its client."""

KEYLESS_LABEL = "keyless"
"""Label in metrics of clients without a key."""


class Quotas(NamedTuple):
    """Bounds of an owner's average use per minute; None means no bound."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


NO_QUOTAS = Quotas()


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is, as IPv4 if it is one mapped to IPv6; None if it is none.

    The zone of an IPv6 address (`fe80::1%eth0`) is ignored: it names an interface of this machine.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return address.ipv4_mapped or ipaddress.IPv6Address(int(address))


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the IP address: 127.0.0.0/8, its form mapped to IPv6, and ::1."""
    ip = address_of(address)
    return ip is not None and ip.is_loopback


class Owner(NamedTuple):
    """The party that a request is accounted to: the holder of an API key or, where keys are not needed, an address."""

    party: str = "local"
    """Digest of the key, or the client's address. Limits and the engine's time are shared among parties."""
    key: str | None = None
    """Digest of the key, which isolates stored responses and cached prefixes; None where keys are not needed."""
    weight: float = 1.0
    """Relative share of the engine's time and of other work when owners compete."""
    key_name: str | None = None
    """Name of the key in its file; None for a key without a name."""
    is_listed: bool = False
    """Whether metrics show the key's name."""
    group: str | None = None
    """Keys of one group share cached prefixes."""
    scopes: frozenset[Scope] = ALL_SCOPES
    quotas: Quotas = NO_QUOTAS
    """Quotas of the key, which override the server's."""

    @classmethod
    def of_key(cls, digest: str) -> Self:
        """Return the owner for a key without a record, from its digest."""
        return cls(digest, digest)

    @classmethod
    def of_address(cls, host: str | None) -> Self:
        """Return the owner for a client without a key. IPv6 addresses of one /64 network, which one host may use, are
        one party."""
        if host is None:
            return cls()
        address = address_of(host)
        if address is None:
            return cls(host[:_MAX_HOST])
        if isinstance(address, ipaddress.IPv6Address):
            return cls(str(ipaddress.ip_network((address, 64), strict=False)))
        return cls(str(address))

    @property
    def label(self) -> str:
        """Label in metrics: the name of a listed key; the others share a label."""
        if self.key is None:
            return KEYLESS_LABEL
        return self.key_name if self.is_listed and self.key_name is not None else "other"

    @property
    def name(self) -> str:
        """Name in logs: the key's name, else the beginning of its digest; without a key, the address."""
        return self.key_name or (self.party if self.key is None else self.party[:12])

    @property
    def namespace(self) -> str:
        """The owner of its stored files and batches: its key; "" where keys are not needed, since all share them."""
        return self.key or ""

    @property
    def prefix_domain(self) -> str | None:
        """The group or key whose cached prefixes the owner may use; None where keys are not needed."""
        return self.key if self.group is None else f"group {self.group}"


ANYONE = Owner()


class AcceptedKey(NamedTuple):
    """The owner and the rights of an accepted key."""

    owner: Owner
    expires: float | None = None
    """Expiry in seconds since 1970; None means never."""

    @property
    def has_expired(self) -> bool:
        """Whether the key is no longer accepted."""
        return self.expires is not None and self.expires <= time.time()


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()
