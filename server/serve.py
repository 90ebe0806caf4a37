"""`run`: a whole server, from a `Config` to an exit code. Called by `kaon serve`.

Imports little: the core is started first, and loads torch while this process loads its web framework.
"""

import errno
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.config import Config, ServerConfig
from engine.core_manager import CoreManager
from engine.lifetime import name_process
from engine.log_lines import log_lines
from engine.release import release
from server.auth import KeyRing
from server.command_line import hide
from server.request_id import REQUEST_ID
from server.tls import tls_context

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: Config) -> int:
    """Serve until SIGINT or SIGTERM, which give 0; what keeps the server from it is told on stderr and gives 1."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(config, started)
    except KeyboardInterrupt:
        return 0


def _run(config: Config, started: float) -> int:
    if config.parallel_config.node_rank:
        from server import host

        # It needs none, but is started by the same command.
        return host.run(_without_keys(config))
    name_process("kaon-api")
    _set_up_logging(config.server_config)
    try:
        keys = KeyRing.of(config.server_config)
        config = _without_keys(config)
        tls = tls_context(config.server_config)
        listener = _listen(config.server_config)
        with _signals_noted() as signals:
            core = CoreManager(config)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    try:
        if signals:
            raise KeyboardInterrupt
        from server.http import serve

        url = _url(listener, "http" if tls is None else "https")
        announce = functools.partial(_announce, url=url, started=started)
        ended = serve(config, core, listener, announce, keys, tls)
        if ended is None:
            return 0
        _ignore_signals()
        code = _fail(ended)
        core.fail(ended)
        return code
    except Exception as error:
        _ignore_signals()
        core.fail(f"the server failed: {type(error).__name__}: {error}")
        raise
    finally:
        _ignore_signals()
        core.shutdown()


def _ignore_signals() -> None:
    """It ends already, and what it started is to end with it."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """The signals that come meanwhile, which interrupt nothing: a process just made must get into somebody's hands."""
    noted: list[int] = []
    handlers = {each: signal.signal(each, lambda number, _: noted.append(number)) for each in _SIGNALS}
    try:
        yield noted
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _without_keys(config: Config) -> Config:
    """`config` as everything else may see it: the keys are in a `KeyRing`, and the core needs none."""
    os.environ.pop("KAON_API_KEY", None)
    if config.server_config.api_key:
        try:
            hide(key.get_secret_value() for key in config.server_config.api_key)
        except OSError as error:
            _log.warning("an API key given as a flag stays visible in the list of processes: %s", error)
    return config.model_copy(update={"server_config": config.server_config.model_copy(update={"api_key": ()})})


def _set_up_logging(config: ServerConfig) -> None:
    def name_request(record: logging.LogRecord) -> bool:
        request_id = REQUEST_ID.get()
        record.request = "" if request_id is None else f" [{request_id}]"
        return True

    log_lines("kaon-api", config.log_level, "%(request)s").addFilter(name_request)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))


def _listen(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises `OSError`, a sentence, when the address cannot be had."""
    host, port = config.host, config.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise OSError(f"host is {host}, which is no address of this machine: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"host is {host}, which is no address of this machine") from error
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is taken; stop what listens there or choose another port") from error
        raise OSError(f"port {port} on {host} cannot be opened: {error.strerror}") from error


def _announce(names: tuple[str, ...], url: str, started: float) -> None:
    # What is loaded stays: a full collection would walk all of it, and hold every stream up, to find nothing.
    gc.freeze()
    seconds = time.monotonic() - started
    sys.stdout.write(f"Kaon {release()} serving {', '.join(names)} on {url} (ready in {seconds:.1f} s)\n")
    sys.stdout.flush()


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _fail(why: str) -> int:
    sys.stderr.write(f"kaon: {why}\n")
    return 1
