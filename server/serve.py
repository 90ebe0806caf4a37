"""`run`: a whole server, from a `Config` to an exit code. Called by `kaon serve`.

Imports little: the core is started first, and loads torch while this process loads its web framework.
"""

import errno
import logging
import signal
import socket
import sys
import time
from importlib.metadata import version

from engine.config import Config, ServerConfig
from engine.core_manager import CoreManager
from engine.lifetime import name_process

_BACKLOG = 2048


def run(config: Config) -> int:
    """Serve until SIGINT or SIGTERM, which give 0; what keeps the server from it is told on stderr and gives 1."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(config, started)
    except KeyboardInterrupt:
        return 0


def _run(config: Config, started: float) -> int:
    name_process("kaon-api")
    logging.basicConfig(
        level=config.server_config.log_level.upper(), format="kaon-api %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        listener = _listen(config.server_config)
        core = CoreManager(config)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    try:
        from server.http import serve

        url = _url(listener)
        ended = serve(config, core, listener, lambda names: _announce(names, url, time.monotonic() - started))
        return 0 if ended is None else _fail(ended)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        core.shutdown()


def _listen(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises `OSError`, a sentence, when the address cannot be had."""
    host, port = config.host, config.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise OSError(f"host is {host}, which is no address of this machine: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is taken; stop what listens there or choose another port") from error
        raise OSError(f"port {port} on {host} cannot be opened: {error.strerror}") from error


def _announce(names: tuple[str, ...], url: str, seconds: float) -> None:
    sys.stdout.write(f"Kaon {version('kaon')} serving {', '.join(names)} on {url} (ready in {seconds:.1f} s)\n")
    sys.stdout.flush()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _fail(why: str) -> int:
    sys.stderr.write(f"kaon: {why}\n")
    return 1
