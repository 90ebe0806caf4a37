"""The results of a step: of its pass, of its sampling, which may be read later (`LaunchedStep`), and as messages."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.distributed.rank_steps import RankSteps
from engine.messages import TokenLogprobs
from engine.runner.device import Download, oom_in_step
from engine.runner.device_batch import DeviceBatch
from engine.runner.drafting import DeviceDrafts
from engine.runner.input_batch import StepInputs
from engine.runner.pooling import PooledVectors
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens, SampledTokens
from engine.sampling.verification import NO_TOKEN, is_verifying


class StepResult(NamedTuple):
    """The results of a step's pass, on the device."""

    logits: torch.Tensor | LaunchedTokens  # [S, V] float32
    """Logits of the sampled positions; or the argmax tokens, where all rows are greedy and the model's head computes
    the argmax without logits."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None
    pooled: PooledVectors | None
    """Vectors of pooled prompts, on rank 0."""
    drafted_from: torch.Tensor | None = None  # [T, features]
    """The hidden states that the drafter reads."""


class StepCompletion(NamedTuple):
    """The functions with which a runner completes one of its steps; each is bound to the step."""

    resolve: Callable[[StepInputs], StepInputs]
    """Completes the inputs that depend on tokens of earlier steps, once these are read."""
    sample: Callable[
        [torch.Tensor | LaunchedTokens, StepInputs, SamplingRows], tuple[LaunchedTokens, DeviceDrafts | None]
    ]
    """Enqueues sampling from the logits, and stores the tokens on the device or drafts after them."""
    finish: Callable[[StepInputs, SampledTokens, DeviceDrafts | None], ScheduledBatchOutput]
    """Stores the sampled tokens on the host and returns them by sequence."""
    add_vectors: Callable[[ScheduledBatchOutput, PooledVectors, torch.Tensor], None]
    """Adds the vectors of pooled prompts to the output; the last argument holds them on the host."""


class LaunchedStep:
    """A step on the device whose tokens are read later, for asynchronous scheduling.

    Sampled tokens stay on the device by slot; where a model drafts, drafts and lengths do too. A row of the next step
    reads there what the host has not read yet.
    """

    def __init__(
        self,
        inputs: StepInputs,
        result: StepResult,
        device_batch: DeviceBatch,
        ranks: RankSteps | None,
        work: StepCompletion,
        *,
        drafts_on_device: bool,
    ) -> None:
        """`ranks`: the link to the other ranks, on rank 0 of several. `work`: how the runner completes the step."""
        self._inputs, self._device_batch, self._ranks, self._work = inputs, device_batch, ranks, work
        self.drafts_on_device = drafts_on_device
        """Whether the drafts that follow the step are computed before the host reads it."""
        self._logits: torch.Tensor | LaunchedTokens | None = result.logits
        self._prompt_logprobs = result.prompt_logprobs
        self._pooled = result.pooled
        self._vectors = None if result.pooled is None else device_batch.downloads.begin(_as_int64(result.pooled))
        self._tokens: LaunchedTokens | None = None
        self._drafts: DeviceDrafts | None = None
        self._downloads: list[Download] = []
        self._number = ranks.number if ranks is not None else 0

    def sample(self) -> None:
        """Launch the sampler unless it was launched already. All earlier steps must have been read."""
        if self._tokens is None:
            try:
                self._inputs = self._work.resolve(self._inputs)
                assert self._inputs.sampling is not None
                self.launch_sampler(self._inputs.sampling)
            except BaseException as error:
                self._abandon(error)
                raise

    def launch_sampler(self, rows: SamplingRows) -> None:
        """Enqueue sampling, the storing of the tokens for the next step, and their copy to the host."""
        assert self._logits is not None
        with torch.inference_mode(), oom_in_step():
            self._tokens, self._drafts = tokens, drafts = self._work.sample(self._logits, self._inputs, rows)
            words = tokens.candidates.words
            if drafts is not None:
                # One download for both, so that the host waits once.
                words = torch.cat((words.flatten(), drafts.token_ids.flatten()))
            downloads = self._device_batch.downloads
            self._downloads = [downloads.begin(each) for each in (words, tokens.logprobs) if each is not None]
        # Release the logits now, since they may be most of the memory that a step takes.
        self._logits = None

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's tokens. Raises the exception of the step, if it failed."""
        assert self._tokens is not None
        downloads = self._device_batch.downloads
        try:
            words, *logprobs = (download.wait() for download in self._downloads)
            of_tokens = self._tokens.candidates.words
            drafts = words.flatten()[of_tokens.numel() :].clone().numpy()
            sampled = self._tokens.read(words.flatten()[: of_tokens.numel()].view(of_tokens.shape), *logprobs)
        except BaseException:
            self._discard()
            raise
        for download in self._downloads:
            downloads.give_back(download)
        on_device = None if self._drafts is None else self._drafts._replace(on_host=drafts)
        with torch.inference_mode():
            output = self._work.finish(self._inputs, sampled, on_device)
        output.prompt_logprobs = self._prompt_logprobs
        if self._pooled is not None and self._vectors is not None:
            shape = self._pooled.values.shape
            values = self._vectors.wait().view(torch.float32)[: shape.numel()].view(shape).clone()
            downloads.give_back(self._vectors)
            self._work.add_vectors(output, self._pooled, values)
        return output

    def wait(self) -> None:
        """Wait until the device has completed all enqueued work. Raises the exception of work that failed."""
        if self._tokens is None:
            # The other ranks wait for this step's tokens, so they need an abort message.
            self._abandon(RuntimeError("an earlier step failed"))
        else:
            self._discard()
        self._device_batch.device.record().synchronize()

    def _abandon(self, error: BaseException) -> None:
        if self._ranks is not None:
            self._ranks.abandon(self._number, error)

    def _discard(self) -> None:
        if self._ranks is not None:
            self._ranks.discard(self._number)


def _as_int64(pooled: PooledVectors) -> torch.Tensor:
    """The vectors as the 64-bit words that `Downloads` copies, padded by one float where their number is odd."""
    flat = pooled.values.flatten()
    return F.pad(flat, (0, len(flat) % 2)).view(torch.int64)


# The sampled tokens of a step as messages.


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


def not_finite(num_tokens: int, dtype: torch.dtype) -> str:
    """The error of a sequence whose logits after `num_tokens` tokens have no finite maximum."""
    return (
        f"the model's logits are not finite after {num_tokens} tokens: the checkpoint is damaged, or its values "
        f"overflow {dtype} and need another dtype"
    )


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
    errors = {ids[index]: not_finite(int(inputs.sampled_positions[index]), dtype) for index in sampled.non_finite}
    refusals = {ids[index]: reason for index, reason in sampled.refused.items()}
    for seq_id in (*errors, *refusals):
        token_ids.pop(seq_id, None)
        logprobs.pop(seq_id, None)
    return ScheduledBatchOutput(token_ids, logprobs=logprobs or None, errors=errors or None, refusals=refusals or None)
