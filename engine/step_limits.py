"""`StepLimits`: how large a step may be, which a device that ran out of memory makes less for a while.

Owned by the scheduler. No memory is measured here: a step that was too large is tried again as smaller ones.
"""

import logging

logger = logging.getLogger(__name__)

_STEPS_BEFORE_MORE = 1024
"""Steps that must succeed before larger ones are tried again: each failure has prompts computed twice."""


class StepOutOfMemory(MemoryError):
    """A step needed more of the device's memory than was free."""


class StepLimits:
    """Tokens that a step computes, and sequences that run at a time, at most."""

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self._most_tokens, self._most_rows = num_tokens, num_rows
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self._steps_left = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """A step of so much found no memory: half of it is allowed. False where that step cannot be less."""
        if num_tokens <= 1:
            return False
        if num_tokens > num_rows:
            # Prompts, which are computed in smaller parts.
            self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        else:
            self.num_rows = max(1, min(self.num_rows, num_rows) // 2)
        self._steps_left = _STEPS_BEFORE_MORE
        logger.warning(
            "the device ran out of memory in a step of %d tokens of %d sequences; steps have at most %d tokens and %d "
            "sequences run for now: lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization",
            num_tokens,
            num_rows,
            self.num_tokens,
            self.num_rows,
        )
        return True

    def note_step(self) -> None:
        """A step is scheduled."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.num_tokens = min(2 * self.num_tokens, self._most_tokens)
                self.num_rows = min(2 * self.num_rows, self._most_rows)
                if (self.num_tokens, self.num_rows) != (self._most_tokens, self._most_rows):
                    self._steps_left = _STEPS_BEFORE_MORE
