"""`Isolation`: finds the sequences that a step raises on, by computing them apart from each other.

Used by the engine core after a step that raised, and for sequences that an earlier core died on.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from engine.batch import ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.sequence import Sequence

Compute: TypeAlias = Callable[[ScheduledBatch, dict[int, Sequence]], BaseException | None]
"""Computes a scheduled step and takes its tokens back; what it raised, its sequences waiting again, or None."""


class FailedStep(NamedTuple):
    """A step that raised."""

    seqs: list[Sequence]
    error: BaseException
    num_tokens: int = 0
    """That it computed."""


class Isolation:
    """Runs steps of chosen sequences, while all others stand still."""

    def __init__(self, scheduler: Scheduler, compute: Compute) -> None:
        self._scheduler = scheduler
        self._compute = compute

    def run(self, seqs: list[Sequence]) -> FailedStep | None:
        """Compute `seqs` until each has a further token or has ended; the first step that raised, which ends it."""
        lengths = [len(seq.token_ids) for seq in seqs]
        while True:
            pending = [
                seq
                for seq, length in zip(seqs, lengths, strict=True)
                if not seq.is_finished and len(seq.token_ids) == length
            ]
            scheduled = self._scheduler.schedule_only(pending) if pending else None
            if scheduled is None:
                return None
            error = self._compute(*scheduled)
            if error is not None:
                return FailedStep(list(scheduled[1].values()), error, scheduled[0].total_tokens_num)

    def guilty(self, failed: FailedStep) -> Iterator[tuple[Sequence, BaseException]]:
        """The sequences of a step that raised which raise by themselves too, and what. The others have gone on.

        Halves are tried, and halves of those that raise: of n sequences, one guilty is found in 2 log n steps.
        """
        if len(failed.seqs) == 1:
            # Nobody to part it from: what does not come again is nobody's fault.
            again = self.run(failed.seqs)
            if again is None:
                return
            failed = again
        suspected = [failed]
        while suspected:
            seqs, error, _ = suspected.pop()
            if len(seqs) == 1:
                yield seqs[0], error
                continue
            middle = len(seqs) // 2
            for half in (seqs[middle:], seqs[:middle]):
                raised = self.run(half)
                if raised is not None:
                    suspected.append(raised)
