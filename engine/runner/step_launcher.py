"""`StepLauncher`: runs a model runner's steps without waiting for their tokens (DESIGN: deferred output).

The tokens that rows sample stay on the device, by slot; a row whose last token nobody has read takes it from there.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.messages import TokenLogprobs
from engine.runner.device import Device, Download, Downloads, Uploads, in_step
from engine.runner.device_batch import DeviceBatch, DeviceInputs
from engine.runner.input_batch import InputBatch, StepInputs
from engine.sampling.logprobs import pack_logprobs, unpack_logprobs
from engine.sampling.parameters import LATER, RandomRows, SamplingRows
from engine.sampling.sampled_tokens import SampledTokens, exhausted, without_spoiled
from engine.sampling.sampler import adjust, draw_ranked, draw_unfiltered, mask_rows
from engine.sampling.top_k import argmax, likeliest
from engine.text.structured.matcher import TokenMasks
from models.ops import triton

# [deferred_sampler] `DeferredSampler`: as `Sampler`, without ever waiting for the device; `PendingTokens`: what it
# chose, to be read.
#
# Called by the step launcher. Rows whose logits are spoiled get some token, and are told of when the tokens are
# read.

_DRAWN_LOGITS = 1 << 24
"""Logits that are drawn from at a time: their running sums in float64 take sixteen bytes each."""
_WIDEST = 1024
"""Tokens that a top-k may keep without the whole vocabulary being sorted."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """A token for each of N rows, on the device."""

    token_ids: torch.Tensor  # [N] int64, on the device
    chosen: Download  # [2, N or more]: the tokens; and N float32, each row's largest logit
    logprobs: Download | None
    rows: SamplingRows
    refused: dict[int, str] = field(default_factory=dict)

    def read(self, downloads: Downloads) -> SampledTokens:
        """Wait for the tokens, and tell of them."""
        tokens, largest = self.chosen.wait().numpy()
        num_rows = self.token_ids.shape[0]
        token_ids, peaks = tokens[:num_rows].copy(), largest.view(np.float32)[:num_rows].copy()
        downloads.give_back(self.chosen)
        refused = dict(self.refused)
        broken = np.flatnonzero(~np.isfinite(peaks)).tolist()
        if broken:
            refused |= exhausted(broken, peaks, self.rows)
            broken = [row for row in broken if row not in refused]
        logprobs = {}
        if self.logprobs is not None:
            asked = self.rows.num_logprobs or {}
            told = unpack_logprobs(self.logprobs.wait(), list(asked.values()))
            downloads.give_back(self.logprobs)
            logprobs = dict(zip(asked, told, strict=True))
        for row in (*broken, *refused):
            logprobs.pop(row, None)
        return SampledTokens(token_ids, logprobs, broken, refused)


class DeferredSampler:
    """Chooses tokens by operations that are only enqueued."""

    def __init__(self, uploads: Uploads, downloads: Downloads, masks: TokenMasks | None = None) -> None:
        self._uploads = uploads
        self._downloads = downloads
        self._masks = masks or TokenMasks()

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> PendingTokens:
        """One token a row. `logits` are overwritten. # [N, V] float32"""
        if triton.runs(logits, operator="sampling"):
            from engine.sampling.triton_sampler import launch

            launched = launch(logits, rows, self._masks, self._uploads.send)
            words, logprob_words = launched.words()
            return PendingTokens(
                launched.token_ids,
                self._downloads.begin(words),
                None if logprob_words is None else self._downloads.begin(logprob_words),
                rows,
                launched.refused,
            )
        asked = rows.num_logprobs or {}
        if asked:
            (asking,) = self._uploads.send([np.array(list(asked), dtype=np.int64)])
            unmodified = logits[asking]
        adjust(logits, rows, self._uploads.send)
        refused: dict[int, str] = {}
        if rows.masked:
            masks, refused = self._masks.fill(rows.masked, logits.shape[-1])
            masked = np.array([each.row for each in rows.masked], dtype=np.int64)
            mask_rows(logits, *self._uploads.send([masked, masks]))
        tokens = argmax(logits)  # [N]
        peaks = logits.gather(-1, tokens[:, None])  # [N, 1]
        if rows.random is not None:
            # What is not finite would lead the search for a token out of the vocabulary.
            usable = peaks.isfinite()
            self._draw(logits.masked_fill_(~usable, 0.0), peaks.masked_fill(~usable, 0.0), tokens, rows.random)
        largest = F.pad(peaks[:, 0], (0, len(peaks))).view(torch.int64)  # Two to a word.
        chosen = self._downloads.begin(torch.stack((tokens, largest)))
        logprobs = None
        if asked:
            logprobs = self._downloads.begin(pack_logprobs(unmodified, tokens[asking], max(asked.values())))
        return PendingTokens(tokens, chosen, logprobs, rows, refused)

    def chosen(self, sampled: SampledTokens) -> PendingTokens:
        """Tokens that the model's head chose by itself, on the host."""
        words = np.stack((sampled.token_ids, np.zeros_like(sampled.token_ids)))
        words[1].view(np.float32)[sampled.broken] = np.nan
        (on_device,) = self._uploads.send([words])
        return PendingTokens(on_device[0], self._downloads.begin(on_device), None, SamplingRows())

    def _draw(self, logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, random: RandomRows) -> None:
        """Replace the random rows' `tokens` by drawn ones. # logits [N, V], peaks [N, 1], tokens [N]"""
        vocab_size = logits.shape[-1]
        piece = max(1, _DRAWN_LOGITS // vocab_size)
        narrow = random.filtered & (random.top_k <= min(_WIDEST, vocab_size - 1))
        for chosen, width in (
            (~random.filtered, 0),
            (narrow, int(random.top_k[narrow].max(initial=1))),
            (random.filtered & ~narrow, vocab_size),
        ):
            indexes = np.flatnonzero(chosen)
            for start in range(0, len(indexes), piece):
                part = random.take(indexes[start : start + piece])
                rows, temperature, top_k, top_p, min_p, uniform = self._uploads.send(
                    [part.rows, part.temperature, part.top_k, part.top_p, part.min_p, part.uniform]
                )
                # Less the maximum first: nothing overflows, however small the temperature.
                scaled = logits.index_select(0, rows).sub_(peaks[rows]).div_(temperature[:, None])
                if width == 0:
                    tokens[rows] = draw_unfiltered(scaled, uniform)
                    continue
                total = scaled.exp().sum(-1).double()
                # Equal values come in the order of their tokens.
                if width < vocab_size:
                    values, ids = likeliest(scaled, width)
                else:
                    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
                ranks, _ = draw_ranked(values, top_k, top_p, min_p, uniform, total)
                tokens[rows] = ids.gather(-1, ranks[:, None])[:, 0]


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
