"""`PageGuard`: keeps web pages of other sites from using a server that asks for no API key.

A browser sends what a page asks for to any address that it reaches, this machine's included, and only hides the answer
from the page. Without keys that is enough to make the server work. A page whose own name resolves to this machine (DNS
rebinding) reads the answers too.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from engine.config.server import ServerConfig
from server.errors import ForeignPage

_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing here. A page cannot read their answers."""

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Ends of names that no public name server answers for."""

_MAX_SHOWN = 80


class PageGuard:
    """Checks the headers that browsers set, and pages cannot change."""

    def __init__(self, config: ServerConfig) -> None:
        self._is_any = "*" in config.allowed_origins
        self._allowed = frozenset(config.allowed_origins)
        self._allowed_hosts = {urlsplit(origin).hostname for origin in config.allowed_origins}
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
                f"Host is {host[:_MAX_SHOWN]!r}, which any web page could resolve to this machine; a server without "
                "API keys answers to localhost and to addresses: use one of them, name the page's origin in "
                "--allowed-origins, set an API key, or start it with --insecure-no-auth"
            )
        if origin and method not in _HARMLESS and site != "same-origin" and not self._may_send(origin, host):
            raise ForeignPage(
                f"Origin is {origin[:_MAX_SHOWN]!r}, a web page that this server does not know; without API keys only "
                "its own pages and those of localhost may send requests: name the origin in --allowed-origins, or set "
                "an API key"
            )

    def _is_own(self, name: str) -> bool:
        """Whether no stranger can make a name resolve to this machine, or the operator has named it."""
        return "." not in name or _is_address(name) or name.endswith(_LOCAL_SUFFIXES) or name in self._allowed_hosts

    def _may_send(self, origin: str, host: str) -> bool:
        scheme, _, rest = origin.partition("://")
        if origin in self._allowed or rest == host:
            return True
        if scheme not in ("http", "https"):
            return origin != "null"  # Extensions and applications, which the user installed.
        name = _host_name(rest)
        return name == "localhost" or name.endswith(".localhost") or (_is_address(name) and _is_loopback(name))


def _host_name(host: str) -> str:
    """Return the name or address of a `Host`, without port, brackets and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
