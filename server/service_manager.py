"""`ServiceManager`: reports the server's state to systemd by sd_notify's protocol, where systemd started it.

A datagram of lines NAME=VALUE on the socket that `NOTIFY_SOCKET` names: `READY=1` once requests are served,
`STOPPING=1` at the first signal, and `WATCHDOG=1` twice in each `WATCHDOG_USEC` while the event loop runs.
"""

import contextlib
import os
import socket
import time


class ServiceManager:
    """The way to the service manager. Every call does nothing where there is none."""

    def __init__(self, address: str | None, watchdog_seconds: float = 0.0) -> None:
        """`watchdog_seconds`: the longest silence that is not taken for a hang; 0: no watchdog."""
        self._socket: socket.socket | None = None
        self._interval = watchdog_seconds / 2
        self._next_beat = 0.0
        if address:
            # A leading @ stands for an address in Linux' abstract namespace.
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    @classmethod
    def take_environment(cls) -> "ServiceManager":
        """The one that the environment names. Its variables are removed: they are not for child processes."""
        address = os.environ.pop("NOTIFY_SOCKET", None)
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        is_watched = microseconds.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if is_watched else 0.0)

    def ready(self, status: str) -> None:
        """Requests are served; `status` is a sentence for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """The server ends when its live requests have."""
        self._send("STOPPING=1\nSTATUS=new requests are refused; live ones end")

    def beat(self) -> None:
        """The event loop runs. Called as often as one likes."""
        if self._interval and (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + self._interval
            self._send("WATCHDOG=1", timeout=0.0)

    def _send(self, message: str, timeout: float = 1.0) -> None:
        """Wait so many seconds at most for the manager to have room: a beat that is lost does not matter."""
        if self._socket is not None:
            self._socket.settimeout(timeout)
            # The service manager may be gone: the server must not end for that.
            with contextlib.suppress(OSError):
                self._socket.sendto(message.encode(), self._address)
