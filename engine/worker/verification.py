"""Which of the tokens that a step chose count: a draft's place counts if all drafts before it were chosen.

At each place of a row that verifies drafts the step chooses a token as if the drafts before it were the sequence. With
random numbers keyed by seed and position, what is chosen at a place that counts is what plain decodes would choose.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.worker.input_batch import StepInputs


def counted_places(inputs: "StepInputs", token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Indexes of the places whose tokens their sequences get, in order; None: all of them. # [P] -> [counted]"""
    if not inputs.has_drafts:
        return None
    rows = inputs.sampled_rows
    goes_on = rows[1:] == rows[:-1]  # [P - 1], whether a draft follows the place
    behind = np.minimum(inputs.last_tokens[:-1] + 1, len(inputs.input_ids) - 1)
    drafts = inputs.input_ids[behind]
    # Places whose draft is another token than was chosen before it, counted up.
    others = np.concatenate(([0], np.cumsum(goes_on & (token_ids[:-1] != drafts))))
    firsts = np.concatenate(([0], np.where(goes_on, 0, others[1:])))
    return np.flatnonzero(others == np.maximum.accumulate(firsts))
