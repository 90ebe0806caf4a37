"""`Owner`: the party that a request is accounted to, and what it may do."""

import hashlib
import ipaddress
import time
from typing import Literal, NamedTuple, Self, get_args

Scope = Literal["inference", "admin", "metrics"]
"""What a key opens: everything that runs or shows requests; calls that concern other owners; `/metrics`."""

ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))


KEYLESS_LABEL = "keyless"
"""The label of metrics of clients without a key."""


class Quotas(NamedTuple):
    """What an owner may use a minute, on average; None: as much as it likes."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


NO_QUOTAS = Quotas()


class Owner(NamedTuple):
    """The party that a request is accounted to: the holder of an API key or, where none is needed, an address."""

    party: str = "local"
    """Among whom limits and the engine's time are shared: the digest of the key, or the client's address."""
    key: str | None = None
    """Digest of the key, which separates stored responses and cached prefixes; None where no key is needed."""
    weight: float = 1.0
    """Its share of the engine's time and of other work, where owners compete."""
    key_name: str | None = None
    """The name that the key's file gives it; None for a key without one."""
    is_listed: bool = False
    """Whether the key's name is one of the few that metrics show."""
    group: str | None = None
    """Keys of one group share cached prefixes."""
    scopes: frozenset[Scope] = ALL_SCOPES
    quotas: Quotas = NO_QUOTAS
    """Those of the key itself, which take the place of the server's."""

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

    @property
    def label(self) -> str:
        """The label of its metrics: the name of a key that was given one; the others are counted together."""
        if self.key is None:
            return KEYLESS_LABEL
        return self.key_name if self.is_listed and self.key_name is not None else "other"

    @property
    def name(self) -> str:
        """For logs: the key's name, else the beginning of its digest; without a key, the address."""
        return self.key_name or (self.party if self.key is None else self.party[:12])

    @property
    def prefix_domain(self) -> str | None:
        """Whose cached prefixes the owner may find: those of its group, or of its key; None where no key is needed."""
        return self.key if self.group is None else f"group {self.group}"


ANYONE = Owner()


class AcceptedKey(NamedTuple):
    """A key that the server accepts."""

    owner: Owner
    expires: float | None = None
    """In seconds since 1970; None: never."""

    @property
    def has_expired(self) -> bool:
        """Whether the key is no longer accepted."""
        return self.expires is not None and self.expires <= time.time()


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()
