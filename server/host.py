"""`run`: a host that computes its ranks' part for the server on another, from a `Config` to an exit code.

Called by `server.serve` where `node_rank` is not 0. Serves no HTTP.
"""

import signal
import sys

from engine.config import Config
from engine.lifetime import name_process
from engine.log_lines import log_lines
from engine.release import release


def run(config: Config) -> int:
    """Serve ranks until the first host's server ends, or SIGINT or SIGTERM, which give 0; what goes wrong gives 1."""
    parallel = config.parallel_config
    name = f"kaon-node-{parallel.node_rank}"
    name_process(name)
    log_lines(name, config.server_config.log_level)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Not above: the first host's server needs none of it.
    from engine.checkpoint import resolve_checkpoint
    from engine.rank_host import HostError, host_of

    try:
        host = host_of(config, resolve_checkpoint(config.model))
        sys.stdout.write(f"Kaon {release()} node {parallel.node_rank} of {parallel.nnodes} joins {host.address}\n")
        sys.stdout.flush()
        host.serve(rejoins=True)
    except (HostError, OSError, ValueError) as error:
        sys.stderr.write(f"kaon: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0
