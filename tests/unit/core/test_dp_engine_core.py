"""The busy loops of replicas in lockstep, over stub models in threads: which compute, which sleep, and which wake
others."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.core.dp_engine_core import DPEngineCoreProc, Lockstep
from engine.core.scheduler import Scheduler
from engine.core.sockets import Wake
from engine.distributed.lockstep import PeerLostError
from engine.messages import AbortRequests, Shutdown, StepOutputs, Stopped
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.errors import ReplicaLeft
from tests.unit.core_bench import BLOCK_SIZE, NUM_BLOCKS, StubRunner, ends, outputs_of

WAIT_SECONDS = 60.0


class Inbox(SimpleQueue[Any]):
    """A core's input queue, which knows whether the core sleeps: it waits here after it has processed all messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = False
        self._taken = 0
        self.sent = 0

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._lock:
            self.sent += 1
            super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._lock:
            self._waits = True
        try:
            item = super().get(block, timeout)
        finally:
            with self._lock:
                self._waits = False
        return self._note(item)

    def get_nowait(self) -> Any:
        return self._note(super().get_nowait())

    def _note(self, item: Any) -> Any:
        with self._lock:
            self._taken += 1
        return item

    @property
    def is_waited_at(self) -> bool:
        with self._lock:
            return self._waits and self._taken == self.sent


class Runner(StubRunner):
    """Records every pass: its own number of tokens, and that of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_across_dp: tuple[int, ...] = ()
        self.passes: list[tuple[int, tuple[int, ...]]] = []

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        self.passes.append((batch.total_tokens_num, self.tokens_across_dp))
        return super().forward(batch)

    def dummy_prefill(self) -> None:
        self.passes.append((0, self.tokens_across_dp))


class Replicas:
    """Two engine cores, their loops in threads."""

    def __init__(self, async_scheduling: str = "off") -> None:
        self._said = [0, 0]
        self._barrier = threading.Barrier(2, timeout=WAIT_SECONDS)
        self.left: list[int] = []
        self.parted: list[int] = []
        self.rings: list[tuple[int, int]] = []
        self.runners = [Runner(), Runner()]
        config = Config.model_validate(
            {
                "num_kvcache_blocks": NUM_BLOCKS,
                "max_num_seqs": 8,
                "eos_token_id": 2,
                "async_scheduling": async_scheduling,
            }
        )
        self.locksteps = [Lockstep(self.World(self, replica), self.Peers(self, replica)) for replica in range(2)]
        self.inboxes = [Inbox(), Inbox()]
        self.cores = [
            DPEngineCoreProc(config, Scheduler(config), runner, inbox, SimpleQueue(), lockstep)
            for runner, inbox, lockstep in zip(self.runners, self.inboxes, self.locksteps, strict=True)
        ]
        self.threads = ThreadPoolExecutor(2)
        self.loops: list[Any] = []

    class Peers:
        def __init__(self, replicas: "Replicas", own: int) -> None:
            self._replicas, self._own = replicas, own
            self.gone: int | None = None

        def ring(self, number: int) -> None:
            self._replicas.rings.append((self._own, number))
            self._replicas.cores[1 - self._own].input_queue.put(Wake(number))

        def announce_shutdown(self) -> None:
            self._replicas.parted.append(self._own)

        def wait_gone(self, timeout: float) -> int | None:
            return self.gone

    class World:
        def __init__(self, replicas: "Replicas", own: int) -> None:
            self._replicas, self._own = replicas, own
            self.notifies = False
            """Whether the others are notified when this one leaves."""
            self.left_by: int | None = None

        def agree(self, own: int) -> tuple[int, ...]:
            said, barrier = self._replicas._said, self._replicas._barrier
            if self.left_by is not None:
                raise ReplicaLeft(self.left_by)
            said[self._own] = own
            try:
                barrier.wait()
                reported = tuple(said)
                barrier.wait()
            except threading.BrokenBarrierError as error:
                raise RuntimeError("connection closed by peer") from error
            return reported

        def leave(self) -> bool:
            self._replicas.left.append(self._own)
            return self.notifies

    def start(self) -> None:
        self.loops = [self.threads.submit(core.busy_loop) for core in self.cores]

    def add(self, replica: int, seq_id: int, max_tokens: int = 4) -> None:
        seq = Sequence([10] * 3, BLOCK_SIZE, SamplingParams(max_tokens=max_tokens), id=seq_id)
        self.cores[replica].input_queue.put(seq)

    def end(self, *replicas: int) -> list[list[StepOutputs]]:
        """Shut these down. Returns the messages of both, without the final `Stopped`."""
        for replica in replicas:
            self.cores[replica].input_queue.put(Shutdown())
        for loop in self.loops:
            loop.result(WAIT_SECONDS)
        reported = []
        for core in self.cores:
            messages = []
            while not core.output_queue.empty():
                messages.append(core.output_queue.get())
            assert messages.pop() == Stopped()
            core.scheduler.check_integrity()
            reported.append(messages)
        return reported

    def wait_asleep(self) -> None:
        """Wait until no replica has work, and no message is in transit."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._all_sleep():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def _all_sleep(self) -> bool:
        """Both together: a replica that slept when the other was checked has received no message meanwhile."""
        sent = [inbox.sent for inbox in self.inboxes]
        return all(inbox.is_waited_at for inbox in self.inboxes) and sent == [inbox.sent for inbox in self.inboxes]


@pytest.fixture(params=["off", "on"], ids=["waiting", "ahead"])
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    made = Replicas(request.param)
    yield made
    made._barrier.abort()
    for core in made.cores:
        core.input_queue.put(Shutdown())
    made.threads.shutdown()


def test_an_idle_replica_computes_a_dummy_for_each_step_of_the_other(replicas: Replicas) -> None:
    replicas.start()
    replicas.wait_asleep()
    replicas.add(0, 7, max_tokens=5)
    replicas.wait_asleep()
    assert replicas.runners[0].passes == [(3, (3, 0)), *[(1, (1, 0))] * 4]
    assert replicas.runners[1].passes == [(0, (3, 0)), *[(0, (1, 0))] * 4]
    reported = replicas.end(0, 1)
    assert ends(reported[0]) == {7: "max_tokens"}
    assert outputs_of(reported[1], 7) == []


def test_busy_replicas_compute_each_pass_together(replicas: Replicas) -> None:
    for replica in range(2):
        for seq_id in range(3):
            replicas.add(replica, 10 * replica + seq_id, max_tokens=3 + replica)
    replicas.start()
    replicas.wait_asleep()
    passes = [runner.passes for runner in replicas.runners]
    assert [reported for _, reported in passes[0]] == [reported for _, reported in passes[1]]
    for replica, own in enumerate(passes):
        assert all(tokens == reported[replica] for tokens, reported in own)
    reported = replicas.end(0, 1)
    assert ends(reported[0]) == dict.fromkeys(range(3), "max_tokens")
    assert ends(reported[1]) == dict.fromkeys(range(10, 13), "max_tokens")


def test_all_sleep_when_none_has_work_and_one_that_gets_some_wakes_the_others_once(replicas: Replicas) -> None:
    replicas.start()
    replicas.wait_asleep()
    before = [lockstep.round for lockstep in replicas.locksteps]
    time.sleep(0.2)
    assert [lockstep.round for lockstep in replicas.locksteps] == before == [1, 1]
    for count, replica in enumerate((0, 1, 1, 0)):
        replicas.add(replica, count)
        replicas.wait_asleep()
        assert [by for by, _ in replicas.rings] == [0, 1, 1, 0][: count + 1]
    reported = replicas.end(0, 1)
    assert {**ends(reported[0]), **ends(reported[1])} == dict.fromkeys(range(4), "max_tokens")


def test_a_ring_of_an_earlier_round_wakes_no_replica(replicas: Replicas) -> None:
    """The message may be late: both had work at the same time, and each woke the other."""
    replicas.start()
    replicas.wait_asleep()
    replicas.add(0, 1)
    replicas.wait_asleep()
    before = [lockstep.round for lockstep in replicas.locksteps]
    for number in range(before[0]):
        replicas.cores[1].input_queue.put(Wake(number))
    replicas.wait_asleep()
    assert [lockstep.round for lockstep in replicas.locksteps] == before
    replicas.add(1, 2)  # It still receives messages.
    replicas.wait_asleep()
    assert ends(replicas.end(1)[1]) == {2: "max_tokens"}


def test_abort_is_answered_in_its_sleep(replicas: Replicas) -> None:
    replicas.start()
    replicas.wait_asleep()
    replicas.cores[1].input_queue.put(AbortRequests([5]))
    replicas.wait_asleep()
    replicas.end(0)


@pytest.mark.parametrize("while_busy", [False, True])
def test_replicas_end_together_whichever_is_asked(replicas: Replicas, while_busy: bool) -> None:
    if while_busy:
        replicas.add(1, 3, max_tokens=100)
        replicas.add(0, 4, max_tokens=100)
        replicas.runners[0].on_step = lambda step, batch: (
            replicas.cores[0].input_queue.put(Shutdown()) if step == 5 else None
        )
        replicas.start()
        reported = replicas.end()
        assert ends(reported[1]) == {3: "abort"}
        assert ends(reported[0]) == {4: "abort"}
    else:
        replicas.start()
        replicas.wait_asleep()
        reported = replicas.end(0)
        assert [ends(messages) for messages in reported] == [{}, {}]


def test_a_step_that_raises_ends_the_core_since_the_others_are_still_in_it(replicas: Replicas) -> None:
    def fail(step: int, batch: ScheduledBatch) -> None:
        raise ValueError("division by cucumber")

    replicas.runners[0].on_step = fail
    replicas.start()
    replicas.wait_asleep()
    replicas.add(0, 1)
    with pytest.raises(RuntimeError, match="a step failed that all replicas compute together: division by cucumber"):
        replicas.loops[0].result(WAIT_SECONDS)
    assert replicas.cores[0]._record.read() == [
        1
    ]  # The process that starts another core knows which requests to compute alone.


def test_one_whose_step_raises_has_the_others_end_and_learns_nothing_of_their_ends(replicas: Replicas) -> None:
    """They end after it; a replica that seems to have ended first would take the blame."""

    def fail(step: int, batch: ScheduledBatch) -> None:
        raise ValueError("division by cucumber")

    replicas.runners[0].on_step = fail
    replicas.locksteps[0]._world.notifies = True  # type: ignore[attr-defined]
    replicas.locksteps[0].peers.gone = 1  # type: ignore[attr-defined]
    replicas.start()
    replicas.wait_asleep()
    replicas.add(0, 1)
    with pytest.raises(RuntimeError, match="a step failed that all replicas compute together: division by cucumber"):
        replicas.loops[0].result(WAIT_SECONDS)
    assert replicas.left == [0]
    assert replicas.parted == [0]


def test_one_that_hears_that_another_has_left_follows_it(replicas: Replicas) -> None:
    replicas.start()
    replicas.wait_asleep()
    replicas.locksteps[0]._world.left_by = 1  # type: ignore[attr-defined]
    replicas.add(0, 1)
    with pytest.raises(PeerLostError, match="replica 1, with which this one computes in lockstep, is gone"):
        replicas.loops[0].result(WAIT_SECONDS)
    assert replicas.left == []


def test_one_that_cannot_meet_another_that_is_gone_says_so(replicas: Replicas) -> None:
    replicas.start()
    replicas.wait_asleep()
    replicas.locksteps[0].peers.gone = 1  # type: ignore[attr-defined]
    replicas._barrier.abort()
    replicas.add(0, 1)
    with pytest.raises(PeerLostError, match="replica 1, with which this one computes in lockstep, is gone"):
        replicas.loops[0].result(WAIT_SECONDS)
