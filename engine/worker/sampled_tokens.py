"""`SampledTokens`: what the sampler chose, and of which rows nothing could be chosen."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.messages import TokenLogprobs
from engine.worker.sampling_columns import SamplingRows


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token for each of N rows, except those that are `broken` or `refused`."""

    token_ids: npt.NDArray[np.int64]  # [N]
    logprobs: dict[int, TokenLogprobs]
    """By row, for those that asked."""
    broken: list[int]
    """Rows whose logits hold no finite maximum."""
    refused: dict[int, str]
    """Rows whose request leaves no token to sample, and how that comes, as a sentence."""


def exhausted(broken: list[int], peaks: npt.NDArray[np.float32], rows: SamplingRows) -> dict[int, str]:
    """Rows that have no maximum because their request forbids every token, and with what it does. # peaks [N]"""
    refused = {}
    masked = {each.row: each for each in rows.masked or ()}
    forbidding = set[int]()
    if rows.bias is not None:
        forbidding.update(rows.bias.rows[np.isneginf(rows.bias.values)].tolist())
    for row in broken:
        fields = masked[row].fields if row in masked else []
        if row in forbidding:
            fields = [*fields, "bad_words or min_tokens"]
        if fields and np.isneginf(peaks[row]):
            together = " together" if len(fields) > 1 else ""
            refused[row] = f"no token is left to sample: {' and '.join(fields)}{together} forbid every one"
    return refused
