"""`StepDrafts`: what a runner's steps do with its drafter, from the batch's rows to the step's output.

Drafts follow a step in one of three ways. On a CPU, `verify` computes a step of decodes and the drafts after it by one
call of the operators. With asynchronous scheduling, `draft_on_device` enqueues the drafts before the host has read the
step. Otherwise `finish` drafts once the tokens are read. The ranks share rank 0's tokens first, and make the same
calls.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DraftWork, ScheduledBatch, ScheduledBatchOutput
from engine.runner.device_batch import DeviceBatch, DeviceInputs
from engine.runner.draft_passes import DraftPasses
from engine.runner.drafting import DeviceDrafts, ModelDrafter, VerifiedRows
from engine.runner.input_batch import InputBatch, StepInputs, StepRows
from engine.runner.kv_cache import PageCommitter
from engine.runner.loaded_model import LoadedModel, drafter_caches
from engine.runner.step_results import not_finite
from engine.sampling.sampler import LaunchedTokens, Sampler
from engine.sampling.verification import NO_TOKEN
from engine.sequence import Sequence
from models.layers.base import DraftLM
from models.ops.cpu.draft_chain import Rounds, Verified
from models.ops.cpu.program import Program
from models.ops.cpu.runtime import Library
from models.ops.cpu.sampling import GreedyHead
from models.ops.types import LayerCache

_NO_TOKENS = np.zeros(0, dtype=np.int64)


class Drafted(NamedTuple):
    """A step's stored tokens, and the drafts after them."""

    accepted: npt.NDArray[np.int64] | None
    """Indices of the sampled positions that were accepted; None for all."""
    drafts: list[list[int]] = []  # noqa: RUF012, not changed
    """The drafts of each row; empty if no row has any."""
    work: DraftWork | None = None
    is_shared: bool = False
    """Whether the other ranks have received the step's tokens."""

    def add_to(self, output: ScheduledBatchOutput, seq_ids: list[int]) -> None:
        """Add the drafts to a step's output. `seq_ids`: the sequences of the step's rows."""
        if any(self.drafts):
            output.draft_token_ids = dict(zip(seq_ids, self.drafts, strict=True))
        output.draft_work = self.work


class StepDrafts:
    """The drafter of a runner, and its part of each step."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: DraftLM,
        kv_cache_data: dict[str, LayerCache],
        input_batch: InputBatch,
        sampler: Sampler,
        operators: Library | None,
        target: tuple[Program, GreedyHead] | None,
        pages: PageCommitter,
    ) -> None:
        """`operators` and `target` are as in `DraftPasses`. `kv_cache_data`: the caches of all layers, in `pages`."""
        self._pages = pages
        self._input_batch, self._parallel = input_batch, loaded.parallel
        self._device, self._dtype = loaded.device, loaded.dtype
        caches, operands = drafter_caches(kv_cache_data), input_batch.sampling_operands()
        self.passes = DraftPasses(loaded, model, caches, operators, target, operands)
        self.drafter = ModelDrafter(
            loaded,
            model,
            self.passes,
            input_batch,
            sampler,
            loaded.config.max_num_seqs,
            by_rejection=loaded.config.drafts_by_rejection,
        )
        self._ends: tuple[frozenset[int | None], npt.NDArray[np.int64]] = frozenset(), _NO_TOKENS
        """The tokens that end the sequences of the latest step of several rounds, as a set and as an array."""

    def verify(self, batch: ScheduledBatch) -> ScheduledBatchOutput | None:
        """Compute a step of decodes and the drafts that follow it by the operators alone; None if they cannot.

        The operators prepare the step too: it needs no `StepInputs`.
        """
        if batch.is_dummy_run or not any(batch.num_next_drafts) or batch.total_seqs_num_prefill:
            return None
        counts, ends = batch.num_scheduled_tokens, batch.context_lens
        firsts = [end - count for end, count in zip(ends, counts, strict=True)]
        slots = batch.slots
        is_greedy = self._input_batch.are_greedy(slots)
        rows = VerifiedRows(slots, counts, ends, firsts, batch.draft_tokens, batch.num_next_drafts, is_greedy)
        if self._input_batch.adapters_of(rows.slots) is not None or not self.drafter.can_verify(rows):
            return None
        self._input_batch.apply(batch)
        if batch.appended_blocks:
            self._pages.use(max(max(gained.block_ids) for gained in batch.appended_blocks))
        rounds = None
        if batch.num_rounds > 1:
            limits = [seq.decode_limit for seq in batch.sequences]
            rounds = Rounds(max_rounds=batch.num_rounds, limits=limits, ends=self._common_ends(batch.sequences))
        return self._output_of(batch, rows, self.drafter.verify(rows, rounds))

    def _common_ends(self, seqs: list[Sequence]) -> npt.NDArray[np.int64]:
        """The tokens that end these sequences, if they are the same for all; otherwise none."""
        tokens = seqs[0].end_tokens
        if any(seq.end_tokens is not tokens and seq.end_tokens != tokens for seq in seqs):
            return _NO_TOKENS
        if self._ends[0] is not tokens:
            self._ends = tokens, np.array([each for each in tokens if each is not None], dtype=np.int64)
        return self._ends[1]

    def _output_of(self, batch: ScheduledBatch, rows: VerifiedRows, verified: Verified) -> ScheduledBatchOutput:
        """Store a verified step's tokens and drafts for the next step, and return both by sequence."""
        start = time.perf_counter()
        counts, rounds = [*map(len, verified.token_ids)], len(verified.counted)
        ends = [first + count for first, count in zip(rows.firsts, counts, strict=True)]
        self._input_batch.note_accepted(rows.slots, [1 + end for end in ends], counts)
        drafts = self.drafter.take(verified, rows, ends)
        accepted, errors = dict[int, tuple[int, ...]](), dict[int, str]()
        for row, (seq_id, token_ids) in enumerate(zip(batch.req_ids, verified.token_ids, strict=True)):
            if token_ids:
                accepted[seq_id] = tuple(token_ids)
            elif not verified.counted[0, 0, row]:
                errors[seq_id] = not_finite(rows.ends[row], self._dtype)
        output = ScheduledBatchOutput(accepted, errors=errors or None, num_rounds=rounds)
        if rounds > 1:
            # A row's first rounds; the others are those after it has ended.
            drafted, taken = verified.counted.transpose(1, 2, 0).tolist()
            output.verified_drafts = {
                seq_id: [(n, tokens - 1) for n, tokens in zip(drafted[row], taken[row], strict=True) if n or tokens]
                for row, seq_id in enumerate(batch.req_ids)
            }
        seconds = (verified.seconds + time.perf_counter() - start) / rounds
        work = DraftWork(seconds, sum(map(bool, drafts)), max(map(len, drafts), default=0))
        Drafted(None, drafts, work).add_to(output, batch.req_ids)
        return output

    def states_of(self, hidden: torch.Tensor, streams: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The hidden states that the drafter reads, from the final ones and the residual streams by layer; None if it
        reads none. # [T, H], [T, H] each -> [T, features]"""
        if not self.drafter.reads_hidden:
            return None
        states = [hidden if layer < 0 else streams[layer] for layer in self.drafter.hidden_layers]
        return states[0] if len(states) == 1 else torch.cat(states, -1)

    def finish(
        self,
        batch: ScheduledBatch,
        inputs: StepInputs,
        token_ids: npt.NDArray[np.int64],
        states: torch.Tensor | None,
        on_device: DeviceDrafts | None,
        *,
        is_launched: bool,
        by_shard: bool,
    ) -> Drafted:
        """Store a step's sampled tokens on rank 0, and draft after them or take the drafts that are `on_device`.

        `states`: from `states_of`. `is_launched`: the step was launched before the one before it was read. `by_shard`
        is as in `OutputHead.logits_or_tokens`. # token_ids [S]
        """
        if on_device is not None:
            accepted = self._input_batch.store_tokens(inputs, token_ids)
            return Drafted(accepted, self.drafter.take_from_device(inputs, on_device, batch.num_next_drafts))
        has_next = any(batch.num_next_drafts)
        if is_launched and not inputs.has_drafts and not has_next:
            # The drafter's state was stored when the tokens were stored on the device.
            return Drafted(self._input_batch.store_tokens(inputs, token_ids))
        if self._parallel.size == 1 and not batch.num_next_drafts:
            self.drafter.skip(inputs, _starting(batch))
            return Drafted(self._input_batch.store_tokens(inputs, token_ids))
        start = time.perf_counter()
        accepted, drafts = self.draft(batch, inputs, token_ids, states, by_shard=by_shard)
        work = None
        if has_next:
            depth = 0 if self.drafter.has_caught_up else max(map(len, drafts), default=0)
            work = DraftWork(time.perf_counter() - start, sum(map(bool, drafts)), depth)
        return Drafted(accepted, drafts, work, is_shared=True)

    def draft(
        self,
        batch: StepRows,
        inputs: StepInputs,
        token_ids: npt.NDArray[np.int64] | None,
        states: torch.Tensor | None,
        *,
        by_shard: bool,
    ) -> tuple[npt.NDArray[np.int64] | None, list[list[int]]]:
        """Store a step's sampled tokens on all ranks, and draft for each of its rows. # token_ids [S]

        `token_ids`: None except on rank 0. Returns the result of `store_tokens` and the drafts.
        """
        if token_ids is None:
            token_ids = np.zeros(len(inputs.sampled_rows), dtype=np.int64)
        token_ids = self.drafter.share(token_ids)
        accepted = self._input_batch.store_tokens(inputs, token_ids)
        if self.store_states(batch, inputs, states):
            return accepted, []
        drafts = self.drafter.draft(
            inputs,
            states,
            np.array(batch.num_next_drafts, dtype=np.int64),
            batch.total_seqs_num_decode,
            _starting(batch),
            is_greedy=self._is_greedy(inputs, by_shard=by_shard),
        )
        return accepted, drafts

    def draft_on_device(
        self,
        batch: StepRows,
        inputs: StepInputs,
        on_device: DeviceInputs,
        device_batch: DeviceBatch,
        sampled: LaunchedTokens | None,
        states: torch.Tensor | None,
        *,
        by_shard: bool,
    ) -> DeviceDrafts:
        """Accept a step's sampled tokens and draft after them, on all ranks. `sampled`: None except on rank 0."""
        if sampled is None:
            token_ids = torch.empty(len(inputs.sampled_rows), dtype=torch.int64, device=self._device)
        else:
            found = sampled.candidates
            token_ids = found.tokens.masked_fill(~found.peaks.isfinite(), NO_TOKEN)
            if sampled.refused:
                [refused] = device_batch.uploads.send([np.array(list(sampled.refused), dtype=np.int64)])
                token_ids.index_fill_(0, refused, NO_TOKEN)
        if self._parallel.size > 1:
            token_ids = self._parallel.broadcast(token_ids)
        return self.drafter.draft_on_device(
            inputs,
            on_device,
            device_batch,
            token_ids,
            states,
            batch.num_next_drafts,
            is_greedy=self._is_greedy(inputs, by_shard=by_shard),
        )

    def store_states(self, batch: StepRows, inputs: StepInputs, states: torch.Tensor | None) -> bool:
        """Store the drafter's state for a step without drafts before or after it; False for other steps."""
        if not batch.num_next_drafts:
            self.drafter.skip(inputs, _starting(batch))
            return True
        return not any(batch.num_next_drafts) and self.drafter.wait(inputs, states, _starting(batch))

    def _is_greedy(self, inputs: StepInputs, *, by_shard: bool) -> bool:
        """Whether all rows are greedy; ranks other than 0 have no sampling parameters, and receive `by_shard`."""
        return self._input_batch.are_greedy(inputs.slots) if self._parallel.size == 1 else by_shard


def _starting(batch: StepRows) -> npt.NDArray[np.int64]:
    """The slots of the sequences that start in a step."""
    return np.array([seq.slot for seq in batch.new_seqs], dtype=np.int64) if batch.new_seqs else _NO_TOKENS
