"""`DPEngineCoreProc`: an engine core that takes each step in lockstep with those of other replicas.

For mixtures of experts whose experts are distributed over replicas: their layers exchange tokens, so a forward pass of
one replica is a pass of all. Before each pass the replicas agree on the number of tokens that each computes. A replica
without tokens computes a dummy batch. If no replica has tokens, all sleep, and a replica that gets work wakes the
others. The agreement is made on the host and needs no sampled tokens, so each replica may launch a step before it has
read the previous one.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Protocol

from engine.batch import ScheduledBatch
from engine.config.config import Config
from engine.core.engine_core import EngineCore
from engine.core.isolation import FailedStep
from engine.core.scheduler import Scheduler
from engine.core.sockets import Incoming, InputQueue, OutputQueue, Wake
from engine.core.step_pipeline import ModelRunnerInterface, OnRead
from engine.distributed.lockstep import PEER_END_SECONDS, PeerLostError, ReplicaLinks
from engine.messages import RequestOutput
from engine.sequence import Sequence
from models.errors import ReplicaLeft

logger = logging.getLogger(__name__)

_SHUTS_DOWN = -1
"""Announced instead of a number of tokens by a replica that shuts down."""
_HEARTBEAT_SECONDS = 1.0
"""Seconds between two messages of a core that computes dummy batches."""


class ReplicasShutdown(Exception):
    """A replica shuts down, and therefore all replicas do."""


class World(Protocol):
    """The group of the first ranks of all replicas: `ReplicaWorld` or `SharedMemoryExchange`."""

    def agree(self, own: int) -> tuple[int, ...]:
        """Wait for all replicas, and return the number of each. Raises `ReplicaLeft` or another `RuntimeError`."""

    def leave(self) -> bool:
        """Leave the group. Returns whether replicas that wait for this one get `ReplicaLeft`."""


class Pass(NamedTuple):
    """The agreement of the replicas about the next pass."""

    num_tokens: tuple[int, ...]
    """Number of tokens of each replica; 0 for a replica that computes a dummy batch."""
    may_replay: bool
    """Whether every replica may replay a graph."""


class Lockstep:
    """Rounds in which all replicas announce what they compute next."""

    def __init__(self, world: World, peers: ReplicaLinks) -> None:
        self._world, self.peers = world, peers
        self.round = 0
        """Number of the next round."""
        self.is_asleep = False
        """Whether no replica had work in the last round. The next round begins when a replica gets work and wakes the
        others."""
        self._has_shut_down = False

    def agree(self, num_tokens: int, *, can_replay: bool = True, is_woken: bool = False) -> "Pass":
        """Agree on the next pass. Raises `ReplicasShutdown` when the replicas shut down.

        `can_replay`: whether this replica may replay a graph. `is_woken`: whether another replica, which has work,
        woke this one.
        """
        if self.is_asleep and not is_woken:
            self.peers.ring(self.round)
        # The lowest bit means that the step must run eagerly.
        own = num_tokens if num_tokens == _SHUTS_DOWN else 2 * num_tokens + (not can_replay)
        announced = self._world.agree(own)
        self.round += 1  # From now on, a late wake-up call for the last round has no effect.
        self.is_asleep = not any(announced)
        if _SHUTS_DOWN in announced:
            self._has_shut_down = True
            self.peers.announce_shutdown()
            raise ReplicasShutdown
        return Pass(tuple(each >> 1 for each in announced), not any(each & 1 for each in announced))

    def leave(self, *, is_woken: bool = False) -> None:
        """Shut down all replicas, unless they are shutting down already. `is_woken` as in `agree`."""
        if not self._has_shut_down:
            # If a replica is gone, the announcement is not needed.
            with contextlib.suppress(ReplicasShutdown, RuntimeError):
                self.agree(_SHUTS_DOWN, is_woken=is_woken)

    def abandon(self, error: BaseException) -> None:
        """End the other replicas because this one fails. Raises `PeerLostError` if another replica caused the
        error."""
        if isinstance(error, ReplicaLeft):
            raise PeerLostError(error.replica) from error
        if self._world.leave():
            # The others end because of this replica, so this one must not report that they ended first.
            self.peers.announce_shutdown()
            return
        gone = self.peers.wait_gone(PEER_END_SECONDS)
        if gone is not None:
            raise PeerLostError(gone) from error


class DPEngineCoreProc(EngineCore):
    """An `EngineCore` in which each forward pass is a pass of all replicas."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        runner: ModelRunnerInterface,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        lockstep: Lockstep,
        **options: Any,
    ) -> None:
        """As in `EngineCore`, with its `options`. `lockstep` connects it to the other replicas."""
        super().__init__(config, scheduler, runner, input_queue, output_queue, **options)
        self._lockstep = lockstep
        self._is_woken = False
        self._last_sent = 0.0
        """Time at which the last message was sent, on the monotonic clock."""

    def pull_and_process_input_queue(self) -> None:
        """As in `EngineCore`, but compute dummy batches while another replica has work."""
        while True:
            self._process(self._arrived())
            if self._stopping:
                self._lockstep.leave(is_woken=self._is_woken)
                return
            if self._steps or self.scheduler.has_requests():
                return
            self._send_rest()
            if self._may_sleep:
                self._process([self._wait_idle()])
            else:
                self.dummy_prefill_execution()
            self._steps.note_wait()

    def dummy_prefill_execution(self) -> None:
        """Take part in the next pass, if any replica has work. No sequence may be running."""
        if not self._may_sleep and any(self._agree(0, can_replay=True)):
            try:
                self.runner.dummy_prefill()
            except Exception as error:  # noqa: BLE001, it ends this core, whatever it is
                self._raise_broken(error)
            if time.monotonic() > self._last_sent + _HEARTBEAT_SECONDS:
                # The watchdog needs a message, because dummy batches send no outputs.
                self._send([])

    def _send(self, outputs: list[RequestOutput], step_kind: str = "idle", step_seconds: float = 0.0) -> None:
        self._last_sent = time.monotonic()
        super()._send(outputs, step_kind, step_seconds)

    def _serve(self) -> None:
        try:
            super()._serve()
        except ReplicasShutdown:
            logger.debug("the replicas shut down together")

    def _process_engine_step(self) -> None:
        """As in `EngineCore`, but compute a dummy batch if there is nothing to compute now."""
        before = self._lockstep.round
        super()._process_engine_step()
        if self._lockstep.round == before and not self.scheduler.running and not self._steps:
            self.dummy_prefill_execution()

    def _advance(self) -> FailedStep | None:
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            # Reading launched steps does not need the other replicas.
            failed = self._steps.drain(self._send)
        else:
            batch, seqs = scheduled
            self._agree(batch.total_tokens_num, can_replay=self.runner.can_replay(batch))
            failed = self._steps.submit(batch, seqs, self._send)
        self._end_with(failed)
        return None

    def _compute(
        self, batch: ScheduledBatch, seqs: dict[int, Sequence], on_read: OnRead | None = None
    ) -> FailedStep | None:
        """As in `EngineCore`. A step that raises ends this core, because the other replicas are still in that step."""
        self._agree(batch.total_tokens_num, can_replay=self.runner.can_replay(batch))
        self._end_with(super()._compute(batch, seqs, on_read))
        return None

    def _drain(self) -> None:
        self._end_with(self._steps.drain(self._send))

    def _end_with(self, failed: FailedStep | None) -> None:
        """End this core if a step raised."""
        if failed is not None:
            # Record for the supervisor the sequences that this core failed on.
            self._record.begin([seq.id for seq in failed.seqs])
            self._raise_broken(failed.error)

    def _process(self, messages: Iterable[Incoming]) -> None:
        super()._process(message for message in messages if not self._is_wake(message))

    def _is_wake(self, message: Incoming) -> bool:
        """Return whether `message` is a wake-up call for this round; a call for an earlier round is obsolete."""
        if not isinstance(message, Wake):
            return False
        if message.round == self._lockstep.round:
            self._is_woken = True
        return True

    @property
    def _may_sleep(self) -> bool:
        return self._lockstep.is_asleep and not self._is_woken

    def _agree(self, num_tokens: int, *, can_replay: bool) -> tuple[int, ...]:
        try:
            agreed = self._lockstep.agree(num_tokens, can_replay=can_replay, is_woken=self._is_woken)
        except RuntimeError as error:
            self._raise_broken(error)
        self._is_woken = False
        self.runner.tokens_across_dp, self.runner.may_replay = agreed
        return agreed.num_tokens

    def _raise_broken(self, error: BaseException) -> NoReturn:
        """Leave the lockstep permanently. Raises `PeerLostError` if another replica caused the error, else
        `RuntimeError`."""
        self._lockstep.abandon(error)
        raise RuntimeError(f"a step failed that all replicas compute together: {error}") from error
