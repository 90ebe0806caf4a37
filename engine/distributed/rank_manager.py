"""`AsyncIOProcManager`: the ranks other than 0, from their start to their end, wherever they run.

Owned by the engine core, in which rank 0 runs. All ranks start alike: a `Cluster` says on which host each runs, ranks
of this host are started here (`RankProc`), those of others by their host's agent (`RemoteRank`), and a `StepTransport`
carries steps and reports. A thread receives the ranks' messages and notices at once when a rank is gone: no step is
possible without it, so the core ends, with a sentence that names the rank.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeVar

from engine.config.config import Config
from engine.distributed.cluster import Cluster, place_evenly
from engine.distributed.host_resources import HostShare, Shard, available_host_memory
from engine.distributed.lockstep import LockstepMember
from engine.distributed.rank_link import (
    Allocate,
    FromRank,
    Join,
    RankError,
    RankFailed,
    RankLaunch,
    RankLink,
    RankLoaded,
    RankProc,
    RankRaised,
    RankServes,
    RankSized,
)
from engine.distributed.rank_steps import RankGroup, RankSteps
from engine.distributed.remote_ranks import RankNetwork
from engine.distributed.step_transport import SharedMemorySteps, StepTransport
from models.errors import first_line

_END_SECONDS = 2.0
_LEAVE_SECONDS = 2.0
"""For rank 0 to leave a step or a start that another rank failed in, before the core ends."""
_Message = TypeVar("_Message", bound=FromRank)


class AsyncIOProcManager:
    """Ranks 1 to N - 1. All methods but `announce_shutdown` are called by the thread that runs the steps."""

    def __init__(
        self,
        config: Config,
        directory: str,
        fail: Callable[..., object],
        path: Path,
        lockstep_member: LockstepMember | None = None,
        share: HostShare = HostShare(),  # noqa: B008, immutable
    ) -> None:
        """Start the processes and return at once: they load the checkpoint `path` while rank 0 does.

        `directory` is the caller's own, private to its user; `lockstep_member` is its replica among those that
        compute in lockstep, `share` its share of the host. `fail` ends this process with a sentence, and whether a
        rank was killed or the user is at fault, from any thread. Raises `ValueError`, a sentence, for what the user
        can mend, and `OSError` where a process cannot be started.
        """
        self._timeout = config.parallel_config.rank_start_timeout
        self._fail = fail
        self._steps: RankSteps | None = None
        self._group: RankGroup | None = None
        self._failed: set[RankLink] = set()
        self._network: RankNetwork | None = None
        self._links: list[RankLink] = []
        with ExitStack() as undo:
            cluster = _cluster_of(config)
            undo.callback(cluster.close)
            memory: int | None = None
            if any(placement.node for placement in cluster.placements):
                self._network = RankNetwork(config, path, cluster)
                undo.callback(self._network.close)
                self._transport: StepTransport = self._network.transport
                store = self._network.store
            else:
                self._transport = SharedMemorySteps.create(len(cluster.placements))
                undo.callback(self._transport.close)
                memory = os.memfd_create("kaon-collectives")
                undo.callback(os.close, memory)
                store = (Path(directory) / "ranks").as_uri()
            num_local = cluster.placements[0].num_local
            available = available_host_memory() if share.available_bytes is None else share.available_bytes
            self.shard = Shard(
                rank=0,
                size=len(cluster.placements),
                local_rank=0,
                local_size=num_local,
                store=store,
                memory=memory,
                available_bytes=available // num_local,
            )
            """The shard of the caller, which is rank 0."""
            inherited = (
                *self._transport.descriptors,
                *(() if memory is None else (memory,)),
                *(() if lockstep_member is None else lockstep_member.memory),
            )
            for rank, (node, local_rank, local_size) in list(enumerate(cluster.placements))[1:]:
                launch = RankLaunch(
                    name=f"kaon-worker-{share.replica}.{rank}",
                    shard=self.shard._replace(rank=rank, local_rank=local_rank, local_size=local_size),
                    config=config.model_dump_json(),
                    path=str(path),
                    steps=self._transport.address,
                    share=share,
                    lockstep_member=lockstep_member,
                )
                if self._network is not None and node:
                    self._links.append(self._network.links[rank])
                    self._links[-1].send(launch)
                else:
                    self._links.append(RankProc(launch, inherited))
                undo.callback(self._links[-1].close, _END_SECONDS)
            if self._network is not None:
                self.shard = self.shard._replace(listener=self._network.listener.detach())
                cluster.start(self._network.joining, self._network.router.turn_away)
            self._resources = undo.pop_all()
        self._messages: dict[int, SimpleQueue[FromRank | None]] = {link.rank: SimpleQueue() for link in self._links}
        self._closing, self._wake = os.pipe()
        self._thread = Thread(target=self._receive, name="ranks", daemon=True)
        self._thread.start()

    def wait_loaded(self) -> tuple[frozenset[int], int]:
        """Wait until every rank has its shard; the CPUs that they keep for themselves, and their parameters.

        Raises `RankError` with a rank's reason, or when it takes too long.
        """
        loaded = self._expect_all(RankLoaded, "load its part of the model")
        cpus = frozenset(cpu for each in loaded for cpu in each.own_cpus)
        return cpus, sum(each.num_parameters for each in loaded)

    def join(self, group: RankGroup, join_replicas: Callable[[], None] | None = None) -> None:
        """Have all ranks, this one included, join each other. Raises `RankError` where they do not.

        `join_replicas`: joins the ranks of all replicas, before the group's own; None: replicas do not meet.
        """
        self._group = group
        self._send_all(Join())
        try:
            if join_replicas is not None:
                join_replicas()
            group.join()
        except RuntimeError as error:
            raise RankError(f"the tensor-parallel ranks did not meet: {first_line(error)}") from error

    def agree(self, num_blocks: int, num_slots: int) -> tuple[int, int]:
        """Blocks and slots of the KV cache that every rank has room for; the other ranks allocate theirs.

        `num_blocks` and `num_slots` are what this rank has room for.
        """
        found = self._expect_all(RankSized, "meet the others")
        num_blocks = min(num_blocks, *(each.num_blocks for each in found))
        num_slots = min(num_slots, *(each.num_slots for each in found))
        self._send_all(Allocate(num_blocks, num_slots))
        return num_blocks, num_slots

    def open_steps(self, group: RankGroup) -> RankSteps:
        """Wait until the other ranks serve; they compute each step that the caller begins by the result."""
        self._expect_all(RankServes, "warm up")
        missing = self._transport.missing_rank(self._timeout)
        if missing is not None:
            title, where = self._links[missing - 1].title, self._transport.where
            raise RankError(f"{title} does not reach {where}; open it to the hosts")
        self._steps = RankSteps(self._transport, self.shard.size, group, self._fail)
        return self._steps

    def announce_shutdown(self, why: str = "") -> None:
        """Notify the other hosts that no other engine core will come, so that they end as well.

        `why` is a sentence, or "" at an orderly end. Called by any thread.
        """
        if self._network is not None:
            self._network.router.announce_shutdown(why)

    def close(self) -> None:
        """End the processes, within seconds."""
        os.close(self._wake)
        self._thread.join()
        self._resources.close()
        if self._group is not None:
            self._group.close()
        os.close(self._closing)

    def _send_all(self, message: Join | Allocate) -> None:
        for link in self._links:
            link.send(message)

    def _expect_all(self, kind: type[_Message], what: str) -> list[_Message]:
        """The next message of every rank, each of type `kind`; `what` they do until then, as the end of "did not"."""
        deadline = time.monotonic() + self._timeout
        return [self._expect(link, kind, what, deadline) for link in self._links]

    def _expect(self, link: RankLink, kind: type[_Message], what: str, deadline: float) -> _Message:
        try:
            message = self._messages[link.rank].get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise RankError(
                f"{link.title} did not {link.missing_step or what} within rank_start_timeout {self._timeout:g} s of "
                "the first"
            ) from None
        if isinstance(message, RankFailed):
            raise RankError(f"{link.title}: {message.error}")
        assert isinstance(message, kind), message
        return message

    # -- the thread that receives their messages ------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle the messages of the ranks, until `close`, or until one is gone."""
        due: _Due | None = None
        while True:
            timeout = None if due is None else due.at - time.monotonic()
            links = [link for link in self._links if link not in self._failed]
            readable = _wait_readable(links, self._closing, timeout)
            if self._closing in readable:
                return
            if due is not None and time.monotonic() >= due.at:
                if self._is_stuck(due.step):
                    self._fail(due.sentence, usage=due.usage)
                due = None
            for link in links:
                if link.descriptor in readable:
                    due = self._handle(link, link.receive()) or due

    def _handle(self, link: RankLink, message: FromRank | None) -> "_Due | None":
        """Handle a message of a rank, None where it is gone; when and why the core must end for it."""
        if message is None:
            how, killed = link.exit_reason()
            self._fail(f"{link.title} {how}", killed)
        elif isinstance(message, RankRaised):
            sentence = f"{link.title} failed alone in a step: {message.error}"
            return _Due(time.monotonic() + _LEAVE_SECONDS, sentence, step=message.number)
        else:
            self._messages[link.rank].put(message)
            if isinstance(message, RankFailed):
                self._failed.add(link)
                # Rank 0 may load for minutes yet; if it finds the same fault itself, it reports it in its own words.
                sentence = f"{link.title}: {message.error}"
                return _Due(time.monotonic() + _LEAVE_SECONDS, sentence, usage=message.usage)
        return None

    def _is_stuck(self, step: int | None) -> bool:
        """Whether this process still waits for a rank that failed in that step; None: at the start."""
        return step is None or (self._steps is not None and self._steps.is_open(step))


class _Due(NamedTuple):
    """The planned end of this process, unless it leaves the step or the start in which a rank failed by itself."""

    at: float
    """On the monotonic clock."""
    sentence: str
    step: int | None = None
    """Step in which the rank failed; None: it failed at the start."""
    usage: bool = False
    """Whether the user is at fault."""


def _cluster_of(config: Config) -> Cluster:
    """The hosts of the ranks. Of several replicas each has its ranks on one host."""
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
    if not parallel.has_remote_ranks:
        return Cluster(place_evenly(size, 1))
    if parallel.distributed_executor_backend == "ray":
        from engine.distributed.ray_cluster import RayCluster

        return RayCluster(config, size, ranks_each=1, title="ranks", restarts=False)
    return Cluster.of_hosts(parallel, size)


def _wait_readable(links: Sequence[RankLink], wake: int, timeout: float | None) -> list[int]:
    """Block until some of the descriptors are readable, or for `timeout` seconds; those that are."""
    poller = select.poll()
    for descriptor in (wake, *(link.descriptor for link in links)):
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if timeout is None else max(0.0, 1e3 * timeout))]
