"""TCP sockets between hosts, which authenticate each other by CURVE keys, and resolution of their addresses."""

import errno
import functools
import logging
import socket as sockets
import time
from ipaddress import ip_address

import zmq

from engine.distributed.cluster import CurvePair, is_loopback

_log = logging.getLogger(__name__)

_DOMAIN = "kaon"
_HEARTBEAT_SECONDS = 2.0
_SILENCE_SECONDS = 10.0
"""Seconds after which a peer that answers no heartbeat counts as gone: its host or the network has failed."""
_RECONNECT_SECONDS = (0.1, 1.0)
AGAIN_SECONDS = 0.25
"""Seconds between two attempts to resolve a name, or to connect to a port."""
CONNECT_SECONDS = 3.0
"""Time limit for connecting: the system itself would retry at increasing intervals."""
_MAX_HEARD_BYTES = 64 << 20
"""Largest message in bytes that a listening socket accepts: any peer may claim any length."""


class CurveAuthenticator:
    """Admits clients by their public keys, on every listening socket of a context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        # Imports asyncio, which cores on a single host do not need.
        from zmq.auth.thread import ThreadAuthenticator

        self._keys: set[bytes] = set()
        self._authenticator = ThreadAuthenticator(context, log=_log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def allow(self, public: bytes) -> None:
        """Admit clients with this public key from now on."""
        self._keys.add(public)

    def revoke(self, public: bytes) -> None:
        """Stop admitting clients with this key. No effect if they were not admitted."""
        self._keys.discard(public)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether clients with this public key are admitted. Called by the authenticator's thread."""
        return key in self._keys

    def close(self) -> None:
        """End its thread."""
        self._authenticator.stop()


def bind_curve(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    address: str,
    keys: CurvePair,
    *,
    longest: int = _MAX_HEARD_BYTES,
) -> "zmq.Socket[bytes]":
    """Create a socket that listens at `tcp://` + `address`. Raises `OSError` with a sentence if that is impossible.

    A peer that sends more than `longest` bytes in one message is disconnected; -1 means no limit.
    """
    socket = context.socket(kind)
    _keep_alive(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(why_not(address, error.errno or 0, error.strerror)) from error
    return socket


def resolve(host: str, patience: float = 0.0) -> str:
    """Resolve a name to an address of this machine. Raises `ValueError` with a sentence if it has no address.

    Of several addresses, the first one of this machine is returned. If none is, listening fails later with an error.
    `patience` is the time in seconds to wait for a name without an address, such as that of a new pod.
    """
    deadline = time.monotonic() + patience
    found = None
    while found is None:
        try:
            found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
        except sockets.gaierror as error:
            if time.monotonic() >= deadline:
                raise ValueError(f"master_addr is {host}, which has no address: {error.strerror}") from error
            warn_no_address(host, error)
            time.sleep(AGAIN_SECONDS)
    addresses = [str(address[0]) for *_, address in found]
    if not is_loopback(host):
        # Many systems map their own name to 127.0.1.1.
        looped = addresses[0]
        addresses = [address for address in addresses if not ip_address(address.partition("%")[0]).is_loopback]
        if not addresses:
            raise ValueError(
                f"master_addr is {host}, which on this machine is {looped}, where no other machine reaches it; "
                "give its address in the network"
            )
    return next(filter(_is_own, addresses), addresses[0])


@functools.cache
def _warn(sentence: str) -> None:
    _log.warning("%s", sentence)


def warn_no_address(host: str, error: sockets.gaierror) -> None:
    """Log, once per name, that it has no address yet."""
    _warn(f"master_addr is {host}, which has no address yet: {error.strerror}")


def _is_own(address: str) -> bool:
    family = sockets.AF_INET6 if ":" in address else sockets.AF_INET
    try:
        sockets.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


def endpoint(host: str, port: int) -> str:
    """Format host and port as ZMQ and torch do."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def why_not(address: str, number: int, words: str) -> str:
    """Return a sentence that says why a socket cannot listen at an address."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what listens there or choose another master_port"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"master_addr is {host}, which is not an address of this machine; on the first host it must be one of its "
            "addresses"
        )
    return f"port {port} on {host} cannot be opened: {words}"


def curve_client(
    context: "zmq.Context[zmq.Socket[bytes]]", own: CurvePair, server_public: bytes, name: bytes
) -> "zmq.Socket[bytes]":
    """Create a socket to connect to a listening one. It reconnects whenever the connection breaks.

    The other side addresses it by `name`.
    """
    socket = context.socket(zmq.DEALER)
    _keep_alive(socket)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    first, longest = _RECONNECT_SECONDS
    socket.setsockopt(zmq.RECONNECT_IVL, round(1e3 * first))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, round(1e3 * longest))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(1e3 * CONNECT_SECONDS))
    return socket


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    socket.set_hwm(0)
    # Unsent messages must not delay the end of the process.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1e3 * _HEARTBEAT_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1e3 * _SILENCE_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TTL, round(1e3 * _SILENCE_SECONDS))
