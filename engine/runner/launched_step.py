"""`LaunchedStep`: a step on the device whose tokens are read later, as asynchronous scheduling wants it.

Sampled tokens stay on the device by slot; a row whose last token has not been read yet takes it from there.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.runner.device import Download, oom_in_step
from engine.runner.input_batch import StepInputs
from engine.runner.pooling import PooledVectors
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens, SampledTokens
from engine.sampling.verification import NO_TOKEN, accepted_positions, is_verifying

if TYPE_CHECKING:
    from engine.runner.model_runner import ModelRunner, StepResult


class LaunchedStep:
    """One step on the device."""

    def __init__(
        self,
        runner: "ModelRunner",
        batch: ScheduledBatch,
        inputs: StepInputs,
        slots: torch.Tensor,
        result: "StepResult",
    ) -> None:
        """`slots`: those that sample, on the device."""
        self._runner, self._batch, self._inputs, self._slots = runner, batch, inputs, slots
        self._logits: torch.Tensor | LaunchedTokens | None = result.logits
        self._prompt_logprobs = result.prompt_logprobs
        self._pooled = result.pooled
        self._vectors = None if result.pooled is None else runner.device_batch.downloads.begin(_words(result.pooled))
        self._tokens: LaunchedTokens | None = None
        self._downloads: list[Download] = []

    def sample(self) -> None:
        """Launch the sampler, if it was not yet: the steps before have been read."""
        if self._tokens is None:
            self.launch_sampler(self._runner.input_batch.sampling_rows(self._inputs))

    def launch_sampler(self, rows: SamplingRows) -> None:
        """Have the device sample, keep the tokens for the next step, and copy them to the host."""
        device_batch = self._runner.device_batch
        assert self._logits is not None
        with torch.inference_mode(), oom_in_step():
            self._tokens = tokens = self._runner.launch_sampler(self._logits, rows)
            # A step that verifies drafts is read before the next is launched, which finds its tokens on the host.
            if not self._inputs.has_drafts:
                last_tokens = device_batch.last_tokens
                last_tokens.index_copy_(0, self._slots, tokens.token_ids.to(last_tokens.device))
            words = (tokens.candidates.words, tokens.logprobs)
            self._downloads = [device_batch.downloads.begin(each) for each in words if each is not None]
        # They may be most of the memory that a step takes.
        self._logits = None

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's tokens. Raises what the step raised."""
        assert self._tokens is not None
        sampled = self._tokens.read(*(download.wait() for download in self._downloads))
        for download in self._downloads:
            self._runner.device_batch.downloads.give_back(download)
        output = self._runner.finish(self._batch, self._inputs, sampled)
        output.prompt_logprobs = self._prompt_logprobs
        if self._pooled is not None and self._vectors is not None:
            shape = self._pooled.values.shape
            values = self._vectors.wait().view(torch.float32)[: shape.numel()].view(shape).clone()
            self._runner.device_batch.downloads.give_back(self._vectors)
            self._runner.add_vectors(output, self._batch, self._pooled, values)
        return output

    def wait(self) -> None:
        """Wait until the device has come to the end of what is enqueued. Raises what it failed with."""
        self._runner.device_batch.device.record().synchronize()


def _words(pooled: PooledVectors) -> torch.Tensor:
    """The vectors as the 64-bit words that `Downloads` copies, with one more number where theirs is odd."""
    flat = pooled.values.flatten()
    return F.pad(flat, (0, len(flat) % 2)).view(torch.int64)


def mark_unusable(sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
    """As `sampled`, but with `NO_TOKEN` at positions of rows that verify drafts where no token could be sampled."""
    if not inputs.has_drafts or not (sampled.non_finite or sampled.refused):
        return sampled
    verifies = is_verifying(inputs.sampled_rows)
    token_ids = sampled.token_ids.copy()
    token_ids[[index for index in (*sampled.non_finite, *sampled.refused) if verifies[index]]] = NO_TOKEN
    broken = [index for index in sampled.non_finite if not verifies[index]]
    refused = {index: reason for index, reason in sampled.refused.items() if not verifies[index]}
    return SampledTokens(token_ids, sampled.logprobs, broken, refused)


def output_of(
    batch: ScheduledBatch, inputs: StepInputs, sampled: SampledTokens, dtype: torch.dtype
) -> ScheduledBatchOutput:
    """What a step of a model in `dtype` sampled, by sequence: only accepted positions, where drafts are verified."""
    ids = [batch.req_ids[row] for row in inputs.sampled_rows.tolist()]
    token_ids: dict[int, tuple[int, ...]]
    logprobs: dict[int, list[TokenLogprobs]]
    if not inputs.has_drafts:
        token_ids = dict(zip(ids, zip(sampled.token_ids.tolist(), strict=True), strict=True))
        logprobs = {ids[index]: [of_token] for index, of_token in sampled.logprobs.items()}
    else:
        token_ids, logprobs = {}, {}
        accepted = accepted_positions(inputs.sampled_rows, inputs.last_tokens, inputs.input_ids, sampled.token_ids)
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
