"""`SampledTokens`: what the sampler chose, and of which rows nothing could be chosen; `output_of`: that, told."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.worker.input_batch import StepInputs
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


def output_of(
    batch: ScheduledBatch, inputs: StepInputs, sampled: SampledTokens, dtype: torch.dtype
) -> ScheduledBatchOutput:
    """What a step of a model in `dtype` sampled, by sequence."""
    ids = [batch.req_ids[row] for row in inputs.sampled_rows.tolist()]
    token_ids = dict(zip(ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
    errors = {}
    for row in sampled.broken:
        del token_ids[ids[row]]
        errors[ids[row]] = (
            f"the model's logits are not finite after {inputs.seq_lens[inputs.sampled_rows[row]]} tokens: the "
            f"checkpoint is damaged, or its values overflow {dtype} and need another dtype"
        )
    refusals = {ids[row]: reason for row, reason in sampled.refused.items()}
    for refused in refusals:
        del token_ids[refused]
    logprobs = {ids[row]: [of_token] for row, of_token in sampled.logprobs.items()}
    return ScheduledBatchOutput(token_ids, logprobs=logprobs or None, errors=errors or None, refusals=refusals or None)
