"""`LocalRanks`: the ranks behind the first as processes of this host, told of steps through shared memory."""

import os
from contextlib import ExitStack
from pathlib import Path

from engine.config import Config
from engine.seats import Seat
from engine.worker.control_groups import available_host_memory
from engine.worker.rank_messages import RankLaunch, SharedMemory
from engine.worker.rank_places import EndTaker, StepWriter
from engine.worker.rank_proc import RankProc
from engine.worker.shard import HostShare, Shard
from engine.worker.step_ends import StepEnds
from engine.worker.step_ring import StepRing


class LocalRanks:
    """See `RankPlaces`."""

    def __init__(self, config: Config, directory: str, path: Path, seat: Seat | None, share: HostShare) -> None:
        """Start the processes and return at once: they load the checkpoint `path`.

        `directory` is the caller's own, private to its user; `seat`, if any, the caller's among replicas in lockstep;
        `share` its part of the host. Raises `OSError` where a process cannot be started.
        """
        size = config.parallel_config.tensor_parallel_size
        ring_descriptor, self._ring = StepRing.create(size - 1)
        ends_descriptor, self._ends = StepEnds.create(size - 1)
        self._memory = os.memfd_create("kaon-collectives")
        store = (Path(directory) / "ranks").as_uri()
        available = available_host_memory() if share.available_bytes is None else share.available_bytes
        self.shard = Shard(
            rank=0,
            size=size,
            local_rank=0,
            local_size=size,
            store=store,
            memory=self._memory,
            available_bytes=available // size,
        )
        seat_memory = () if seat is None else seat.memory
        self.links: list[RankProc] = []
        with ExitStack() as stack:
            stack.callback(os.close, ring_descriptor)
            stack.callback(os.close, ends_descriptor)
            for rank in range(1, size):
                launch = RankLaunch(
                    name=f"kaon-worker-{share.replica}.{rank}",
                    shard=self.shard._replace(rank=rank, local_rank=rank),
                    config=config.model_dump_json(),
                    path=str(path),
                    steps=SharedMemory(ring_descriptor, ends_descriptor),
                    share=share,
                    seat=seat,
                )
                self.links.append(RankProc(launch, (ring_descriptor, ends_descriptor, self._memory, *seat_memory)))

    def open_steps(self, timeout: float) -> tuple[StepWriter, EndTaker]:
        """See `RankPlaces`."""
        return self._ring, self._ends

    def part(self, why: str) -> None:
        """Nothing: processes of this host end with it."""

    def close(self) -> None:
        """See `RankPlaces`."""
        os.close(self._memory)
