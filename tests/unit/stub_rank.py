"""A tensor-parallel rank without a model, with faults at its start: the real process and messages, without delay.

It runs in place of `engine.runner.rank_process`. `STUB_RANK` selects the fault.
"""

import os
import socket
import sys
import threading

from engine.config.config import Config
from engine.distributed.rank_link import RankLaunch, RankLoaded
from engine.runner import rank_process

FAULT = os.environ["STUB_RANK"]


def serve(config: Config, launch: RankLaunch, core: socket.socket) -> None:
    """A replacement of `rank_process._serve`."""
    match FAULT:
        case "load":
            raise ValueError("the shard is damaged")
        case "bug":
            raise ZeroDivisionError("division by cucumber")
        case "exit":
            os._exit(7)
        case "loaded":
            rank_process._send(core, RankLoaded([launch.shard.rank], 1000))
    threading.Event().wait()


if __name__ == "__main__":
    rank_process._serve = serve
    sys.exit(rank_process.main())
