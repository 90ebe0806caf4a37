"""`StepLauncher`: runs a model runner's steps without waiting for their tokens (DESIGN: deferred output).

The tokens that rows sample stay on the device, by slot; a row whose last token nobody has read takes it from there.
"""

from typing import Protocol

import torch

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.worker.deferred_sampler import DeferredSampler, PendingTokens
from engine.worker.device import Device
from engine.worker.device_batch import DeviceBatch, DeviceInputs
from engine.worker.input_batch import InputBatch, StepInputs
from engine.worker.kv_memory import in_step
from engine.worker.sampled_tokens import SampledTokens, without_spoiled
from engine.worker.sampling_columns import LATER, SamplingRows
from engine.worker.staging import Downloads, Uploads


class Stages(Protocol):
    """What a launch needs of `ModelRunner`."""

    @property
    def input_batch(self) -> InputBatch: ...

    def prepare_model(self, batch: ScheduledBatch, /) -> tuple[StepInputs, DeviceInputs]: ...

    def run_model(
        self, inputs: StepInputs, on_device: DeviceInputs, prompt_spans: list[PromptSpan], /
    ) -> tuple[torch.Tensor | SampledTokens, dict[int, list[TokenLogprobs]] | None]: ...

    def report(self, batch: ScheduledBatch, inputs: StepInputs, sampled: SampledTokens, /) -> ScheduledBatchOutput: ...


class StepLauncher:
    """Launches steps in order; each must be read, or waited for, before the one after the next is launched."""

    def __init__(self, stages: Stages, device: Device, max_num_seqs: int) -> None:
        self.stages = stages
        self.device = device
        self.uploads = Uploads(device)
        self.downloads = Downloads(device)
        self.sampler = DeferredSampler(self.uploads, self.downloads)
        self.batch = DeviceBatch(device, self.uploads, max_num_seqs)

    def launch(self, batch: ScheduledBatch) -> "LaunchedStep":
        """Have the device compute a step, and choose tokens unless that needs what is not read yet."""
        with torch.inference_mode():
            inputs, on_device = self.stages.prepare_model(batch)
            logits, prompt_logprobs = self.stages.run_model(inputs, on_device, batch.prompt_spans)
        self.stages.input_batch.reserve(inputs)
        step = LaunchedStep(self, batch, inputs, on_device.sampled_slots, logits, prompt_logprobs)
        if inputs.sampling is not LATER:
            step.choose(inputs.sampling)
        return step


class LaunchedStep:
    """One step on the device."""

    _pending: PendingTokens | None = None

    def __init__(
        self,
        launcher: StepLauncher,
        batch: ScheduledBatch,
        inputs: StepInputs,
        slots: torch.Tensor,
        logits: torch.Tensor | SampledTokens,
        prompt_logprobs: dict[int, list[TokenLogprobs]] | None,
    ) -> None:
        """`slots`: those that sample, on the device."""
        self._launcher, self._batch, self._inputs, self._slots = launcher, batch, inputs, slots
        self._logits = logits
        self._prompt_logprobs = prompt_logprobs

    def sample(self) -> None:
        """Have the device choose tokens, if it was not told to yet: the steps before have been read."""
        if self._pending is None:
            self.choose(self._launcher.stages.input_batch.sampling_rows(self._inputs))

    def choose(self, rows: SamplingRows) -> None:
        """Have the device choose tokens, and keep them for the next step."""
        launcher = self._launcher
        with torch.inference_mode(), in_step():
            if isinstance(self._logits, SampledTokens):
                self._pending = launcher.sampler.chosen(self._logits)
            else:
                self._pending = launcher.sampler.sample(self._logits, rows)
            # A step that verifies drafts is read before the next is launched: nobody looks for its tokens there.
            if not self._inputs.has_drafts:
                launcher.batch.last_tokens.index_copy_(0, self._slots, self._pending.token_ids)
        # They may be most of what a step takes.
        del self._logits

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's tokens. Raises what the step raised."""
        assert self._pending is not None
        launcher = self._launcher
        sampled = without_spoiled(self._pending.read(launcher.downloads), self._inputs)
        launcher.stages.input_batch.keep(self._inputs, sampled.token_ids)
        output = launcher.stages.report(self._batch, self._inputs, sampled)
        output.prompt_logprobs = self._prompt_logprobs
        return output

    def wait(self) -> None:
        """Wait until the device has come to the end of what is enqueued. Raises what it failed with."""
        self._launcher.device.record().synchronize()
