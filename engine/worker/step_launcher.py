"""`StepLauncher`: runs a model runner's steps without waiting for their tokens (DESIGN: deferred output).

The tokens that rows sample stay on the device, by slot; a row whose last token nobody has read takes it from there.
"""

from typing import Protocol

import torch

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.worker.deferred_sampler import DeferredSampler, PendingTokens
from engine.worker.device import Device
from engine.worker.input_batch import DeviceInputs, InputBatch, StepInputs
from engine.worker.kv_memory import in_step
from engine.worker.sampled_tokens import SampledTokens
from engine.worker.sampling_columns import LATER, SamplingRows
from engine.worker.staging import Downloads, Uploads
from models.forward_context import AttentionMetaData


class Stages(Protocol):
    """What a launch needs of `ModelRunner`."""

    @property
    def input_batch(self) -> InputBatch: ...

    def prepare_model(self, batch: ScheduledBatch, /) -> tuple[StepInputs, AttentionMetaData]: ...

    def run_model(
        self,
        inputs: StepInputs,
        metadata: AttentionMetaData,
        prompt_spans: list[PromptSpan],
        on_device: DeviceInputs | None = None,
        /,
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
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch_device)
        """Of each slot, what it sampled last."""

    def launch(self, batch: ScheduledBatch) -> "LaunchedStep":
        """Have the device compute a step, and choose tokens unless that needs what is not read yet."""
        with torch.inference_mode():
            inputs, metadata = self.stages.prepare_model(batch)
            on_device, slots = self._send(inputs)
            logits, prompt_logprobs = self.stages.run_model(inputs, metadata, batch.prompt_spans, on_device)
        self.stages.input_batch.reserve(inputs.sampled_slots)
        step = LaunchedStep(self, batch, inputs, slots, logits, prompt_logprobs)
        if inputs.sampling is not LATER:
            step.choose(inputs.sampling)
        return step

    def _send(self, inputs: StepInputs) -> tuple[DeviceInputs, torch.Tensor]:
        """The step's tokens, those nobody has read included, and the slots that sample, on the device."""
        # Unread tokens are decodes', and a decode's row is its token's place among the step's.
        assert not len(inputs.unread_rows) or inputs.unread_rows[-1] < inputs.num_decodes
        ids, positions, last_tokens, slots, unread, unread_slots = self.uploads.send(
            [
                inputs.input_ids,
                inputs.positions,
                inputs.last_tokens,
                inputs.sampled_slots,
                inputs.unread_rows,
                inputs.slots[inputs.unread_rows],
            ]
        )
        if len(unread):
            ids[unread] = self.last_tokens[unread_slots]
        return DeviceInputs(ids, positions, last_tokens), slots


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
            launcher.last_tokens[self._slots] = self._pending.token_ids
        # They may be most of what a step takes.
        del self._logits

    def result(self) -> ScheduledBatchOutput:
        """Wait for the step's tokens. Raises what the step raised."""
        assert self._pending is not None
        launcher = self._launcher
        sampled = self._pending.read(launcher.downloads)
        launcher.stages.input_batch.fill(self._inputs.sampled_slots, self._inputs.sampled_positions, sampled.token_ids)
        output = launcher.stages.report(self._batch, self._inputs, sampled)
        output.prompt_logprobs = self._prompt_logprobs
        return output

    def wait(self) -> None:
        """Wait until the device has come to the end of what is enqueued. Raises what it failed with."""
        self._launcher.device.record().synchronize()
