"""`DPEngineCoreProc`: an engine core whose steps are taken together with those of other replicas.

For mixtures of experts that are spread over replicas: their layers exchange tokens, so that a pass of one is a pass of
all. Before each the replicas agree on how many tokens each computes. One that has none computes a dummy; when nobody
has any, all sleep, and who is given work wakes the others.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

from engine.batch import ScheduledBatch
from engine.config.config import Config
from engine.core.engine_core import EngineCore, Runner
from engine.core.sockets import Incoming, InputQueue, OutputQueue, Wake
from engine.distributed.lockstep import PEER_END_SECONDS, PeerGoneError
from engine.sequence import Sequence
from models.errors import ReplicaLeft

logger = logging.getLogger(__name__)

_LEAVES = -1
"""What a replica says instead of a number of tokens, when it is told to end."""
_TELL_SECONDS = 1.0
"""Between two signs of life of a core that computes dummies."""


class ReplicasLeave(Exception):
    """A replica was told to end: all do."""


class LockstepRunner(Runner, Protocol):
    """What the loop needs of a model runner besides."""

    tokens_across_dp: tuple[int, ...]
    """How many tokens each replica computes in the next pass; 0 for one that computes a dummy."""

    def dummy_prefill(self) -> None:
        """A pass over a token that is nobody's."""


class Peers(Protocol):
    """Connections to the other cores; see `ReplicaLinks`."""

    def ring(self, number: int) -> None: ...
    def part(self) -> None: ...
    def wait_gone(self, timeout: float) -> int | None: ...


class World(Protocol):
    """What joins the first ranks of all replicas; see `ReplicaWorld` and `SharedMemoryExchange`."""

    def agree(self, own: int) -> tuple[int, ...]:
        """Wait for all replicas; what each of them says. Raises `ReplicaLeft` or another `RuntimeError`."""

    def leave(self) -> bool:
        """Come to nothing any more; whether the others, wherever they wait for this one, hear so: `ReplicaLeft`."""


class Lockstep:
    """Rounds in which all replicas say what they compute next. All say the same number of times."""

    def __init__(self, world: World, peers: Peers) -> None:
        self._world, self.peers = world, peers
        self.round = 0
        """Number of the next one."""
        self.is_asleep = False
        """Whether nobody had work in the last one: the next is when somebody has, who wakes the others."""
        self._has_left = False

    def meet(self, num_tokens: int, *, is_woken: bool = False) -> tuple[int, ...]:
        """What each replica computes. Raises `ReplicasLeave` when they end.

        `is_woken`: another one, which has work, woke them all.
        """
        if self.is_asleep and not is_woken:
            self.peers.ring(self.round)
        said = self._world.agree(num_tokens)
        self.round += 1  # What rings for the last one, also behind it, wakes nobody from here on.
        self.is_asleep = not any(said)
        if _LEAVES in said:
            self._has_left = True
            self.peers.part()
            raise ReplicasLeave
        return said

    def leave(self, *, is_woken: bool = False) -> None:
        """Have all replicas end, unless they do already. `is_woken`: as in `meet`."""
        if not self._has_left:
            # One that is gone needs not be told.
            with contextlib.suppress(ReplicasLeave, RuntimeError):
                self.meet(_LEAVES, is_woken=is_woken)

    def abandon(self, error: BaseException) -> None:
        """Have the others end, since this one fails. Raises `PeerGoneError` where the error is another's doing."""
        if isinstance(error, ReplicaLeft):
            raise PeerGoneError(error.replica) from error
        if self._world.leave():
            # They follow this one into its end, and must not seem to have gone first.
            self.peers.part()
            return
        gone = self.peers.wait_gone(PEER_END_SECONDS)
        if gone is not None:
            raise PeerGoneError(gone) from error


class DPEngineCoreProc(EngineCore):
    """As `EngineCore`; each pass of its runner's model is one of all replicas."""

    runner: LockstepRunner

    def __init__(
        self,
        config: Config,
        runner: LockstepRunner,
        input_queue: InputQueue,
        output_queue: OutputQueue,
        lockstep: Lockstep,
        **options: Any,
    ) -> None:
        """`options` are `EngineCore`'s."""
        super().__init__(config, runner, input_queue, output_queue, **options)
        self._lockstep = lockstep
        self._is_woken = False
        self._told = 0.0
        """When the last message was sent, on the monotonic clock."""

    def pull_and_process_input_queue(self) -> None:
        """As in `EngineCore`; while another replica has work, this one computes dummies."""
        while True:
            self._take_in(self._arrived())
            if self._stopping:
                self._lockstep.leave(is_woken=self._is_woken)
                return
            if self.scheduler.has_requests():
                return
            if self._outputs:
                self._send("idle", 0.0)
            if self._may_sleep:
                self._take_in([self._wait_idle()])
            else:
                self.dummy_prefill_execution()

    def dummy_prefill_execution(self) -> None:
        """Take part in the next pass of replicas that have work, if there are any. No sequence may be running."""
        if not self._may_sleep and any(self._meet(0)):
            try:
                self.runner.dummy_prefill()
            except Exception as error:  # noqa: BLE001, it ends this core, whatever it is
                self._raise_broken(error)
            if time.monotonic() > self._told + _TELL_SECONDS:
                # Who watches for stalls hears of no steps from here.
                self._send("idle", 0.0)

    def _send(self, step_kind: str, step_seconds: float) -> None:
        self._told = time.monotonic()
        super()._send(step_kind, step_seconds)

    def _serve(self) -> None:
        try:
            super()._serve()
        except ReplicasLeave:
            logger.debug("the replicas end together")

    def _process_engine_step(self) -> None:
        """As in `EngineCore`; where there is nothing to compute now, a dummy."""
        before = self._lockstep.round
        super()._process_engine_step()
        if self._lockstep.round == before and not self.scheduler.running:
            self.dummy_prefill_execution()

    def _compute(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> BaseException | None:
        """As in `EngineCore`. A step that raises ends this core: the other replicas are still in it."""
        self._meet(batch.total_tokens_num)
        error = super()._compute(batch, seqs)
        if error is not None:
            self._raise_broken(error)
        return None

    def _take_in(self, messages: Iterable[Incoming]) -> None:
        super()._take_in(message for message in messages if not self._is_wake(message))

    def _is_wake(self, message: Incoming) -> bool:
        """Whether it is one; those of an earlier round came when this core was awake already."""
        if not isinstance(message, Wake):
            return False
        if message.round == self._lockstep.round:
            self._is_woken = True
        return True

    @property
    def _may_sleep(self) -> bool:
        return self._lockstep.is_asleep and not self._is_woken

    def _meet(self, num_tokens: int) -> tuple[int, ...]:
        try:
            tokens = self._lockstep.meet(num_tokens, is_woken=self._is_woken)
        except RuntimeError as error:
            self._raise_broken(error)
        self._is_woken = False
        self.runner.tokens_across_dp = tokens
        return tokens

    def _raise_broken(self, error: BaseException) -> NoReturn:
        """The other replicas cannot be met again. Raises `PeerGoneError` where that is another's doing."""
        self._lockstep.abandon(error)
        raise RuntimeError(f"a step failed that all replicas compute together: {error}") from error
