"""`SampledTokens`: what the sampler chose, and of which rows nothing could be chosen; `output_of`: that, told."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.runner.input_batch import StepInputs
from engine.sampling.parameters import SamplingRows
from engine.sampling.verification import NOTHING, counted_places, of_several_places


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token for each of N places, one a row unless it verifies drafts; except those `broken` or `refused`."""

    token_ids: npt.NDArray[np.int64]  # [N]
    logprobs: dict[int, TokenLogprobs]
    """By row, for those that asked."""
    broken: list[int]
    """Rows whose logits hold no finite maximum."""
    refused: dict[int, str]
    """Rows whose request leaves no token to sample, and how that comes, as a sentence."""


def without_spoiled(sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
    """As `sampled`, but with `NOTHING` at places of rows that verify drafts where no token could be chosen."""
    if not inputs.has_drafts or not (sampled.broken or sampled.refused):
        return sampled
    is_of_several = of_several_places(inputs)
    token_ids = sampled.token_ids.copy()
    token_ids[[place for place in (*sampled.broken, *sampled.refused) if is_of_several[place]]] = NOTHING
    broken = [place for place in sampled.broken if not is_of_several[place]]
    refused = {place: why for place, why in sampled.refused.items() if not is_of_several[place]}
    return SampledTokens(token_ids, sampled.logprobs, broken, refused)


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
    """What a step of a model in `dtype` sampled, by sequence. Behind a draft that is rejected nothing counts."""
    ids = [batch.req_ids[row] for row in inputs.sampled_rows.tolist()]
    counted = counted_places(inputs, sampled.token_ids)
    token_ids: dict[int, tuple[int, ...]]
    logprobs: dict[int, list[TokenLogprobs]]
    if counted is None:
        token_ids = dict(zip(ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
        logprobs = {ids[row]: [of_token] for row, of_token in sampled.logprobs.items()}
    else:
        token_ids, logprobs = {}, {}
        for place in counted.tolist():
            token_ids[ids[place]] = (*token_ids.get(ids[place], ()), int(sampled.token_ids[place]))
            if place in sampled.logprobs:
                logprobs.setdefault(ids[place], []).append(sampled.logprobs[place])
    errors = {
        ids[place]: (
            f"the model's logits are not finite after {inputs.sampled_positions[place]} tokens: the "
            f"checkpoint is damaged, or its values overflow {dtype} and need another dtype"
        )
        for place in sampled.broken
    }
    refusals = {ids[place]: reason for place, reason in sampled.refused.items()}
    for seq_id in (*errors, *refusals):
        token_ids.pop(seq_id, None)
        logprobs.pop(seq_id, None)
    return ScheduledBatchOutput(token_ids, logprobs=logprobs or None, errors=errors or None, refusals=refusals or None)
