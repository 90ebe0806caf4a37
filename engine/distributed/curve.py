"""TCP sockets between hosts, whose ends authenticate each other by CURVE keys, and the addresses that they need."""

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
"""After which a peer that answers no heartbeat counts as gone: its host has lost power, or the network between."""
_RECONNECT_SECONDS = (0.1, 1.0)
AGAIN_SECONDS = 0.25
"""Between two attempts to resolve a name, or to reach a port."""
CONNECT_SECONDS = 3.0
"""For a connection to be accepted: the system itself would retry at ever longer intervals."""
_MAX_HEARD_BYTES = 64 << 20
"""Largest message that a listening socket accepts: a stranger may claim any length."""


class CurveAuthenticator:
    """Admits clients by their public keys, on every listening socket of a context."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        # It brings asyncio, which cores of one host need not import.
        from zmq.auth.thread import ThreadAuthenticator

        self._keys: set[bytes] = set()
        self._authenticator = ThreadAuthenticator(context, log=_log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def allow(self, public: bytes) -> None:
        """Admit clients of that public key from now on."""
        self._keys.add(public)

    def revoke(self, public: bytes) -> None:
        """Admit clients of that key no longer; nothing happens if they were not admitted."""
        self._keys.discard(public)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether clients of that public key are admitted; called by the authenticator's thread."""
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
    """A socket that listens at `tcp://` an address. Raises `OSError`, a sentence, when it cannot listen there.

    Who sends it more than `longest` bytes in one message is cut off; -1 for any number.
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
    """The address of this machine that a name stands for. Raises `ValueError`, a sentence, where it has none.

    Of several it is the first that is one of this machine's; where none is, who listens there will say so. `patience`:
    seconds for a name that has no address yet, as that of a pod which has just been made.
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
    """Log once that a name has no address yet."""
    _warn(f"master_addr is {host}, which has no address yet: {error.strerror}")


def _is_own(address: str) -> bool:
    family = sockets.AF_INET6 if ":" in address else sockets.AF_INET
    try:
        sockets.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


def endpoint(host: str, port: int) -> str:
    """A host and a port as ZMQ and torch write them."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def why_not(address: str, number: int, words: str) -> str:
    """Why nothing can listen at an address, as a sentence."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if number == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what listens there or choose another master_port"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"master_addr is {host}, which is no address of this machine; on the first host it must be one"
    return f"port {port} on {host} cannot be opened: {words}"


def curve_client(
    context: "zmq.Context[zmq.Socket[bytes]]", own: CurvePair, server_public: bytes, name: bytes
) -> "zmq.Socket[bytes]":
    """A socket to be connected to a listening one. It connects again whenever the connection breaks.

    `name` is how the other side addresses it.
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
    # Messages that cannot be sent any more must not delay the end of the process.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1e3 * _HEARTBEAT_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1e3 * _SILENCE_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TTL, round(1e3 * _SILENCE_SECONDS))
