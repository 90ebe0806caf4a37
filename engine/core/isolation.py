"""`Isolation`: finds the sequences that make a step raise, by computing them separately.

The engine core uses it after a step that raised, and for sequences in whose step an earlier core died.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from engine.batch import ScheduledBatch
from engine.core.scheduler import Scheduler
from engine.sequence import Sequence


class FailedStep(NamedTuple):
    """A step that raised."""

    seqs: list[Sequence]
    error: BaseException
    num_tokens: int = 0
    """Number of tokens that the step computed."""


Compute: TypeAlias = Callable[[ScheduledBatch, dict[int, Sequence]], FailedStep | None]
"""Computes a scheduled step and reads it. Returns the step if it raised; then its sequences have been requeued."""


class Isolation:
    """Runs steps of chosen sequences while all others wait. All submitted steps must have been read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def run(self, seqs: list[Sequence], compute: Compute) -> FailedStep | None:
        """Compute `seqs` until each has one more token or has ended; the first step that raised, which ends it."""
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
            failed = compute(*scheduled)
            if failed is not None:
                return failed

    def failing_sequences(self, failed: FailedStep, compute: Compute) -> Iterator[tuple[Sequence, BaseException]]:
        """Yield the sequences of a failed step that also raise alone, with their errors. The others have advanced.

        It bisects: it computes both halves, and again the halves of a half that raises. So one failing sequence of n
        is found in 2 log n steps.
        """
        if len(failed.seqs) == 1:
            # There is nothing to bisect. If the error does not occur again, the sequence is not its cause.
            again = self.run(failed.seqs, compute)
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
                raised = self.run(half, compute)
                if raised is not None:
                    suspected.append(raised)
