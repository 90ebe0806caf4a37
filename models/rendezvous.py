"""`Rendezvous`: where the ranks of a process group find each other, and the network interface that leads there."""

import ctypes
import fcntl
import socket
import struct
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

_LOOPBACK = "lo"
_SIOCGIFCONF = 0x8912
_REQUEST_BYTES = 40
"""Of a `struct ifreq`: 16 of a name, then an address."""
_ANY_PORT = 9
"""No packet is sent there: the system only says which way it would go."""


class Rendezvous:
    """A file of one host, or a TCP store that rank 0 keeps."""

    def __init__(self, address: str, timeout: float, listener: int | None = None) -> None:
        """`address` is `file://` a path that no other group uses, or `tcp://` a host and a port.

        `timeout`: seconds to meet, and of each collective. `listener` is on rank 0 the descriptor of the socket that
        listens at a TCP address, so that it listens there only; the store takes it over.
        """
        self._address = urlsplit(address)
        self._listener = listener
        self.timeout = timedelta(seconds=timeout)

    @property
    def is_local(self) -> bool:
        """Whether all ranks are on this host."""
        return self._address.scheme == "file"

    def beside(self, name: str) -> Path:
        """A path that no other group uses, of ranks on one host."""
        assert self.is_local
        return Path(f"{self._address.path}.{name}")

    def interface(self) -> str:
        """Name of the interface by which this host reaches the others. Raises `RuntimeError` where there is none."""
        return _LOOPBACK if self.is_local else interface_to(self._address.hostname or "")

    def store(self, rank: int, size: int) -> Store:
        """The store, once all ranks have come to it. Raises `RuntimeError` where one does not in time."""
        if self.is_local:
            return FileStore(self._address.path, size)
        return TCPStore(
            self._address.hostname or "",
            self._address.port or 0,
            size,
            is_master=rank == 0,
            timeout=self.timeout,
            master_listen_fd=self._listener,
        )


def interface_to(host: str) -> str:
    """Name of the interface that packets to `host` leave by. Raises `RuntimeError` where it cannot be told."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise RuntimeError(f"this host cannot reach {host}: {error.strerror}") from error
    if ip_address(own).is_loopback:
        return _LOOPBACK
    name = _interfaces_v6().get(own) if family == socket.AF_INET6 else _interfaces_v4().get(own)
    if name is None:
        raise RuntimeError(f"this host reaches {host} from {own}, but has no interface of that address")
    return name


def _interfaces_v4() -> dict[str, str]:
    """Name of the interface by address."""
    room = 256
    buffer = bytearray(room * _REQUEST_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        told = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(buffer), address))
    used = struct.unpack("iP", told)[0]
    found = {}
    for begin in range(0, used, _REQUEST_BYTES):
        name = bytes(buffer[begin : begin + 16]).partition(b"\0")[0].decode()
        # An alias such as eth0:1 is a label of its interface.
        found[socket.inet_ntoa(bytes(buffer[begin + 20 : begin + 24]))] = name.partition(":")[0]
    return found


def _interfaces_v6() -> dict[str, str]:
    """As above."""
    lines = Path("/proc/net/if_inet6").read_text().splitlines()
    fields = [line.split() for line in lines]
    return {str(ip_address(bytes.fromhex(words[0]))): words[5] for words in fields}
