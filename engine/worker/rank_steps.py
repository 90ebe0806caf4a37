"""`RankSteps`: rank 0's hold on the other ranks while steps run. Used by the model runner around each step."""

from collections.abc import Callable
from typing import Protocol

from engine.batch import ScheduledBatch
from engine.worker.rank_places import EndTaker, StepWriter
from engine.worker.step_message import encode_step

ABORTED = "aborted"
"""The failure of a rank that left the step because another had."""

_LEAVE_SECONDS = 5.0
"""For the other ranks to leave a step that one of them cannot compute."""


class RankGroup(Protocol):
    """A rank's end of its group, as the manager and the steps of the ranks use it."""

    def join(self) -> None:
        """Meet the other ranks."""

    def begin_step(self, number: int) -> None:
        """The collectives from here on belong to this step."""

    def abort(self) -> None:
        """Have every rank leave the step."""

    def close(self) -> None:
        """Leave the other ranks, before this process ends."""


class RankStepError(RuntimeError):
    """A rank behind the first could not compute its part of a step."""


class RankSteps:
    """Tells the other ranks of steps, and hears of their ends."""

    def __init__(
        self,
        writer: StepWriter,
        ends: EndTaker,
        num_others: int,
        group: RankGroup,
        fail: Callable[[str], object],
        on_trace: Callable[[str], object],
    ) -> None:
        """`fail` ends this process with a sentence; `on_trace` is given the traceback of a rank that raised."""
        self._writer, self._ends, self._num_others, self._group = writer, ends, num_others, group
        self._fail, self._on_trace = fail, on_trace
        self._number = 0
        self._sampled: list[int] = []
        self._is_open = False

    @property
    def number(self) -> int:
        """Of the last step begun."""
        return self._number if self._is_open else 0

    def begin(self, batch: ScheduledBatch, *, is_greedy: bool, tokens_across_dp: tuple[int, ...] = ()) -> None:
        """Have the other ranks compute a step too. Ends this process where one of them cannot be told of it."""
        self._number += 1
        message = encode_step(
            batch, self._number, self._sampled, is_greedy=is_greedy, tokens_across_dp=tokens_across_dp
        )
        self._sampled = []
        try:
            self._writer.write(message)
        except ConnectionError as error:
            self._fail(str(error))
            raise
        self._is_open = True
        self._group.begin_step(self._number)

    def end(self, sampled: list[int]) -> None:
        """This rank has computed the step and sampled these tokens. Raises `RankStepError` where another has not."""
        self._is_open = False
        failures = [self._ends.take(other) for other in range(self._num_others)]
        self._raise_first(failures)
        self._sampled = sampled

    def abandon(self, error: BaseException) -> None:
        """Leave a step that raised here, with all others. Raises `RankStepError` where one of them raised first."""
        if not self._is_open:
            return
        self._is_open = False
        self._group.abort()
        failures: list[str] = []
        for other in range(self._num_others):
            failure = self._ends.take_within(other, _LEAVE_SECONDS)
            if failure is None:
                self._fail(
                    f"a step failed on tensor-parallel rank 0 ({str(error) or type(error).__name__}), and rank "
                    f"{other + 1} did not leave it within {_LEAVE_SECONDS:g} s"
                )
                return
            failures.append(failure)
        self._raise_first(failures)

    def _raise_first(self, failures: list[str]) -> None:
        """Raise what the first rank tells that did not merely follow another."""
        for other, failure in enumerate(failures):
            if failure and failure != ABORTED:
                sentence, _, trace = failure.partition("\n")
                self._on_trace(f"tensor-parallel rank {other + 1} raised in a step:\n{trace}")
                raise RankStepError(f"tensor-parallel rank {other + 1}: {sentence}") from None
