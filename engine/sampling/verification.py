"""Verification of drafts: selects the accepted tokens among those that a step sampled.

At each position of a row that verifies drafts, the step samples a token as if the sequence contained the earlier
drafts. A position is accepted if all earlier drafts equal the tokens sampled at their positions. There are two ways of
sampling:

- Coupled: with the noise of (seed, position, token id), so that the accepted tokens are those of plain decoding.
- Rejection (`TorchOps.verify`), for drafts with a distribution q: the token is the draft with probability
  min(1, p / q), otherwise a sample of max(p - q, 0). If q is 1 for a single token, both ways are equivalent: the noise
  selects the draft with probability p, and every other token with its own probability.

A position of such a row at which no token could be sampled is not accepted, nor are later ones: a step without drafts
then determines whether the model or the draft is at fault. An invalid draft may corrupt earlier positions too, since
masked values are multiplied by 0; a sequence with no accepted position is computed again from its beginning.
"""

import numpy as np
import numpy.typing as npt

NO_TOKEN = -1
"""Marks a position at which no token could be sampled."""


def accepted_positions(
    sampled_rows: npt.NDArray[np.int64],
    last_tokens: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Indices of the accepted positions among the S sampled ones, in order. # 3 x [S], input_ids [T] -> [accepted]

    `sampled_rows`: the row of each position. `last_tokens`: the index in the step's T inputs of the token before it.
    """
    # Few calls of NumPy: they are most of what the host does to verify a few rows.
    is_followed = sampled_rows[1:] == sampled_rows[:-1]  # [S - 1], whether the next position is of the same row
    drafts = input_ids[last_tokens[:-1] + is_followed]  # of followed positions
    # Positions from which the rest of their row is rejected.
    is_end = token_ids == NO_TOKEN
    is_end[1:] |= is_followed & (token_ids[:-1] != drafts)
    num_ends = is_end.cumsum()
    # For each position, the number of such positions before its row, which only grows from row to row.
    num_before_row = num_ends - is_end
    num_before_row[1:][is_followed] = 0
    np.maximum.accumulate(num_before_row, out=num_before_row)
    return np.flatnonzero(num_ends == num_before_row)


def is_verifying(sampled_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether the row of each sampled position verifies drafts, i.e. has several positions. # [S] -> [S]"""
    several: npt.NDArray[np.bool_] = np.bincount(sampled_rows)[sampled_rows] > 1
    return several
