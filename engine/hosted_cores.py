"""`HostedCores`: the engine cores that a host runs for the front end of another. Owned by `RankHost`.

Each is the process that it would be on the first host; only its sockets lead elsewhere.
"""

import logging
import signal
from collections.abc import Collection, Iterable

from engine.config import Config
from engine.core_process import CoreProcess
from engine.worker.control_groups import available_host_memory
from engine.worker.host_messages import (
    CoreEnded,
    CoreServes,
    CoreStarted,
    DumpStacks,
    KillCore,
    LaunchCore,
    StopCore,
    TellCore,
)

_log = logging.getLogger(__name__)

_END_SECONDS = 2.0
"""For a core to end by itself; one that never served has nothing to end."""
_FAILED = 1


class HostedCores:
    """By the numbers that the front end gives them. All calls come from one thread, with which the cores end."""

    def __init__(self, config: Config) -> None:
        """`config`: this host's."""
        self._config = config
        self._cores: dict[int, CoreProcess] = {}
        self._serving: set[int] = set()

    @property
    def lifelines(self) -> Collection[int]:
        """Descriptors, one of which is readable when a core is gone."""
        return [core.lifeline.fileno() for core in self._cores.values()]

    def do(self, message: TellCore) -> CoreStarted | CoreEnded | None:
        """What the front end says; an answer, if there is one. Of a core that is gone nothing is done."""
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
        """How those ended whose lifelines are among the readable descriptors."""
        for number, core in list(self._cores.items()):
            if core.lifeline.fileno() in readable:
                code = core.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                _log.log(logging.ERROR if code else logging.INFO, "%s %s", core.launch.name, how)
                ended = CoreEnded(number, code, core.running_step())
                self._stop(number)
                yield ended

    def close(self) -> None:
        """End all, at the same time."""
        for core in self._cores.values():
            core.lifeline.close()
        for number in list(self._cores):
            self._stop(number)

    def _start(self, launch: LaunchCore) -> CoreStarted | CoreEnded:
        # What requests are checked against holds on every host; the rest is as this one has it.
        config = self._config.model_copy(update={"num_kvcache_blocks": launch.num_kvcache_blocks})
        share = launch.share
        if launch.is_first:
            share = share._replace(available_bytes=available_host_memory() // share.places)
        try:
            core = CoreProcess(config, share, front_end=launch.front_end)
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
