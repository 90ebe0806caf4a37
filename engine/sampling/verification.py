"""Which of the tokens that a step chose count: a draft's place counts if all drafts before it were chosen.

At each place of a row that verifies drafts the step chooses a token as if the drafts before it were the sequence. With
random numbers keyed by seed and position, what is chosen at a place that counts is what plain decodes would choose.

A place of such a row at which nothing could be chosen counts for nothing, nor does what is behind it: a step without
drafts finds out whether that is so. A draft that is no good may have spoiled what is before it too, as masked values
are multiplied by 0; a sequence of which no place counts is computed again from its beginning.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.runner.input_batch import StepInputs

NOTHING = -1
"""The token of a place at which none could be chosen."""


def counted_places(inputs: "StepInputs", token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Indexes of the places whose tokens their sequences get, in order; None: all of them. # [P] -> [counted]"""
    if not inputs.has_drafts:
        return None
    rows = inputs.sampled_rows
    goes_on = rows[1:] == rows[:-1]  # [P - 1], whether a draft follows the place
    behind = np.minimum(inputs.last_tokens[:-1] + 1, len(inputs.input_ids) - 1)
    drafts = inputs.input_ids[behind]
    # Places behind which nothing of their row counts, themselves included.
    ends = token_ids == NOTHING
    ends[1:] |= goes_on & (token_ids[:-1] != drafts)
    so_far = np.cumsum(ends)
    # Of each place, how many there were before its row. They only become more.
    is_first = np.concatenate(([True], ~goes_on))
    before_row = np.maximum.accumulate(np.where(is_first, so_far - ends, 0))
    return np.flatnonzero(so_far == before_row)


def of_several_places(inputs: "StepInputs") -> npt.NDArray[np.bool_]:
    """Whether each place is of a row that verifies drafts. # [P]"""
    counts = np.bincount(inputs.sampled_rows, minlength=len(inputs.query_lens))
    is_of_several: npt.NDArray[np.bool_] = counts[inputs.sampled_rows] > 1
    return is_of_several
