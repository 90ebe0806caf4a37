"""`ShardRunner`: a `ModelRunner` that holds one rank's shard of the model. Rank 0 schedules and samples for all."""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import PromptSpan, ScheduledBatch, ScheduledBatchOutput
from engine.distributed.rank_steps import RankSteps, StepMessage, rank_batch
from engine.messages import TokenLogprobs
from engine.runner.device_batch import DeviceInputs
from engine.runner.input_batch import StepInputs, StepRows
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import WarmUpRow, WarmUpStep
from engine.sampling.logprobs import compute_prompt_logits
from engine.sampling.sampler import LaunchedTokens, argmax_of_shard, argmax_over_ranks
from models.architectures.llama import LlamaForCausalLM
from models.layers.linear import ParallelLMHead
from models.ops.cpu.collectives import SharedMemoryCollectives


class ShardRunner(ModelRunner):
    """On rank 0 used as any `ModelRunner`; on the others `follow` takes the place of `forward`.

    Start-up steps (profiling, warm-up) are run by each rank of itself, in the same order.
    """

    other_ranks: RankSteps | None = None
    """Who is told of each step; set on rank 0 once all have loaded."""
    _moves_no_logits = False
    """Whether the ranks choose among their likeliest tokens in the running step."""
    _followed: StepInputs | None = None
    """The last step, unless it failed here."""

    def prepare_model(self, batch: StepRows) -> tuple[StepInputs, DeviceInputs]:
        """See `ModelRunner`; on rank 0 the others are told as soon as the rows are known."""
        self.input_batch.apply(batch)
        if isinstance(batch, ScheduledBatch) and self.other_ranks is not None:
            self._moves_no_logits = self.input_batch.are_greedy(batch.slots)
            self.other_ranks.begin(batch, is_greedy=self._moves_no_logits, tokens_across_dp=self.tokens_across_dp)
        if self.graphs is not None and not (isinstance(batch, ScheduledBatch) and batch.is_dummy_run):
            # All ranks count what rank 0 tells of, whatever becomes of it: they capture the same at the same time.
            self.graphs.count_step()
        return self._step_inputs(batch)

    def _compute(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        if self.parallel.rank:
            with torch.inference_mode():
                self.run_model(*self.prepare_model(batch), batch.prompt_spans)
            return ScheduledBatchOutput({})
        try:
            return super()._compute(batch)
        except BaseException as error:
            if self.other_ranks is not None:
                self.other_ranks.abandon(error)
            raise

    def _keep(self, inputs: StepInputs, token_ids: npt.NDArray[np.int64]) -> None:
        super()._keep(inputs, token_ids)
        if self.other_ranks is not None:
            self.other_ranks.end(token_ids.tolist())

    def dummy_prefill(self) -> None:
        """See `ModelRunner`; a step as any, of which the other ranks are told."""
        self._dummy_step(WarmUpStep([WarmUpRow(1, 1)]))

    def follow(self, message: StepMessage) -> None:
        """Compute this rank's part of a step that rank 0 tells of."""
        self.committed.after_step(self._step_seconds)
        if message.sampled and self._followed is not None:
            self.input_batch.keep(self._followed, np.array(message.sampled, dtype=np.int64))
        self._followed = None
        batch = rank_batch(message, self.config.kv_cache_block_size)
        self._moves_no_logits = message.is_greedy
        self.tokens_across_dp = message.tokens_across_dp
        with torch.inference_mode():
            inputs, on_device = self.prepare_model(batch)
            # What a step that fails here samples on rank 0 is never sent.
            self._followed = inputs
            self.run_model(inputs, on_device, batch.prompt_spans)

    def _hidden_states(self, step: DeviceInputs, num_tokens: int, *, has_adapters: bool) -> torch.Tensor:
        hidden = super()._hidden_states(step, num_tokens, has_adapters=has_adapters)
        if isinstance(self.parallel.collectives, SharedMemoryCollectives):
            self.parallel.collectives.check()
        return hidden

    def _prompt_logprobs(self, hidden: torch.Tensor, spans: list[PromptSpan]) -> dict[int, list[TokenLogprobs]]:
        if self.parallel.rank == 0:
            return super()._prompt_logprobs(hidden, spans)
        compute_prompt_logits(hidden, self.model.compute_logits, spans, self.model_config.vocab_size)
        return {}

    def _choices(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor | LaunchedTokens:
        if not self._moves_no_logits:
            return self.model.compute_logits(hidden)
        first_token = self._head.first_row
        head = self._greedy_head_for(hidden, inputs)
        # A vocabulary may end before the last ranks' shares begin.
        if head is None or first_token >= self._head.vocab_size:
            peaks, token_ids = argmax_of_shard(self._own_logits(hidden), first_token)
        else:
            chosen, values = head.choose(hidden)
            peaks, token_ids = torch.from_numpy(values), torch.from_numpy(chosen) + first_token
        return argmax_over_ranks(peaks, token_ids, self.parallel)

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._head.gives_parts = True
        try:
            return self.model.compute_logits(hidden)
        finally:
            self._head.gives_parts = False

    @property
    def _head(self) -> ParallelLMHead:
        return cast(LlamaForCausalLM, self.model).lm_head
