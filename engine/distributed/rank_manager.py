"""`AsyncIOProcManager`: starts, watches and ends the ranks other than 0, on all hosts.

Owned by the engine core, in which rank 0 runs. A `Cluster` assigns each rank to a host. Ranks of this host are started
here (`RankProc`), those of other hosts by their host's agent (`RemoteRank`). A `StepTransport` carries steps and
reports. A thread receives the ranks' messages and detects at once that a rank is gone: then no step is possible, so
the core ends, with a sentence that names the rank.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.config.config import Config
from engine.distributed.cluster import Cluster, spread_evenly
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
from engine.distributed.step_transport import SharedMemorySteps, StepTransport
from models.errors import first_line

if TYPE_CHECKING:
    from engine.distributed.remote_ranks import RankNetwork

_END_SECONDS = 2.0
_LEAVE_SECONDS = 2.0
"""Seconds that rank 0 has to leave a step or a start in which another rank failed, before the core ends."""
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
        """Start the processes and return at once. They load the checkpoint `path` at the same time as rank 0.

        `directory` belongs to the caller and is private to its user. `lockstep_member` is the replica among those in
        lockstep, `share` its share of the host. `fail` ends this process, from any thread; its arguments are a
        sentence, and whether a rank was killed or it is a mistake of the user. Raises `ValueError` with a sentence for
        mistakes of the user, and `OSError` if a process cannot be started.
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
            if any(position.node for position in cluster.positions):
                # Imported here, because engines on one host do not need it.
                from engine.distributed import remote_ranks

                self._network = remote_ranks.RankNetwork(config, path, cluster)
                undo.callback(self._network.close)
                self._transport: StepTransport = self._network.transport
                store = self._network.store
            else:
                self._transport = SharedMemorySteps.create(len(cluster.positions))
                undo.callback(self._transport.close)
                memory = os.memfd_create("kaon-collectives")
                undo.callback(os.close, memory)
                store = (Path(directory) / "ranks").as_uri()
            num_local = cluster.positions[0].num_local
            available = available_host_memory() if share.available_bytes is None else share.available_bytes
            self.shard = Shard(
                rank=0,
                size=len(cluster.positions),
                local_rank=0,
                local_size=num_local,
                store=store,
                memory=memory,
                available_bytes=available // num_local,
            )
            """The shard of rank 0, the caller."""
            inherited = (
                *self._transport.descriptors,
                *(() if memory is None else (memory,)),
                *(() if lockstep_member is None else lockstep_member.memory),
            )
            for rank, (node, local_rank, local_size) in list(enumerate(cluster.positions))[1:]:
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
        """Wait until every rank has loaded its shard. Returns the CPUs that they reserve, and their parameters.

        Raises `RankError` with a rank's error, or after the time limit.
        """
        loaded = self._expect_all(RankLoaded, "load its part of the model")
        cpus = frozenset(cpu for each in loaded for cpu in each.own_cpus)
        return cpus, sum(each.num_parameters for each in loaded)

    def join(self, group: RankGroup, join_replicas: Callable[[], None] | None = None) -> None:
        """Connect all ranks, including this one. Raises `RankError` if that fails.

        `join_replicas` connects the ranks of all replicas before those of the group; None without lockstep.
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
        """Agree on the blocks and slots of the KV cache that every rank has room for; the other ranks allocate them.

        `num_blocks` and `num_slots` are the numbers that this rank has room for.
        """
        found = self._expect_all(RankSized, "meet the others")
        num_blocks = min(num_blocks, *(each.num_blocks for each in found))
        num_slots = min(num_slots, *(each.num_slots for each in found))
        self._send_all(Allocate(num_blocks, num_slots))
        return num_blocks, num_slots

    def open_steps(self, group: RankGroup) -> RankSteps:
        """Wait until the other ranks serve. They compute each step that the caller begins on the returned object."""
        self._expect_all(RankServes, "warm up")
        missing = self._transport.missing_rank(self._timeout)
        if missing is not None:
            title, where = self._links[missing - 1].title, self._transport.where
            raise RankError(f"{title} does not reach {where}; open it to the hosts")
        self._steps = RankSteps(self._transport, self.shard.size, group, self._fail)
        return self._steps

    def announce_shutdown(self, why: str = "") -> None:
        """Notify the other hosts that no other engine core will follow, so that they end as well.

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
        """Wait for a message of type `kind` from every rank. `what` they do until then is the end of "did not"."""
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
        """Handle the messages of the ranks until `close`, or until a rank is gone."""
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
        """Handle a message of a rank; None means that it is gone. Returns when and why the core must end, or None."""
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
                # Rank 0 may still load for minutes. If it finds the same fault, it reports it itself.
                sentence = f"{link.title}: {message.error}"
                return _Due(time.monotonic() + _LEAVE_SECONDS, sentence, usage=message.usage)
        return None

    def _is_stuck(self, step: int | None) -> bool:
        """Return whether this process still waits for a rank that failed in `step`; None means at the start."""
        return step is None or (self._steps is not None and self._steps.is_open(step))


class _Due(NamedTuple):
    """The planned end of this process, if it does not leave the step or start in which a rank failed."""

    at: float
    """Time of the end, on the monotonic clock."""
    sentence: str
    step: int | None = None
    """Step in which the rank failed; None: it failed at the start."""
    usage: bool = False
    """Whether it is a mistake of the user."""


def _cluster_of(config: Config) -> Cluster:
    """Return the hosts of the ranks. With several replicas, each has its ranks on one host."""
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
    if not parallel.has_remote_ranks:
        return Cluster(spread_evenly(size, 1))
    if parallel.distributed_executor_backend == "ray":
        from engine.distributed.ray_cluster import RayCluster

        return RayCluster(config, size, ranks_each=1, title="ranks", restarts=False)
    return Cluster.of_hosts(parallel, size)


def _wait_readable(links: Sequence[RankLink], wake: int, timeout: float | None) -> list[int]:
    """Wait until any of the descriptors is readable, or for `timeout` seconds. Returns the readable ones."""
    poller = select.poll()
    for descriptor in (wake, *(link.descriptor for link in links)):
        poller.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poller.poll(None if timeout is None else max(0.0, 1e3 * timeout))]
