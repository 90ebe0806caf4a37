"""`Replica`: one engine core through all of its lives, and the requests that it owes an answer.

Owned by `CoreManager`, which has one or, data parallel, several.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from engine.client.core_link import CoreLink, core_name
from engine.client.journal import Entry, Journal
from engine.client.supervisor import Supervisor
from engine.config.config import Config
from engine.distributed.core_process import CoreHandle, CoreProcess
from engine.distributed.host_resources import HostShare
from engine.distributed.lockstep import Seats
from engine.messages import AbortRequests, AddRequest, Failed, Ready, RequestOutput, Shutdown, StepOutputs

if TYPE_CHECKING:
    from engine.distributed.core_hosts import CoreHosts

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Who has replicas, and is told by them."""

    def on_core_ready(self, replica: "Replica", /, *, again: bool, resumed: int) -> None:
        """A core serves, in which so many requests will go on behind tokens that they had."""

    def on_step(self) -> None:
        """What a core told of a step was delivered."""

    def on_away(self, replica: "Replica", /) -> None:
        """A core that served is gone, and the next does not serve yet; told again and again."""

    def on_end(self, replica: "Replica", failure: Failed, /) -> None:
        """There is no core of this replica, and will be none."""


class Replica:
    """A supervised core, and the journal of its requests. All calls come from one thread.

    Requests that are here when its core dies go on in its next one, unless `Relocation` has others take them over.
    """

    def __init__(
        self,
        config: Config,
        owner: Owner,
        deliver: Callable[[StepOutputs], object],
        share: HostShare,
        *,
        seats: Seats | None,
        hosts: "CoreHosts | None",
    ) -> None:
        """Start its core and return at once; see `Supervisor`. `deliver` is called with the outputs of every step.

        The memory of its `share` is for the first core, which loads beside the others'. `seats`: of the replicas that
        compute in lockstep; `hosts`: where it may be another's.
        """
        self.number = share.replica
        self.ready: Ready | None = None
        """What its latest core said when it was ready to serve; None before the first."""
        self.deliver = deliver
        self.journal = Journal()
        self.note_outputs: Callable[[Iterable[RequestOutput]], object] | None = None
        """Called with what a step brought, before it is delivered."""
        self.in_lockstep: Sequence[Replica] = (self,)
        """Those that compute in step, this one included: while one has work, all must show progress."""
        self._owner = owner
        self._share = share
        # This process will keep off those that the core makes its own; the next core is to have them again.
        self._cpus = os.sched_getaffinity(0)
        self._seats = seats
        self._hosts = hosts if hosts is not None and hosts.runs(self.number) else None
        self.supervisor = Supervisor(config, self, core_name(config, self.number))

    @property
    def is_serving(self) -> bool:
        """Whether there is a core now that is ready."""
        return self.supervisor.is_serving

    def shutdown(self) -> None:
        """Have the core abort what runs and end; it takes its time."""
        self.supervisor.begin_end([Shutdown()])

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[AddRequest]) -> list[Entry]:
        """Send requests, or keep them until a core serves; their entries in the journal."""
        entries = self.journal.add(requests)
        self._go_on(entries)
        return entries

    def take_over(self, entries: Sequence[Entry]) -> None:
        """Go on with requests that another replica has given away."""
        self.journal.take_over(entries)
        self._go_on(entries)

    def abort(self, request_ids: Collection[int]) -> None:
        """Ask the core to end those of the requests that are this one's."""
        there, ended = self.journal.abort(self.journal.entries(request_ids))
        if there:
            self.supervisor.send([AbortRequests(there)])
        self._tell(ended)

    def pause(self, request_ids: Collection[int]) -> None:
        """Have the core give them up until `resume`."""
        leaving = self.journal.call_back(self.journal.entries(request_ids))
        if leaving:
            self.supervisor.send([AbortRequests(leaving)])

    def resume(self, request_ids: Collection[int]) -> None:
        """Have the core go on with them."""
        self._go_on(self.journal.let_go_on(self.journal.entries(request_ids)))

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Deliver outputs that no core sends."""
        if outputs:
            step = StepOutputs(outputs)
            self.journal.record(step)
            self._deliver(step)

    def _deliver(self, step: StepOutputs) -> None:
        if self.note_outputs is not None:
            step.replica = self.number
            self.note_outputs(step.outputs)
        self.deliver(step)

    def _go_on(self, entries: Sequence[Entry]) -> None:
        """Bring requests that are here to the core, if there is one; if not, they wait for it."""
        if self.is_serving and entries:
            if not self.has_work:
                for replica in self.in_lockstep:
                    replica.supervisor.note_work()
            self.supervisor.send(self.journal.send(entries))

    # -- what the supervisor tells ------------------------------------------------------------------------------

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]") -> CoreLink:
        """Start a core."""
        name = core_name(config, self.number)
        core: CoreHandle
        if self._hosts is not None:
            core = self._hosts.core(self.number, name, config.num_kvcache_blocks)
        else:
            share, self._share = self._share, self._share._replace(available_bytes=None)
            seat = None if self._seats is None else self._seats.give(self.number)
            core = CoreProcess(config, share, cpus=self._cpus, seat=seat)
        return CoreLink(core, context, name)

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that still owe their terminal output."""
        return self.journal.ids

    @property
    def has_work(self) -> bool:
        """Whether the core owes anything."""
        return any(replica.journal.has_work for replica in self.in_lockstep)

    @property
    def is_held_up(self) -> bool:
        """Whether the core waits for those of other replicas, and none for it."""
        return self._seats is not None and self._seats.is_held_up(self.number)

    def on_step(self, step: StepOutputs) -> None:
        """Write down what the core tells of a step, and deliver it."""
        left = self.journal.record(step)
        self._deliver(step)
        self._go_on(left)
        self._owner.on_step()

    def on_core_ready(self, ready: Ready, *, again: bool) -> None:
        """Give a core what waits for it."""
        if self._hosts is not None:
            # Another host's CPUs are none that processes of this one could keep off.
            ready = Ready(msgspec.structs.replace(ready.model, own_cpus=[]), ready.startup_seconds)
        self.ready = ready
        resumed = sum(bool(entry.token_ids) for entry in self.journal)
        if again:
            others = len(self.live) - resumed
            name = self.supervisor.name
            _log.warning("%s serves again; %d requests go on, %d others begin", name, resumed, others)
        self._owner.on_core_ready(self, again=again, resumed=resumed)
        self._go_on(list(self.journal))

    def on_core_death(self, in_step: Collection[int] | None, *, killed: bool) -> bool:
        """Call all requests back; those that do not go on end. Whether one was found to be at fault."""
        ended = self.journal.core_died(in_step, killed=killed)
        self._tell(ended)
        return any(output.is_poison for output in ended)

    def on_away(self) -> None:
        """What waits for the next core may be taken over by others."""
        self._owner.on_away(self)

    def on_end(self, failure: Failed) -> None:
        """What follows from the last core's end: every live request ends with an error."""
        self._owner.on_end(self, failure)
        self._tell(self.journal.end_all(failure.error))
