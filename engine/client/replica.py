"""`Replica`: an engine core with its successors, and the live requests that were sent to it.

Owned by `CoreManager`, which has one replica or, with data parallelism, several. The first half is the `Journal`: the
data that each live request needs to continue in another core.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq

from engine.client.adapters import AdapterLedger
from engine.client.supervisor import CoreLink, Supervisor, core_name
from engine.config.config import Config
from engine.distributed.core_process import CoreHandle, CoreProcess
from engine.distributed.host_resources import HostShare
from engine.distributed.lockstep import LockstepRendezvous
from engine.messages import (
    AbortRequests,
    AdapterChanged,
    AddRequest,
    Failed,
    Inbound,
    Ready,
    ReleaseCache,
    RequestOutput,
    SetLogLevel,
    Shutdown,
    StepOutputs,
    terminal_output,
)

if TYPE_CHECKING:
    from engine.distributed.core_hosts import CoreHosts

logger = logging.getLogger(__name__)

_MAX_CRASHES = 2
"""Most successive crashes in steps that computed a request. After them it is not tried again."""

_MAX_KILLS = 3
"""That bound if the last core was killed by another process: a request causes that only by using all memory."""

_MAX_LOSSES = 3
"""Most successive cores lost with a request that is not suspected. After them no other replica takes it over."""


class RequestLocation(Enum):
    """The location of a live request."""

    FRONT_END = auto()
    """Not in the core: it waits until a core is ready, or is paused."""
    CORE = auto()
    RECALLED = auto()
    """Recalled from the core to be paused. The core will still send its last output, which is not delivered."""


class _Streak(NamedTuple):
    """Number of successive events of one kind in the life of a request, without a new token between them."""

    times: int = 0
    tokens: int = -1
    """Number of tokens that the request had at the last event."""

    def extended(self, tokens: int) -> "_Streak":
        """Return the streak with one more event, at `tokens` tokens."""
        return _Streak(1 if tokens > self.tokens else self.times + 1, tokens)


_NO_STREAK = _Streak()


class JournalEntry:
    """One live request, with all data that it needs to continue in another core.

    These are its message and the delivered tokens: sampling is keyed by request and position, a grammar's matcher is
    advanced over the tokens again, and the front end has the text.
    """

    __slots__ = (
        "_crashes",
        "_losses",
        "aborted",
        "location",
        "paused",
        "request",
        "sent_time",
        "steps_at_start",
        "token_ids",
        "tokens_at_start",
    )  # fmt: skip

    def __init__(self, request: AddRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        """Tokens delivered so far."""
        self.location = RequestLocation.FRONT_END
        self.paused = False
        self.aborted = False
        self._crashes = self._losses = _NO_STREAK
        self.sent_time = 0.0
        """Time at which it was sent to its present core, on the monotonic clock."""
        self.tokens_at_start = 0
        """Number of its tokens when it was sent to its present core."""
        self.steps_at_start = 0
        """Number of steps that cores had reported at that time."""

    @property
    def crashes(self) -> int:
        """Successive crashes in steps that computed it, without a new token between them."""
        return self._crashes.times

    @property
    def losses(self) -> int:
        """Successive cores lost with it, in steps not known to have computed it, without a new token between them."""
        return self._losses.times

    @property
    def is_suspect(self) -> bool:
        """Whether a core died in a step that computed it, and it has had no token since."""
        return len(self.token_ids) == self._crashes.tokens

    @property
    def is_movable(self) -> bool:
        """Whether another replica may continue it: it is in no core, and was not lost with too many cores."""
        progressed = len(self.token_ids) > self._losses.tokens
        return self.location is RequestLocation.FRONT_END and (progressed or self.losses < _MAX_LOSSES)

    def message(self) -> AddRequest:
        """Return the message that makes a core begin or continue it."""
        if not self.token_ids and not self.crashes:
            return self.request
        params = self.request.sampling_params
        if self.token_ids:
            # The prompt's log probabilities were delivered with the first token.
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request,
            sampling_params=params,
            resumed_token_ids=tuple(self.token_ids),
            suspect=self.is_suspect,
        )

    def note_crash(self) -> None:
        """Count a core that died in a step that computed it."""
        self._crashes = self._crashes.extended(len(self.token_ids))

    def note_loss(self) -> None:
        """Count a core that was lost with it, in no step known to have computed it."""
        self._losses = self._losses.extended(len(self.token_ids))


class Journal:
    """The live requests by id, in order of arrival. A request is live until its output with `finished` is recorded."""

    def __init__(self) -> None:
        self._entries: dict[int, JournalEntry] = {}
        self._num_steps = 0

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    @property
    def ids(self) -> Set[int]:
        """Ids of the live requests."""
        return self._entries.keys()

    @property
    def has_work(self) -> bool:
        """Whether outputs of the core are pending: tokens, or the last output of a recalled request."""
        return any(entry.location is not RequestLocation.FRONT_END for entry in self)

    def entries(self, request_ids: Iterable[int]) -> list[JournalEntry]:
        """Return the entries of the given requests that are live."""
        return [entry for id in request_ids if (entry := self._entries.get(id)) is not None]

    def add(self, requests: Sequence[AddRequest]) -> list[JournalEntry]:
        """Add requests, and return their entries. Raises `ValueError` if an id is used twice."""
        self.check_new(requests)
        entries = {request.request_id: JournalEntry(request) for request in requests}
        self._entries |= entries
        return list(entries.values())

    def check_new(self, requests: Sequence[AddRequest]) -> None:
        """Raise `ValueError` if two requests have the same id, or one has the id of a live request."""
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not self._entries.keys().isdisjoint(ids):
            raise ValueError("a request id is used twice; each live request needs an id of its own")

    def export_entries(self, entries: Iterable[JournalEntry]) -> None:
        """Remove live requests that continue in another journal."""
        for entry in entries:
            del self._entries[entry.request.request_id]

    def import_entries(self, entries: Iterable[JournalEntry]) -> None:
        """Add live requests of another journal, including their history."""
        self._entries |= {entry.request.request_id: entry for entry in entries}

    def send(self, entries: Iterable[JournalEntry]) -> list[AddRequest]:
        """Note that requests are sent to the core, and return the messages. Requests in the core or paused are
        skipped."""
        messages = []
        now = time.monotonic()
        for entry in entries:
            if entry.location is RequestLocation.FRONT_END and not entry.paused:
                entry.location = RequestLocation.CORE
                entry.tokens_at_start = len(entry.token_ids)
                entry.steps_at_start = self._num_steps
                message = entry.message()
                entry.sent_time = message.sent_time = now
                messages.append(message)
        return messages

    def recall(self, entries: Iterable[JournalEntry]) -> list[int]:
        """Pause requests. Returns the ids of those that the core must abort."""
        recalled = []
        for entry in entries:
            entry.paused = True
            if entry.location is RequestLocation.CORE and not entry.aborted:
                entry.location = RequestLocation.RECALLED
                recalled.append(entry.request.request_id)
        return recalled

    def recall_all(self) -> list[int]:
        """Recall every request without pausing it. Returns the ids of those that the core must abort."""
        recalled = [entry for entry in self if entry.location is RequestLocation.CORE and not entry.aborted]
        for entry in recalled:
            entry.location = RequestLocation.RECALLED
        return [entry.request.request_id for entry in recalled]

    def resume(self, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
        """End the pause of requests. Returns those that can be sent to the core at once."""
        resumed = list(entries)
        for entry in resumed:
            entry.paused = False
        return [entry for entry in resumed if entry.location is RequestLocation.FRONT_END]

    def abort(self, entries: Iterable[JournalEntry]) -> tuple[list[int], list[RequestOutput]]:
        """Abort requests. Returns the ids of those that the core must abort, and the last outputs of the others."""
        in_core, ended = [], []
        for entry in entries:
            request_id, entry.aborted = entry.request.request_id, True
            if entry.location is RequestLocation.CORE:
                in_core.append(request_id)
            elif entry.location is RequestLocation.FRONT_END:
                ended.append(terminal_output(request_id, "abort"))
        return in_core, ended

    def record(self, step: StepOutputs) -> list[JournalEntry]:
        """Record a step's outputs, with their times. Returns the recalled requests that have left the core with it.

        The last outputs of these are removed from `step`. Costs one dictionary look-up per request.
        """
        self._num_steps += 1
        entries = self._entries
        left: list[JournalEntry] = []
        for output in step.outputs:
            entry = entries.get(output.request_id)
            if entry is None:
                continue
            if output.time is not None:
                output.time += entry.sent_time
            if not output.finished:
                entry.token_ids += output.output_tokens
            elif entry.location is RequestLocation.RECALLED and output.finish_reason == "abort" and not entry.aborted:
                entry.location = RequestLocation.FRONT_END
                left.append(entry)
            else:
                del entries[output.request_id]
        if left:
            ids = {entry.request.request_id for entry in left}
            step.outputs = [output for output in step.outputs if output.request_id not in ids]
        return left

    def core_died(self, in_step: Collection[int] | None, *, killed: bool) -> list[RequestOutput]:
        """Recall every request from a core that died in a step of the requests `in_step`. `killed`: by another
        process.

        `in_step` is None if the core ended because of another core, or its host is gone: then no request is suspected.
        Returns the last outputs of the requests that do not continue: those aborted, and those too many cores died on.
        """
        in_core = [entry for entry in self if entry.location is not RequestLocation.FRONT_END]
        # If the core died between steps, a request that it had just received may be the cause.
        suspects: set[JournalEntry] = set()
        if in_step is not None:
            suspects.update(self.entries(in_step) or [entry for entry in in_core if self._was_recently_sent(entry)])
            suspects &= set(in_core)
        for entry in suspects:
            entry.note_crash()
        # A request may also crash a core outside of steps, for example by its grammar, so losses are limited as well.
        for entry in in_core:
            if entry not in suspects:
                entry.note_loss()
        ended = []
        for entry in in_core:
            entry.location = RequestLocation.FRONT_END
            if entry.aborted:
                ended.append(terminal_output(entry.request.request_id, "abort"))
            elif entry in suspects and entry.crashes >= (_MAX_KILLS if killed else _MAX_CRASHES):
                error = f"this request is not tried again: the engine died {entry.crashes} times in a row computing it"
                ended.append(terminal_output(entry.request.request_id, "error", error, is_poison=True))
        return ended

    def _was_recently_sent(self, entry: JournalEntry) -> bool:
        """Return whether the core may have died while it received the request, because no steps have passed since."""
        is_new = entry.steps_at_start >= self._num_steps - 1 or entry.request.sampling_params.grammar is not None
        return is_new and len(entry.token_ids) == entry.tokens_at_start

    def end_all(self, error: str) -> list[RequestOutput]:
        """End all live requests with `error`. Returns their last outputs."""
        return [terminal_output(id, "error", error) for id in self._entries]


class ReplicaEvents(NamedTuple):
    """Callbacks of a replica to its `CoreManager`."""

    on_outputs: Callable[["Replica", StepOutputs], object]
    """A step has outputs to deliver."""
    on_step: Callable[[], object]
    """The core has reported a step, and its outputs were delivered."""
    on_ready: Callable[["Replica", bool, int], object]
    """A core serves. Arguments: whether it is a restarted one, and the number of requests with tokens that
    continue."""
    on_unavailable: Callable[["Replica"], object]
    """The core is gone, and the next one does not serve yet. Called repeatedly."""
    on_end: Callable[["Replica", Failed], object]
    """The replica has no core, and none will be started."""


class Replica:
    """A supervised core and the journal of its requests. All calls come from one thread.

    Requests of a core that dies continue in the next core, unless `Relocation` moves them to other replicas.
    """

    def __init__(
        self,
        config: Config,
        share: HostShare,
        events: "ReplicaEvents",
        *,
        lockstep: "Sequence[Replica] | None",
        rendezvous: LockstepRendezvous | None,
        hosts: "CoreHosts | None",
        adapters: AdapterLedger,
        cpus: Collection[int],
        starts: bool = True,
    ) -> None:
        """Start the core and return at once; see `Supervisor`. Without `starts`, the replica begins asleep.

        The memory in `share` is for the first core, which loads at the same time as those of other replicas.
        `lockstep` lists all replicas that compute in lockstep, and `rendezvous` is their rendezvous. `hosts` may run
        the core. `adapters` lists the adapters that each core must have, `cpus` the CPUs that a core on this host may
        use.
        """
        self.number = share.replica
        self.ready: Ready | None = None
        """The `Ready` message of the latest core; None before the first."""
        self.journal = Journal()
        self._lockstep: Sequence[Replica] = (self,) if lockstep is None else lockstep
        """Replicas in lockstep. While one of them has work, all must make progress."""
        self._events = events
        self._adapters = adapters
        self._log_level: str | None = None
        """Log level set after the start; None: as configured."""
        self._is_asleep = not starts
        """Whether requests wait until `wake_up`."""
        self._awaits_release = False
        """Whether the core has yet to confirm that it has freed its cache."""
        self._share = share
        self._cpus = cpus
        self._rendezvous = rendezvous
        self._hosts = hosts if hosts is not None and hosts.runs(self.number) else None
        self.supervisor = Supervisor(config, self, core_name(config, self.number), starts=starts)

    @property
    def is_serving(self) -> bool:
        """Whether a core is ready."""
        return self.supervisor.is_serving

    def shutdown(self) -> None:
        """Ask the core to abort its requests and end, without waiting."""
        self.supervisor.begin_shutdown([Shutdown()])

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, requests: Sequence[AddRequest]) -> list[JournalEntry]:
        """Send requests, at once or when a core serves. Returns their entries in the journal."""
        entries = self.journal.add(requests)
        self._send(entries)
        return entries

    def take_over(self, entries: Sequence[JournalEntry]) -> None:
        """Continue requests that another replica exported."""
        self.journal.import_entries(entries)
        self._send(entries)

    def abort(self, request_ids: Collection[int]) -> None:
        """Abort the given requests, as far as they belong to this replica."""
        in_core, ended = self.journal.abort(self.journal.entries(request_ids))
        if in_core:
            self.supervisor.send([AbortRequests(in_core)])
        self._deliver(ended)

    def pause(self, request_ids: Collection[int]) -> None:
        """Recall requests from the core until `resume`."""
        recalled = self.journal.recall(self.journal.entries(request_ids))
        if recalled:
            self.supervisor.send([AbortRequests(recalled)])

    def resume(self, request_ids: Collection[int]) -> None:
        """Continue paused requests."""
        self._send(self.journal.resume(self.journal.entries(request_ids)))

    def sleep(self, *, ends_core: bool) -> None:
        """Recall all requests, and make them and later ones wait until `wake_up`. Then end the core or free its
        cache."""
        self._is_asleep, self._awaits_release = True, not ends_core and self.is_serving
        recalled = self.journal.recall_all()
        if recalled:
            self.supervisor.send([AbortRequests(recalled)])
        if ends_core:
            self.supervisor.suspend()
        else:
            self.supervisor.send([ReleaseCache()])

    def on_cache_released(self) -> None:
        """Note that the core has freed its cache."""
        self._awaits_release = False

    @property
    def is_at_rest(self) -> bool:
        """Whether `sleep` is complete: the core has ended, or freed its cache."""
        if self.supervisor.is_suspended:
            return not self.supervisor.has_core
        return not self.is_serving or not (self._awaits_release or self.journal.has_work)

    def begin_successor(self, config: Config) -> "Successor":
        """Start a core with another configuration in addition to the present one, for `succeed`."""
        share = self._share._replace(available_bytes=None)

        def new_core(config: Config) -> CoreProcess:
            return CoreProcess(self._adapters.config_of_core(config), share, cpus=self._cpus)

        return Successor(config, self.supervisor.name, new_core)

    def succeed(self, successor: "Successor") -> None:
        """Replace the core of this sleeping replica by that of `successor`, which serves, and continue all
        requests."""
        assert successor.ready is not None
        self.supervisor.retire()
        self.supervisor = successor.supervisor
        self.supervisor.serve_for(self)
        self._is_asleep = False
        self.on_core_ready(successor.ready, again=True)

    def wake_up(self) -> None:
        """Start a core if it was ended, and continue all requests after their last token."""
        self._is_asleep = False
        self.supervisor.resume()
        self._send(list(self.journal))

    def set_log_level(self, level: str) -> None:
        """Set the log level of the core, and of later cores."""
        self._log_level = level
        self.supervisor.send([SetLogLevel(level)])

    def send_command(self, message: Inbound) -> None:
        """Send the core a message that concerns no request. It is lost if no core serves."""
        self.supervisor.send([message])

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Deliver outputs that were created here, not by a core."""
        if outputs:
            step = StepOutputs(outputs)
            self.journal.record(step)
            self._events.on_outputs(self, step)

    def _send(self, entries: Sequence[JournalEntry]) -> None:
        """Send requests to the core if it serves; otherwise they wait."""
        if self.is_serving and entries and not self._is_asleep:
            if not self.has_work:
                for replica in self._lockstep:
                    replica.supervisor.note_work()
            self.supervisor.send(self.journal.send(entries))

    # -- events of the supervisor -------------------------------------------------------------------------------

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]") -> CoreLink:
        """Start a core."""
        name = core_name(config, self.number)
        core: CoreHandle
        lockstep_member = None if self._rendezvous is None else self._rendezvous.new_member(self.number)
        if self._hosts is not None:
            core = self._hosts.core(self.number, name, config.num_kvcache_blocks, lockstep_member)
        else:
            share, self._share = self._share, self._share._replace(available_bytes=None)
            config = self._adapters.config_of_core(config)
            core = CoreProcess(config, share, cpus=self._cpus, lockstep_member=lockstep_member)
        return CoreLink(core, context, name)

    @property
    def live(self) -> Collection[int]:
        """Ids of the requests that have not had their terminal output."""
        return self.journal.ids

    @property
    def has_work(self) -> bool:
        """Whether outputs of the core are pending, or of a core that it computes in lockstep with."""
        return any(replica.journal.has_work for replica in self._lockstep)

    @property
    def waits_for_peers(self) -> bool:
        """Whether the core waits for cores of other replicas, and none of them waits for it."""
        return self._rendezvous is not None and self._rendezvous.waits_for_peers(self.number)

    @property
    def awaits_peer_host(self) -> bool:
        """Whether the core of another replica in lockstep waits until its host joins."""
        return any(replica.supervisor.awaits_host for replica in self._lockstep if replica is not self)

    def on_step(self, step: StepOutputs) -> None:
        """Record and deliver a step's outputs."""
        recalled = self.journal.record(step)
        self._events.on_outputs(self, step)
        self._send(recalled)
        self._events.on_step()

    def on_adapter_changed(self, answer: AdapterChanged) -> None:
        """Record the core's answer about an adapter."""
        self._adapters.answered(self.number, answer)

    def on_core_ready(self, ready: Ready, *, again: bool) -> None:
        """Send a ready core the adapters that it lacks, and then the waiting requests."""
        if self._hosts is not None:
            # CPU numbers of another host have no meaning for the processes of this host.
            ready = Ready(msgspec.structs.replace(ready.model, own_cpus=[]), ready.startup_seconds)
        self.ready = ready
        resumed = sum(bool(entry.token_ids) for entry in self.journal)
        if again:
            others = len(self.live) - resumed
            name = self.supervisor.name
            logger.warning("%s serves again; requests that continue: %d, that begin: %d", name, resumed, others)
        self._events.on_ready(self, again, resumed)
        if self._log_level is not None:
            self.supervisor.send([SetLogLevel(self._log_level)])
        self.supervisor.send(self._adapters.missing_messages())
        self._send(list(self.journal))

    def on_core_death(self, in_step: Collection[int] | None, *, killed: bool) -> bool:
        """Recall all requests and end those that do not continue. Returns whether a request was found to be the
        cause."""
        self._adapters.core_died(self.number, self.supervisor.name)
        if killed and in_step is None and self._rendezvous is not None and self._rendezvous.is_member(self.number):
            # If only the connection to its host is lost, the core lives on, and its peers would wait for it.
            for replica in self._lockstep:
                if replica is not self and self._rendezvous.is_member(replica.number):
                    replica.supervisor.end_with_peer(self.supervisor.name)
        ended = self.journal.core_died(in_step, killed=killed)
        self._deliver(ended)
        return any(output.is_poison for output in ended)

    def on_unavailable(self) -> None:
        """Report that the core is unavailable, so that waiting requests may be moved to other replicas."""
        self._events.on_unavailable(self)

    def on_end(self, failure: Failed) -> None:
        """End every live request with an error, because no other core will be started."""
        self._events.on_end(self, failure)
        self._deliver(self.journal.end_all(failure.error))


class Successor:
    """The `Keeper` of a core with new weights, before it has requests."""

    has_work = waits_for_peers = awaits_peer_host = False

    def __init__(self, config: Config, name: str, new_core: Callable[[Config], CoreHandle]) -> None:
        """Start the core. Raises `ValueError`, `OSError` if it cannot be started."""
        self.ready: Ready | None = None
        """The `Ready` message of its core; None before that."""
        self.failure: Failed | None = None
        """Reason why there is no core; None while there is one."""
        self._name, self._new_core = name, new_core
        self.supervisor = Supervisor(config, self, name)

    @property
    def live(self) -> Collection[int]:
        """Ids of live requests: there are none."""
        return ()

    def new_core(self, config: Config, context: "zmq.Context[zmq.Socket[bytes]]", /) -> CoreLink:
        """See `Keeper`."""
        return CoreLink(self._new_core(config), context, self._name)

    def on_core_ready(self, ready: Ready, /, *, again: bool) -> None:
        """Note that the core serves."""
        self.ready = ready

    def on_end(self, failure: Failed, /) -> None:
        """Note why the core does not serve."""
        self.failure = failure

    def on_core_death(self, in_step: Collection[int] | None, /, *, killed: bool) -> bool:
        """See `Keeper`."""
        return False

    def on_step(self, step: StepOutputs, /) -> None:
        """See `Keeper`."""

    def on_adapter_changed(self, answer: AdapterChanged, /) -> None:
        """See `Keeper`."""

    def on_cache_released(self) -> None:
        """See `Keeper`."""

    def on_unavailable(self) -> None:
        """See `Keeper`."""
