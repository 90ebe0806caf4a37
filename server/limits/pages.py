"""`PageGuard`: keeps web pages of other sites from using a server that asks for no API key.

A browser sends what a page asks for to any address that it reaches, this machine's included, and only hides the answer
from the page. Without keys that is enough to make the server work. A page whose own name resolves to this machine (DNS
rebinding) reads the answers too.
"""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from engine.config.server import ServerConfig
from server.errors import ForeignPage
from server.limits.owners import address_of

_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing here. A page cannot read their answers."""

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Ends of names that no name server of the internet answers for."""

_HOST = re.compile(r"[a-z0-9._-]+(:[0-9]+)?")
_MAX_SHOWN = 80


class PageGuard:
    """Checks the headers that browsers set, and pages cannot change."""

    def __init__(self, config: ServerConfig) -> None:
        self._is_any = "*" in config.allowed_origins
        self._allowed = frozenset(config.allowed_origins)
        self._allowed_hosts = {
            urlsplit(origin).hostname
            for origin in config.allowed_origins
            if origin.startswith(("http://", "https://"))
        }
        # Without keys, without certificates and without the flag, a server listens on loopback only.
        self._checks_hosts = not config.insecure_no_auth and config.ssl_ca_certs is None

    def check(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise `ForeignPage` for a request of a page that `allowed_origins` does not name. Programs other than
        browsers send no `Origin`, and the name or address of this machine as `Host`."""
        if self._is_any:
            return
        origin = host = site = ""
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1")
        if self._checks_hosts and not self._is_own(_host_name(host)):
            raise ForeignPage(
                f"Host is {host[:_MAX_SHOWN]!r}, a name that any web page could make resolve to this machine; a "
                "server without API keys answers to localhost and to addresses. Use one of them, or set an API key"
                + _remedy("https", _host_name(host), "a proxy's name for this server, or your own")
            )
        is_foreign = bool(origin) and site != "same-origin" and not self._may_send(origin, host)
        if is_foreign and method not in _HARMLESS:
            scheme, _, rest = origin.partition("://")
            raise ForeignPage(
                f"Origin is {origin[:_MAX_SHOWN]!r}, a web page that this server does not know; without API keys "
                "only its own pages and those of localhost may send requests. Set an API key"
                + _remedy(scheme, rest, "a page of yours")
            )

    def _is_own(self, name: str) -> bool:
        """Whether no page of the internet can make a name resolve to this machine, or the operator has named it.

        The resolver of a hostile local network can, for names without a dot and those of `_LOCAL_SUFFIXES`."""
        is_local = "." not in name or name.endswith(_LOCAL_SUFFIXES)
        return is_local or address_of(name) is not None or name in self._allowed_hosts

    def _may_send(self, origin: str, host: str) -> bool:
        scheme, _, rest = origin.partition("://")
        if origin in self._allowed:
            return True
        if rest == host and self._is_own(_host_name(host)):
            return True  # With another name, the page may be of a site that made its name resolve to this machine.
        if scheme not in ("http", "https"):
            return origin != "null"  # Extensions and applications, which the user installed.
        name = _host_name(rest)
        return name == "localhost" or name.endswith(".localhost") or _is_this_machine(name)


def _remedy(scheme: str, host: str, what: str) -> str:
    """Return the end of a sentence, with the flag to set if `host` can be in one."""
    if len(host) > _MAX_SHOWN or not _HOST.fullmatch(host) or scheme not in ("http", "https"):
        return ", or name the page's origin in --allowed-origins"
    return f"; if it is {what}, start the server with --allowed-origins {scheme}://{host}"


def _host_name(host: str) -> str:
    """Return the name or address of a `Host`, without port, brackets and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_this_machine(name: str) -> bool:
    """Whether a name is an address of loopback, or 0.0.0.0 or ::, which browsers connect to this machine."""
    address = address_of(name)
    return address is not None and (address.is_loopback or address.is_unspecified)
