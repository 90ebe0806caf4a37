"""`ServiceManager`: reports the server's state to systemd by sd_notify's protocol, if systemd started the server.

It sends datagrams of lines NAME=VALUE to the socket that `NOTIFY_SOCKET` names: `READY=1` once requests are served,
`STOPPING=1` at the first signal, and `WATCHDOG=1` twice per `WATCHDOG_USEC` while the event loop runs.
"""

import contextlib
import os
import socket
import time


class ServiceManager:
    """The connection to the service manager. Without a service manager, every call does nothing."""

    def __init__(self, address: str | None, watchdog_seconds: float = 0.0) -> None:
        """`watchdog_seconds` is the time without a message after which systemd assumes a hang; 0 means no watchdog."""
        self._socket: socket.socket | None = None
        self._interval = watchdog_seconds / 2
        self._next_beat = 0.0
        if address:
            # A leading @ denotes an address in Linux' abstract namespace.
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @classmethod
    def take_environment(cls) -> "ServiceManager":
        """Create it from the environment, and remove its variables, which child processes must not use."""
        address = os.environ.pop("NOTIFY_SOCKET", None)
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        is_watched = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if is_watched else 0.0)

    def ready(self, status: str) -> None:
        """Report that requests are served. `status` is a sentence for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Report that the server ends after its live requests."""
        self._send("STOPPING=1\nSTATUS=new requests are refused; live ones end")

    def beat(self) -> None:
        """Report that the event loop runs. May be called at any rate."""
        if self._interval and (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + self._interval
            self._send("WATCHDOG=1", timeout=0.0)

    def _send(self, message: str, timeout: float = 1.0) -> None:
        """Send a message. Waits at most `timeout` seconds for room in the socket; losing one watchdog message is
        harmless."""
        if self._socket is not None:
            self._socket.settimeout(timeout)
            # The service manager may be gone; the server must continue.
            with contextlib.suppress(OSError):
                self._socket.sendto(message.encode(), self._address)
