"""`LaunchedStep`: a step on the device that is read later. `StepResult` is what a step's pass has computed."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.runner.device import Download, oom_in_step
from engine.runner.device_batch import DeviceInputs
from engine.runner.drafting import DeviceDrafts
from engine.runner.input_batch import StepInputs
from engine.runner.pooling import PooledVectors
from engine.sampling.parameters import SamplingRows
from engine.sampling.sampler import LaunchedTokens
from models.ops.cpu.draft_chain import Verified


class StepResult(NamedTuple):
    """What a step computed, on the device."""

    logits: torch.Tensor | LaunchedTokens  # [S, V] float32
    """Logits of the rows that sample a token; or the tokens, where each row takes the argmax and the model's head
    computes it without logits."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None
    pooled: PooledVectors | None
    """Vectors of pooled prompts, on rank 0."""
    drafted_from: torch.Tensor | None = None  # [T, features]
    """The hidden states that the drafter reads."""
    verified: Verified | None = None
    """The step with the drafts that follow it, where one call computed both."""


class LaunchedStep:
    """A step on the device whose tokens are read later, as asynchronous scheduling needs it.

    Sampled tokens stay on the device by slot, and where a model drafts, drafts and lengths too; a row of the next step
    takes from there what has not been read yet.
    """

    def __init__(
        self,
        runner: Any,
        batch: ScheduledBatch,
        inputs: StepInputs,
        on_device: DeviceInputs,
        result: StepResult,
        *,
        drafts_on_device: bool,
    ) -> None:
        """`runner`: the `ModelRunner` that launches it, whose module imports this one."""
        self._runner, self._batch, self._inputs, self._on_device = runner, batch, inputs, on_device
        self.drafts_on_device = drafts_on_device
        """Whether the drafts after it are made before it is read."""
        self._logits: torch.Tensor | LaunchedTokens | None = result.logits
        self._prompt_logprobs = result.prompt_logprobs
        self._drafted_from = result.drafted_from
        self._pooled = result.pooled
        self._vectors = None if result.pooled is None else runner.device_batch.downloads.begin(_words(result.pooled))
        self._tokens: LaunchedTokens | None = None
        self._drafts: DeviceDrafts | None = None
        self._downloads: list[Download] = []
        self._number = runner.ranks.number if runner.ranks is not None else 0

    def sample(self) -> None:
        """Launch the sampler, if it was not yet: the steps before have been read."""
        if self._tokens is None:
            try:
                self._inputs = self._runner.input_batch.resolve(self._inputs)
                assert self._inputs.sampling is not None
                self.launch_sampler(self._inputs.sampling)
            except BaseException as error:
                self._abandon(error)
                raise

    def launch_sampler(self, rows: SamplingRows) -> None:
        """Have the device sample, keep the tokens for the next step, and copy them to the host."""
        runner = self._runner
        assert self._logits is not None
        with torch.inference_mode(), oom_in_step():
            self._tokens = tokens = runner.launch_sampler(self._logits, self._inputs, rows)
            if self.drafts_on_device:
                self._drafts = runner.draft_on_device(
                    self._batch, self._inputs, self._on_device, tokens, self._drafted_from
                )
            else:
                slots = self._on_device.sampled_slots
                runner.keep_tokens(self._batch, self._inputs, slots, tokens.token_ids, self._drafted_from)
            words = tokens.candidates.words
            if self._drafts is not None:
                # The host waits once, for both.
                words = torch.cat((words.flatten(), self._drafts.token_ids.flatten()))
            downloads = runner.device_batch.downloads
            self._downloads = [downloads.begin(each) for each in (words, tokens.logprobs) if each is not None]
        # The logits may be most of the memory that a step takes.
        self._logits = None

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's tokens. Raises what the step raised."""
        assert self._tokens is not None
        runner = self._runner
        try:
            words, *logprobs = (download.wait() for download in self._downloads)
            of_tokens = self._tokens.candidates.words
            drafts = words.flatten()[of_tokens.numel() :].clone().numpy()
            sampled = self._tokens.read(words.flatten()[: of_tokens.numel()].view(of_tokens.shape), *logprobs)
        except BaseException:
            self._discard()
            raise
        for download in self._downloads:
            runner.device_batch.downloads.give_back(download)
        with torch.inference_mode():
            output: ScheduledBatchOutput = runner.finish(
                self._batch,
                self._inputs,
                sampled,
                self._drafted_from,
                device_drafts=None if self._drafts is None else self._drafts._replace(on_host=drafts),
                is_launched=True,
            )
        output.prompt_logprobs = self._prompt_logprobs
        if self._pooled is not None and self._vectors is not None:
            shape = self._pooled.values.shape
            values = self._vectors.wait().view(torch.float32)[: shape.numel()].view(shape).clone()
            runner.device_batch.downloads.give_back(self._vectors)
            runner.add_vectors(output, self._batch, self._pooled, values)
        return output

    def wait(self) -> None:
        """Wait until the device has come to the end of what is enqueued. Raises what it failed with."""
        if self._tokens is None:
            # The other ranks wait for its tokens.
            self._abandon(RuntimeError("an earlier step failed"))
        else:
            self._discard()
        self._runner.device_batch.device.record().synchronize()

    def _abandon(self, error: BaseException) -> None:
        if self._runner.ranks is not None:
            self._runner.ranks.abandon(self._number, error)

    def _discard(self) -> None:
        if self._runner.ranks is not None:
            self._runner.ranks.discard(self._number)


def _words(pooled: PooledVectors) -> torch.Tensor:
    """The vectors as the 64-bit words that `Downloads` copies, with one more number where theirs is odd."""
    flat = pooled.values.flatten()
    return F.pad(flat, (0, len(flat) % 2)).view(torch.int64)
