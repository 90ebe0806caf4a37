"""Converts a step's sampled tokens to the messages that report them by sequence."""

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.runner.input_batch import StepInputs
from engine.sampling.sampler import SampledTokens
from engine.sampling.verification import NO_TOKEN, is_verifying


def mark_unusable(sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
    """A copy of `sampled` with `NO_TOKEN` where a row that verifies drafts could not sample a token."""
    if not inputs.has_drafts or not (sampled.non_finite or sampled.refused):
        return sampled
    verifies = is_verifying(inputs.sampled_rows)
    token_ids = sampled.token_ids.copy()
    token_ids[[index for index in (*sampled.non_finite, *sampled.refused) if verifies[index]]] = NO_TOKEN
    broken = [index for index in sampled.non_finite if not verifies[index]]
    refused = {index: reason for index, reason in sampled.refused.items() if not verifies[index]}
    return SampledTokens(token_ids, sampled.logprobs, broken, refused)


def accepted_tokens(token_ids: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64] | None) -> list[int]:
    """The sampled tokens, `NO_TOKEN` at positions that were not accepted. # [S]"""
    if accepted is not None:
        token_ids, found = np.full_like(token_ids, NO_TOKEN), token_ids
        token_ids[accepted] = found[accepted]
    tokens: list[int] = token_ids.tolist()
    return tokens


def output_of(
    batch: ScheduledBatch,
    inputs: StepInputs,
    sampled: SampledTokens,
    accepted: npt.NDArray[np.int64] | None,
    dtype: torch.dtype,
) -> ScheduledBatchOutput:
    """A step's sampled tokens by sequence; where drafts are verified, of `accepted` positions only."""
    ids = [batch.req_ids[row] for row in inputs.sampled_rows.tolist()]
    token_ids: dict[int, tuple[int, ...]]
    logprobs: dict[int, list[TokenLogprobs]]
    if accepted is None:
        token_ids = dict(zip(ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
        logprobs = {ids[index]: [of_token] for index, of_token in sampled.logprobs.items()}
    else:
        token_ids, logprobs = {}, {}
        for index in accepted.tolist():
            token_ids[ids[index]] = (*token_ids.get(ids[index], ()), int(sampled.token_ids[index]))
            if index in sampled.logprobs:
                logprobs.setdefault(ids[index], []).append(sampled.logprobs[index])
    errors = {
        ids[index]: (
            f"the model's logits are not finite after {inputs.sampled_positions[index]} tokens: the "
            f"checkpoint is damaged, or its values overflow {dtype} and need another dtype"
        )
        for index in sampled.non_finite
    }
    refusals = {ids[index]: reason for index, reason in sampled.refused.items()}
    for seq_id in (*errors, *refusals):
        token_ids.pop(seq_id, None)
        logprobs.pop(seq_id, None)
    return ScheduledBatchOutput(token_ids, logprobs=logprobs or None, errors=errors or None, refusals=refusals or None)
