"""`RankProc`: the process of one rank behind the first, as who started it sees it.

Made on the engine core's own host by `LocalRanks` and `RemoteRanks`, on others by `RankHost`.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from engine.lifetime import wait_or_kill
from engine.worker.rank_messages import FromRank, RankLaunch, ToRank, hear_rank, tell_rank
from models.child_environment import own_code

RANK_MODULE = "engine.worker.rank_process"
"""What the process runs."""


class RankProc:
    """A process, and the socket by which it hears and is heard; the socket's end tells either side of the other's."""

    def __init__(self, launch: RankLaunch, descriptors: Sequence[int]) -> None:
        """Start it; it inherits `descriptors`. Raises `OSError` when it cannot be started."""
        self.rank = launch.shard.rank
        self.name = launch.name
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # As the engine core itself is started: a name for `ps`, the parent's own code, and no Ctrl-C.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", RANK_MODULE, launch.name],
                stdin=theirs.fileno(),
                pass_fds=descriptors,
                env=own_code(),
                process_group=0,
            )
        self.send(launch)

    @property
    def title(self) -> str:
        """As sentences call it."""
        return f"tensor-parallel rank {self.rank}"

    @property
    def absence(self) -> str | None:
        """Nothing: the process was started here."""
        return None

    @property
    def descriptor(self) -> int:
        """Readable when the process has said something, or is gone."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: ToRank) -> None:
        """Tell the process something. One that is gone is told of by the socket's end."""
        tell_rank(self._socket, message)

    def receive(self) -> FromRank | None:
        """What it says next; None when it is gone."""
        return hear_rank(self._socket)

    def how_gone(self) -> tuple[str, bool]:
        """How the process, which is gone, ended, as the end of a sentence; whether another process killed it."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}", code == -signal.SIGKILL
        return f"exited with code {code}; its log says why", False

    def close(self, timeout: float) -> None:
        """End the process, by its socket and after `timeout` seconds by SIGKILL."""
        self._socket.close()
        wait_or_kill(self._process, timeout)
