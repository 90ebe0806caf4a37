"""`run`: a whole server, from a `Config` to an exit code, as `kaon serve` starts it.

In this order: read and hide the API keys, set up TLS, open the socket, start the core, and serve by `server.http`.
Imports little, so that the core loads torch while this process loads its web framework. With a `node_rank` other than
0, the process serves no HTTP: it runs this host's ranks for the first host.
"""

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.client.core_manager import CoreManager
from engine.config.config import Config
from engine.config.paths import check_checkpoint
from engine.config.release import release
from engine.config.server import ServerConfig
from engine.config.settings import read_models
from engine.distributed.logs import BARE, configure_logging
from engine.distributed.processes import forbid_inspection, name_process
from engine.text.sandbox import gaps
from server.access_log import REQUEST_ID
from server.limits.keys import ApiKeys
from server.limits.owners import is_loopback
from server.sealing import Seal
from server.service_manager import ServiceManager
from server.signals import Signals, end_at_once, interrupt
from server.tls import Tls
from server.tracing import Tracing

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_OPEN_FILES = 2**16
_SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter: the time after which a computing thread releases the interpreter lock to the
event loop. With Python's default of 5 ms, a thread that parses or renders for one client would delay all streams by
more than a small model's step."""

_NICENESS = -3
"""Niceness of the event loop's thread where the system permits it. The loop needs a part of one core only, but next to
an engine that computes on all cores, probes and streams mostly wait for that part. A flood of connections makes the
loop use a whole core, so with much more priority it would keep the engine from that core."""

_COMMAND_LINE, _ENVIRONMENT = 47, 49
"""Indices, from 0, of fields in /proc/self/stat: the start address of the command line, and of the environment. The
next field is the end address."""
_KEY_VARIABLE = "KAON_API_KEY"


def run(config: Config, read_config: Callable[[], Config] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 0 then, 1 after a failure, which is reported on stderr.

    Signals are handled as `server.signals` describes.
    `read_config` reads the configuration again after SIGHUP, or raises `ValueError`; None means no reload.
    """
    started = time.monotonic()
    end_at_once()
    manager = ServiceManager.take_environment()
    if config.parallel_config.node_rank:
        # This host needs no keys, but the same command line may contain them.
        return _run_node(_without_keys(config), manager)
    name_process("kaon-api")
    sys.setswitchinterval(_SWITCH_SECONDS)
    _raise_open_files_limit()
    _set_up_logging(config.server_config)
    for gap in gaps():
        _log.warning("%s", gap)
    try:
        keys = ApiKeys.of(config.server_config)
        # Checked early, although `Shared` reads it again: a wrong file must end the server before the model loads.
        Seal.of(config.server_config)
        config = _without_keys(config)
        if keys:
            forbid_inspection()
        tls = Tls.of(config.server_config)
        tracing = Tracing.of_environment(release())
        models = read_models(config)
        for entry in models.entries:
            if entry.loads_at_start:
                check_checkpoint(entry.config.model)
        listener = _listen(config.server_config, _is_keyless(config.server_config, keys))
    except (OSError, ValueError) as error:
        return _fail(str(error))
    url = _url(listener, "http" if tls is None else "https")
    loading = (entry.config.model_names[0] for entry in models.entries if entry.loads_at_start)
    _log.info("Kaon %s loading %s for %s", release(), ", ".join(loading) or "no model yet", url, extra=BARE)
    signals, cores = Signals(), list[CoreManager]()
    try:
        for entry in models.entries:
            model = entry.config.model_names[0] if len(models.entries) > 1 else ""
            cores.append(CoreManager(entry.config, starts=entry.loads_at_start, model=model))
    except (OSError, ValueError) as error:
        for core in cores:
            core.shutdown()
        return _fail(str(error))
    try:
        gc.disable()  # Collections would visit the imported objects again and again, an eighth of the import's time.
        with contextlib.suppress(KeyboardInterrupt), signals.interrupting():
            from server.http import serve
        gc.enable()
        if signals.endings:
            return 0
        announce = functools.partial(
            _announce, url=url, started=started, is_open=tls is None and not keys, manager=manager
        )
        prefer_event_loop()
        ended = serve(config, cores, models, listener, announce, keys, tls, manager, signals, tracing, read_config)
        if ended is None:
            return 0
        _log.critical("kaon: %s", ended, extra=BARE)
        for core in cores:
            core.fail(ended)
        return 1
    except Exception as error:
        for core in cores:
            core.fail(f"the server failed: {type(error).__name__}: {error}")
        raise
    finally:
        for core in cores:
            core.shutdown()


def prefer_event_loop() -> None:
    """Let the calling thread have a core before others, if the system permits it.

    A niceness or scheduling policy that the operator has chosen stays. What the thread starts has the usual priority.
    """
    if sys.platform == "linux" and os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) != os.SCHED_OTHER:
                return
            os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


def _raise_open_files_limit() -> None:
    """Raise the soft limit of open files of this process and its children towards the hard limit.

    The usual soft limit of 1024 exists for programs that use `select`; here every connection needs a descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _set_up_logging(config: ServerConfig) -> None:
    def name_request(record: logging.LogRecord) -> bool:
        request_id = REQUEST_ID.get()
        record.request = "" if request_id is None else f" [{request_id}]"
        return True

    configure_logging("kaon-api", config.log_level, "%(request)s").addFilter(name_request)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))


# -- other hosts ------------------------------------------------------------------------------------------------


def _run_node(config: Config, manager: ServiceManager) -> int:
    """Run this host's ranks until the first host's server ends. Returns the exit code, as `run`."""
    parallel = config.parallel_config
    name = f"kaon-node-{parallel.node_rank}"
    name_process(name)
    configure_logging(name, config.server_config.log_level)
    # Imported here because the first host's server does not need it.
    from engine.config.paths import resolve_checkpoint
    from engine.distributed.host_agent import HostError, host_of

    try:
        interrupt()
        host = host_of(config, resolve_checkpoint(config.model))
        sys.stdout.write(f"Kaon {release()} node {parallel.node_rank} of {parallel.nnodes} joins {host.address}\n")
        sys.stdout.flush()
        manager.ready(f"node {parallel.node_rank} of {parallel.nnodes} computes for {host.address}")
        host.serve(rejoins=True)
    except (HostError, OSError, ValueError) as error:
        sys.stderr.write(f"kaon: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


# -- keys -------------------------------------------------------------------------------------------------------


def _without_keys(config: Config) -> Config:
    """Return `config` without keys, and remove the keys from the environment and the command line."""
    variable = os.environ.pop(_KEY_VARIABLE, None)
    try:
        if variable:
            _mask(_ENVIRONMENT, [f"{_KEY_VARIABLE}={variable}"])
        if config.server_config.api_key:
            mask_command_line(key.get_secret_value() for key in config.server_config.api_key)
    except OSError as error:
        _log.warning(
            "API keys given as a flag or a variable stay visible to other processes of this user: %s; "
            "api_key_file shows none",
            error,
        )
    return config.model_copy(update={"server_config": config.server_config.model_copy(update={"api_key": ()})})


def mask_command_line(secrets: Iterable[str]) -> None:
    """Overwrite `secrets` in this process' command line, which `ps` shows. Raises `OSError` if the kernel refuses."""
    _mask(_COMMAND_LINE, secrets)


def _mask(region: int, secrets: Iterable[str]) -> None:
    """Overwrite `secrets` in a memory region that /proc shows. `region` is its index in /proc/self/stat."""
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        # The second field is the process' name in parentheses, which may contain spaces.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[index - 2]) for index in (region, region + 1))
        memory.seek(start)
        arguments = masked = memory.read(end - start)
        for secret in secrets:
            masked = masked.replace(secret.encode(), b"*" * len(secret.encode()))
        if masked != arguments:
            memory.seek(start)
            memory.write(masked)


# -- listening --------------------------------------------------------------------------------------------------


def _is_keyless(config: ServerConfig, keys: ApiKeys) -> bool:
    """Return whether a client needs neither an API key nor a certificate."""
    return not keys and config.ssl_ca_certs is None


def _listen(config: ServerConfig, is_keyless: bool) -> socket.socket:
    """Open the listening socket. Raises `OSError` or `ValueError` with a sentence if it cannot or must not be used."""
    host, port = config.host, config.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The bound address is checked instead of the name: only the resolver knows the address of `localhost`.
        if is_keyless and not config.insecure_no_auth and not is_loopback(str(address[0])):
            raise ValueError(
                f"host is {host}, which other machines can reach, but there is no API key; set one (KAON_API_KEY or "
                "api_key_file), listen on loopback (--host 127.0.0.1), or let everybody who reaches the port use the "
                "model (--insecure-no-auth)"
            )
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise OSError(f"host is {host}, which is not an address of this machine: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"host is {host}, which is not an address of this machine") from error
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is taken; stop what listens there or choose another port") from error
        raise OSError(f"port {port} on {host} cannot be opened: {error.strerror}") from error


def _announce(names: tuple[str, ...], url: str, started: float, is_open: bool, manager: ServiceManager) -> None:
    """Report on stdout and to the service manager that the server is ready.

    `is_open`: whether a request needs neither a key nor a certificate.
    """
    # Exclude the loaded objects from garbage collection: each full collection would traverse them, and delay streams.
    gc.freeze()
    seconds = time.monotonic() - started
    sys.stdout.write(f"Kaon {release()} serving {', '.join(names)} on {url} (ready in {seconds:.1f} s)\n")
    if sys.stdout.isatty():
        sys.stdout.write(f"  API   {url}/docs\n")
        if is_open:
            body = json.dumps({"model": names[0], "prompt": "Once upon a time"})
            sys.stdout.write(f"  try   curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n")
        sys.stdout.write("  stop  Ctrl-C\n")
    sys.stdout.flush()
    manager.ready(f"serving {', '.join(names)} on {url}")


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _fail(why: str) -> int:
    sys.stderr.write(f"kaon: {why}\n")
    return 1
