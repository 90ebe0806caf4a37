"""`HostAgent`: runs the ranks or engine cores of a host other than the first, for successive servers.

`kaon serve` with a `node_rank` and Ray's actors use it. It joins the engine core whose ranks it runs, or the front end
whose cores it runs (`HostedCores`), and executes the commands that it receives. It starts processes and does not
import torch.
"""

import logging
import signal
import socket
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.config.config import Config
from engine.distributed.cluster import ClusterKeys, HostAgreement, read_cluster_key
from engine.distributed.core_process import CoreProcess
from engine.distributed.curve import AGAIN_SECONDS, CONNECT_SECONDS, curve_client, endpoint, warn_no_address
from engine.distributed.host_messages import (
    CoreCommand,
    CoreEnded,
    CoreServes,
    CoreStarted,
    DumpStacks,
    FromHost,
    Hello,
    KillCore,
    LaunchCore,
    RankCommand,
    RankGone,
    RankReport,
    Refused,
    ShutdownMessage,
    StopCore,
    ToHost,
)
from engine.distributed.host_resources import available_host_memory
from engine.distributed.rank_link import RankFailed, RankLaunch, RankProc, RankServes, ToRank

_FAILED = 1


class HostedCores:
    """The engine cores that a host runs for a front end on another host, by the numbers that the front end assigns.

    Each is a process as on the first host, except that its sockets connect to another host. All calls come from one
    thread, and the cores end with it.
    """

    def __init__(self, config: Config) -> None:
        """`config` is this host's configuration."""
        self._config = config
        self._cores: dict[int, CoreProcess] = {}
        self._serving: set[int] = set()

    @property
    def lifelines(self) -> Collection[int]:
        """Descriptors of the lifelines. The descriptor of an ended core is readable."""
        return [core.lifeline.fileno() for core in self._cores.values()]

    def execute(self, message: CoreCommand) -> CoreStarted | CoreEnded | None:
        """Execute a command of the front end, and return its answer, or None. Commands for an ended core are
        ignored."""
        if isinstance(message, LaunchCore):
            return self._start(message)
        core = self._cores.get(message.core)
        if core is None:
            return None
        match message:
            case CoreServes():
                self._serving.add(message.core)
                core.connected()
            case DumpStacks():
                core.dump_stacks()
            case KillCore():
                core.kill()
            case StopCore():
                self._stop(message.core)
        return None

    def reap(self, readable: Collection[object]) -> Iterable[CoreEnded]:
        """Remove the cores whose lifelines are readable, and report how they ended."""
        for number, core in list(self._cores.items()):
            if core.lifeline.fileno() in readable:
                code = core.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                _log.log(logging.ERROR if code else logging.INFO, "%s %s", core.launch.name, how)
                ended = CoreEnded(number, code, core.running_step())
                self._stop(number)
                yield ended

    def close(self) -> None:
        """End all cores in parallel."""
        for core in self._cores.values():
            core.lifeline.close()
        for number in list(self._cores):
            self._stop(number)

    def _start(self, launch: LaunchCore) -> CoreStarted | CoreEnded:
        # The number of blocks must be equal on all hosts, since requests are checked against it.
        config = self._config.model_copy(update={"num_kvcache_blocks": launch.num_kvcache_blocks})
        share = launch.share
        if launch.is_first:
            share = share._replace(available_bytes=available_host_memory() // share.num_local)
        try:
            core = CoreProcess(config, share, lockstep_member=launch.lockstep_member, front_end=launch.front_end)
            self._cores[launch.core] = core
            core.start()
        except (OSError, ValueError) as error:
            if launch.core in self._cores:
                self._stop(launch.core)
            return CoreEnded(launch.core, _FAILED, [], f"it cannot be started: {error}")
        return CoreStarted(launch.core, core.pid)

    def _stop(self, number: int) -> None:
        self._cores.pop(number).stop(_END_SECONDS if number in self._serving else 0.0)
        self._serving.discard(number)


_log = logging.getLogger(__name__)

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_EVENTS = sum(_HANDSHAKE_FAILED) | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_REFUSALS = 5
"""Successive failed handshakes after which the key counts as wrong: a core that ends also breaks a handshake."""
_END_SECONDS = 2.0
"""Seconds that a rank or a core has to end by itself. A core that never served is killed at once."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToHost)


def _with_own_settings(first: Config, own: Config) -> Config:
    """Return the first host's configuration, with this host's values of the settings that may differ between hosts."""
    interface = {"cluster_interface": own.parallel_config.cluster_interface}
    parallel = first.parallel_config.model_copy(update=interface)
    return first.model_copy(update={"cpu_threads": own.cpu_threads, "parallel_config": parallel})


def host_of(config: Config, path: Path) -> "HostAgent":
    """Create the agent of this host. Raises `ValueError` with a sentence if it cannot join, and `OSError`."""
    parallel = config.parallel_config
    keys = ClusterKeys.of(read_cluster_key(parallel.cluster_key_file, parallel.master_addr))
    address = endpoint(parallel.master_addr, parallel.master_port)
    return HostAgent(config, path, node=parallel.node_rank, address=address, keys=keys)


class HostError(RuntimeError):
    """This host cannot join, or must not. The message is a sentence for the user."""


class HostAgent:
    """The ranks or cores of one host. All calls come from one thread, and the processes end with it."""

    def __init__(self, config: Config, path: Path, *, node: int, address: str, keys: ClusterKeys) -> None:
        """`config` is this host's configuration. `path` is its checkpoint. The host, with number `node`, joins at the
        `tcp://` address `address`. Raises `OSError` if the checkpoint cannot be read.
        """
        self.address = address
        self._config, self._path = config, path
        self._node, self._keys = node, keys
        self._agreement = HostAgreement.of(config, path)
        self._timeout = config.parallel_config.rank_start_timeout
        self._has_served = False
        """Whether a core here, or a core with ranks here, has been ready once."""

    def serve(self, *, rejoins: bool) -> None:
        """Serve one core, or with `rejoins` successive cores, until a shutdown message.

        Raises `HostError` if no core is reached in time, or this host cannot join.
        """
        while True:
            deadline = time.monotonic() + self._timeout
            address = _reach(self.address, self._timeout, deadline)
            with _Joined(self._node, address, self._keys, HostedCores(self._config)) as core:
                core.join(self._timeout, deadline, self._agreement)
                _log.info("joined the engine core at %s", self.address)
                shutdown = self._follow(core)
            if shutdown is not None and not (shutdown.why and self._has_served):
                if shutdown.why:
                    raise HostError(shutdown.why)
                return
            if not rejoins:
                return
            _log.warning("the engine core at %s is gone; this host waits for the next", self.address)

    def _follow(self, core: "_Joined") -> ShutdownMessage | None:
        """Execute the commands of the core until it is gone (returns None), or sends a shutdown message (returns
        it)."""
        failure: RankFailed | None = None
        while True:
            lost, frames, procs = core.wait()
            for proc in procs:
                message = proc.receive()
                if message is None:
                    core.report_end(proc)
                    continue
                if isinstance(message, RankServes):
                    self._has_served = True
                elif isinstance(message, RankFailed) and message.usage:
                    failure = message
                core.send(RankReport(proc.rank, message))
            for frame in frames:
                try:
                    command = _decoder.decode(frame)
                except msgspec.DecodeError as error:
                    raise HostError(
                        f"the first host sent a message that this version of Kaon cannot read ({error}); "
                        "install one version on all hosts"
                    ) from error
                match command:
                    case RankCommand():
                        self._to_rank(core, command.rank, command.message)
                    case Refused():
                        raise HostError(command.why)
                    case ShutdownMessage():
                        return command
                    case _:
                        self._has_served |= isinstance(command, CoreServes)
                        core.execute(command)
            if lost:
                return None if failure is None else ShutdownMessage(failure.error)

    def _to_rank(self, core: "_Joined", rank: int, message: ToRank) -> None:
        if isinstance(message, RankLaunch):
            # Use the memory, threads and checkpoint of this host.
            shard = message.shard._replace(available_bytes=available_host_memory() // message.shard.local_size)
            config = _with_own_settings(Config.model_validate_json(message.config), self._config).model_dump_json()
            core.start(msgspec.structs.replace(message, path=str(self._path), shard=shard, config=config))
        elif rank in core.procs:
            core.procs[rank].send(message)


def _reach(address: str, timeout: float, deadline: float) -> str:
    """Wait until a socket listens at `address`, whose name may have no IP address yet, or change it.

    Returns the IP address that was reached. Raises `HostError` after `deadline`, `timeout` seconds from the start.
    """
    where = urlsplit(address)
    assert where.hostname is not None
    while True:
        missing = ""
        try:
            seconds = max(0.01, min(CONNECT_SECONDS, deadline - time.monotonic()))
            with socket.create_connection((where.hostname, where.port), seconds) as found:
                return endpoint(found.getpeername()[0], found.getpeername()[1])
        except socket.gaierror as error:
            missing = f": {where.hostname} has no address ({error.strerror})"
            warn_no_address(where.hostname, error)
        except OSError:
            pass  # No socket listens there yet, or there is no route.
        if time.monotonic() + AGAIN_SECONDS >= deadline:
            raise HostError(f"no engine core came to {address} within rank_start_timeout {timeout:g} s{missing}")
        time.sleep(AGAIN_SECONDS)


class _Joined:
    """A connection to a core, and the processes that were started for it, which end with it."""

    def __init__(self, node: int, address: str, keys: ClusterKeys, cores: HostedCores) -> None:
        self._node, self._address = node, address
        # A new name each time: a core that lost this host must not mistake the next connection for the last one.
        self._socket = curve_client(
            zmq.Context.instance(), keys.host, keys.core.public, uuid.uuid4().bytes.hex().encode()
        )
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(address)
        self.procs: dict[int, RankProc] = {}
        self._cores = cores

    def __enter__(self) -> "_Joined":
        return self

    def __exit__(self, *_: object) -> None:
        # Must be first, since the end of the connection confirms a shutdown message.
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        for proc in self.procs.values():
            proc.close(_END_SECONDS)
        self._cores.close()

    def join(self, timeout: float, deadline: float, agreement: HostAgreement) -> None:
        """Wait for a core, and send it a hello. Raises `HostError` after the time, or if the core has another key."""
        refusals = 0
        while True:
            if not self._monitor.poll(max(0, round(1e3 * (deadline - time.monotonic())))):
                raise HostError(f"no engine core came to {self._address} within rank_start_timeout {timeout:g} s")
            match recv_monitor_message(self._monitor)["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    break
                case event if event in _HANDSHAKE_FAILED:
                    refusals += 1
            if refusals == _REFUSALS:
                raise HostError(
                    f"{self._address} refuses this host; the cluster key must be the same on all hosts, and "
                    "master_port the first host's"
                )
        self.send(Hello(self._node, socket.gethostname(), agreement))

    def wait(self) -> tuple[bool, list[bytes], list[RankProc]]:
        """Wait for an event. Returns whether the core is gone, its messages, and the ranks with messages."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        for proc in self.procs.values():
            poller.register(proc.descriptor, zmq.POLLIN)
        for lifeline in self._cores.lifelines:
            poller.register(lifeline, zmq.POLLIN)
        readable = dict(poller.poll())
        for ended in self._cores.reap(readable):
            self.send(ended)
        frames = [self._socket.recv()] if self._socket in readable else []
        lost = False
        while self._monitor in readable and self._monitor.poll(0):
            lost |= recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        while lost and self._socket.poll(0):
            frames.append(self._socket.recv())
        if b"" in frames:
            # Answer the check whether this host is alive.
            self._socket.send(b"")
        return lost, [frame for frame in frames if frame], [p for p in self.procs.values() if p.descriptor in readable]

    def send(self, message: FromHost) -> None:
        """Send the core a message."""
        self._socket.send(_encoder.encode(message))

    def execute(self, message: CoreCommand) -> None:
        """Execute a command of the front end."""
        answer = self._cores.execute(message)
        if answer is not None:
            self.send(answer)

    def start(self, launch: RankLaunch) -> None:
        """Start a rank."""
        self.procs[launch.shard.rank] = RankProc(launch, ())

    def report_end(self, proc: RankProc) -> None:
        """Remove a rank that has ended, and report its end to the core."""
        how, killed = proc.exit_reason()
        self.procs.pop(proc.rank).close(_END_SECONDS)
        _log.error("tensor-parallel rank %d %s", proc.rank, how)
        self.send(RankGone(proc.rank, how, killed))
