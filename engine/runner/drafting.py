"""`ModelDrafter`: drafts the next tokens of a step's rows with a draft model, after the step has sampled.

Owned by the model runner. The drafter stores its entries (see `DraftLM`) in its own KV caches, which use the target's
block tables: an entry is shared, preempted and released together with the target's block.

    positions          0 1 2 ... done-1 | done ... end-1 | end ...
    a slot's entries   computed           first pass       one pass per further draft

The first pass computes, for all rows together, the entries of the tokens that the target accepted since the previous
pass. Entries of drafts are computed again once the step has verified them, unless the drafter reads no hidden states.
A row that does not draft only stores its latest hidden states, which is cheap. When it drafts again, the entries of
these states are computed and older entries are skipped. Skipped entries lower the acceptance rate; they never change
the output tokens.
"""

import dataclasses
import operator
from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.device import Download, Downloads, Uploads
from engine.runner.device_batch import DeviceBatch, DeviceInputs, mapped
from engine.runner.draft_passes import DraftPasses
from engine.runner.draft_passes import Ints as _Ints
from engine.runner.draft_states import Entries, StoredStates
from engine.runner.input_batch import DraftSpan, InputBatch, StepInputs, StepRows
from engine.runner.loaded_model import LoadedModel
from engine.sampling.parameters import Later, Proposals
from engine.sampling.sampler import LaunchedTokens, Sampler
from engine.sampling.verification import NO_TOKEN
from models.attention.backend import NO_SLOT, AttentionMetaData
from models.attention.gpu import GPUAttentionBackend, TritonMetaData
from models.layers.base import DraftLM
from models.ops.counter_rng import DRAFT, SAMPLE
from models.ops.cpu.draft_chain import MOST_ROUNDS, DraftingRows, Rounds, Verified, VerifyingRows

_SKIPPED = -1
"""Value of a slot's entry count: the entries before the slot's next step are skipped."""
_ON_DEVICE = -2
"""Value of a slot's entry count: entries are computed up to the tokens accepted by a step that is not read yet."""
_NO_SLOTS: _Ints = np.zeros(0, dtype=np.int64)


class _Sampled(NamedTuple):
    """The drafts of a slot that were sampled at random, in order of their positions."""

    position: int
    """Position of the first draft."""
    token_ids: list[int]
    probabilities: list[torch.Tensor]
    """The distribution from which each draft was sampled. # [V] float32 each"""


class _Choice(NamedTuple):
    """One draft of each row in a subset of the step's rows; the host may not have read it yet. # each [rows]"""

    rows: _Ints
    """Indices of the rows in the step."""
    slots: _Ints
    positions: _Ints
    launched: LaunchedTokens | None
    """None where rank 0 samples."""
    probabilities: torch.Tensor | None = None
    """The distribution from which each row that samples at random was sampled. # [D, V] float32"""


class VerifiedRows(NamedTuple):
    """The rows of a step of decodes and drafts, in lists, which take less time than arrays for few rows. # each [B]"""

    slots: _Ints
    counts: list[int]
    """Number of tokens of each row: the last known one, and its drafts."""
    ends: list[int]
    """Length of each sequence with its drafts."""
    firsts: list[int]
    """Position of each row's last known token."""
    drafts: list[int]
    """The drafts of all rows, in order. # [any]"""
    wanted: list[int]
    """As in `ModelDrafter.draft`; at least one is not 0."""
    is_greedy: bool
    """Whether every row takes its argmax."""


class DeviceDrafts(NamedTuple):
    """Drafts of B rows, computed on the device before the host has read the step that they follow."""

    token_ids: torch.Tensor
    """Drafts of each row, then negative or invalid token ids. # [B, most] int64, on rank 0"""
    choices: list[_Choice]
    """The same drafts with the distributions that rejection sampling needs."""
    on_host: _Ints = _NO_SLOTS
    """`token_ids` flattened, once the host has read them."""


def _fill(drafts: list[list[int]], rows: _Ints, found: _Ints, counts: _Ints) -> None:
    """Write up to `counts` drafts of each row to `drafts`, and stop at the first -1. # [rows], [most, rows], [rows]"""
    for row, tokens, count in zip(rows.tolist(), found.T.tolist(), counts.tolist(), strict=True):
        end = tokens.index(-1) if -1 in tokens else count
        drafts[row] = tokens[: min(end, count)]


class ModelDrafter:
    """Drafts with the `DraftLM` of a loaded model, on one rank. All ranks make the same calls."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: DraftLM,
        passes: DraftPasses,
        input_batch: InputBatch,
        sampler: Sampler,
        num_slots: int,
        *,
        by_rejection: bool,
    ) -> None:
        """`by_rejection`: drafts are sampled with their own noise, and `proposals` holds their distributions."""
        self._loaded, self._model, self._passes = loaded, model, passes
        self._uploads, self._downloads = Uploads(loaded.device_api), Downloads(loaded.device_api)
        self._input_batch, self._sampler = input_batch, sampler
        self._vocab_size = loaded.model_config.vocab_size
        rope = loaded.model_config.rope_context(loaded.max_model_len)
        self._has_plain_positions = rope is None
        """Whether rotary frequencies are independent of the sequence's length."""
        self.reads_hidden = bool(model.hidden_layers)
        """Whether `draft` needs the target's hidden states."""
        self.hidden_layers = model.hidden_layers
        self._token_offset = int(self.reads_hidden)
        """Offset from an entry's position to the position of the token that it reads."""
        self._has_skipped = False
        """Whether the last step was skipped."""
        self._are_current = False
        """Whether all entries before the positions of the latest step given to `can_verify` are computed."""
        self._num_done = np.zeros(num_slots, dtype=np.int64)
        """Number of computed entries of each slot."""
        self._num_stored = np.zeros(num_slots, dtype=np.int64)
        """Positions of each slot that had blocks when `draft_on_device` computed its entries."""
        self._num_guessed = np.zeros(num_slots, dtype=np.int64)
        """Number of entries of drafts that follow the computed ones; they are valid if the drafts are accepted."""
        self._states = StoredStates(num_slots)
        """The target's hidden states of entries that are not computed yet."""
        self.has_caught_up = False
        """Whether the last `draft` also computed postponed entries or entries of prompts, and so took longer."""
        self._by_rejection = by_rejection
        self._sampled: dict[int, _Sampled] = {}
        """Drafts that were sampled at random, by slot."""

    @property
    def is_recorded(self) -> bool:
        """Whether the drafter's passes and its argmax run as calls of the compiled operators."""
        return self._passes.are_recorded and self._passes.head is not None

    @property
    def max_rounds(self) -> int:
        """The most rounds of `verify`."""
        chain = self._passes.chain
        return MOST_ROUNDS if chain is not None and chain.verifies else 1

    def draft(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor | None,
        wanted: _Ints,
        num_decodes: int,
        starting: _Ints,
        *,
        is_greedy: bool,
    ) -> list[list[int]]:
        """Draft at most `wanted` tokens for each row, limited by the row's blocks and context length. # [B]

        The step's sampled tokens are stored in the input batch already. The entries of a prompt or of a prompt chunk
        are computed if its `wanted` is more than 0.

        `hidden`: the target's states of the step's tokens at the layers `hidden_layers`. # [T, features]
        `num_decodes`: number of leading rows that are decodes. `starting`: slots of sequences that start in this step.
        `is_greedy`: whether every row takes its argmax. All ranks return the same drafts.
        """
        slots, firsts, computed, is_sampled = self._computed(inputs)
        self._forget_sampled(slots)
        self._begin(slots, firsts, starting)
        self._states.end_idle_steps()
        num_drafts, ends = self._drafts_with_room(slots, computed, is_sampled, wanted)
        done = self._num_done[slots]
        # Entries of accepted drafts stay valid, since their tokens are the same; the last token is never a draft.
        done = np.minimum(done + self._num_guessed[slots], np.maximum(done, computed))
        if self.reads_hidden:
            done = np.maximum(done, firsts - self._states.most)
        is_prompt = np.arange(len(slots)) >= num_decodes
        is_due = (num_drafts > 0) | (is_prompt & (wanted > 0))
        # As in `verify`, a row without missing entries stays up to date while the drafter runs for other rows.
        is_due |= ~is_prompt & (done == firsts) & (wanted > 0).any()
        for span in inputs.pooled:
            is_due[span.row] = False
            num_drafts[span.row] = 0
        self._num_done[slots], self._num_guessed[slots] = done, 0
        due = np.flatnonzero(is_due & (done < ends))
        self.has_caught_up = bool(is_prompt.any() or (done < firsts)[due].any())
        if self.reads_hidden:
            assert hidden is not None
            postponed = np.flatnonzero(~is_due & (done < ends))
            spans = slots, inputs.query_lens, inputs.seq_lens
            self._states.store(hidden, spans, postponed, np.maximum(done, firsts)[postponed], ends[postponed])
        drafts: list[list[int]] = [[] for _ in range(len(slots))]
        if not len(due):
            return drafts
        first = Entries(slots[due], done[due], ends[due])
        self._num_done[slots[due]] = ends[due]
        drafting = np.flatnonzero(num_drafts[due] > 0)
        if self._can_choose(slots, is_greedy=is_greedy) and self._draft_at_once(
            first, hidden, inputs, firsts[due], due, drafting, num_drafts, drafts, is_greedy=is_greedy
        ):
            return drafts
        last = self._first_pass(first, hidden, inputs, firsts[due], due)  # [due, hidden_size]
        if len(drafting):
            rows = due[drafting]
            state = last if len(drafting) == len(due) else last[torch.from_numpy(drafting).to(last.device)]
            self._draft_following(state, rows, slots[rows], ends[rows], num_drafts[rows], drafts, is_greedy=is_greedy)
        return drafts

    def can_verify(self, rows: VerifiedRows) -> bool:
        """Whether the operators can compute a step of decodes and the drafts after it."""
        chain, slots = self._passes.chain, rows.slots
        if chain is None or not chain.verifies or self._sampled:
            return False
        if not chain.holds(len(slots), len(slots) + len(rows.drafts)):
            return False
        if not self._can_choose(slots, is_greedy=rows.is_greedy):
            return False
        done = self._num_done[slots].tolist()
        if self._has_skipped or done != rows.firsts:
            self._begin(slots, np.array(rows.firsts))
            done = self._num_done[slots].tolist()
        self._are_current = done == rows.firsts
        return self._are_current or all(
            map(operator.eq, compress(done, rows.wanted), compress(rows.firsts, rows.wanted))
        )

    def verify(self, rows: VerifiedRows, rounds: Rounds | None = None) -> Verified:
        """Compute a step of the target and the drafts after it by the operators, without work of the host in between.

        Call it if `can_verify`, and `take` afterwards. `rounds`: as in `DraftChain.verify`; a step that cannot have
        several has one.
        """
        chain, slots, batch = self._passes.chain, rows.slots, self._input_batch
        assert chain is not None, "`can_verify` says so"
        states, states_after = batch.states(slots), None
        if states is not None and rows.drafts:
            counts = np.array(rows.counts)
            states_after = batch.states_after(slots, states, counts, counts, len(slots))
        if (
            states is not None
            or not self._are_current
            or not chain.holds(len(slots), len(slots) * (1 + max(rows.wanted)))
        ):
            rounds = None
        self._states.end_idle_steps()
        verifying = VerifyingRows(
            slots=slots,
            positions=batch.carried_positions(slots, np.array(rows.firsts)),
            num_drafts=[count - 1 for count in rows.counts],
            drafts=rows.drafts,
            wanted=rows.wanted,
            num_blocks=batch.num_blocks(slots),
            states=states,
            states_after=states_after,
        )
        return chain.verify(verifying, batch.block_table, rounds, is_sampled=not rows.is_greedy)

    # Drafts on the device, before the host has read the step

    def can_draft_on_device(self, batch: StepRows) -> bool:
        """Whether the device can draft after a step, about to be launched, before the host reads the step's tokens.

        It cannot after prompts, where entries were postponed, or where sampling a draft depends on the drafts before
        it. Where the drafts of an unread step were made on the device, those of the next step must be too.
        """
        wanted, slots = batch.num_next_drafts, batch.slots
        if not self._has_plain_positions or not isinstance(self._passes.backend, GPUAttentionBackend):
            return False
        if self._has_skipped or self._states.has_idle_steps:
            return False
        if batch.total_seqs_num_decode < len(slots):
            return False
        done = self._num_done[slots]
        if (done == _ON_DEVICE).any():
            return any(wanted) or self._input_batch.are_positions_unread(batch)
        ends = np.array(batch.context_lens, dtype=np.int64)
        if not any(wanted):
            return False
        if self._input_batch.need_drafts(slots, ends + max(wanted)):
            return False
        return bool((done >= ends - np.array(batch.num_scheduled_tokens, dtype=np.int64)).all())

    def draft_on_device(
        self,
        inputs: StepInputs,
        step: DeviceInputs,
        device_batch: DeviceBatch,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        wanted: list[int],
        *,
        is_greedy: bool,
    ) -> DeviceDrafts:
        """Accept a step's sampled tokens and draft after them, all on the device.

        The caller calls `take_from_device` once the host has read the step.

        `token_ids`: sampled tokens on the devices of all ranks, negative where none could be sampled. # [S]
        `inputs` is resolved on rank 0. `hidden`, `wanted` and `is_greedy` are as in `draft`.
        """
        slots, most, backend = inputs.slots, max(wanted, default=0), self._passes.backend
        assert isinstance(backend, GPUAttentionBackend)
        accepted = device_batch.accept(inputs, step, token_ids, self._input_batch.states_per_slot)
        self._num_done[slots] = _ON_DEVICE
        longest, tables = inputs.seq_lens + (1 + most), step.metadata.block_tables[: len(slots)]
        upload = self._uploads.begin()
        self._num_stored[slots] = self._input_batch.capacity(slots)
        on_device, capacity = upload.add([slots, self._num_stored[slots]])
        following = backend.build_bounded(longest, tables, 1, upload.add)
        latest = None if self.reads_hidden else backend.build_bounded(longest, tables, 2, upload.add)
        upload.go()

        def run(
            metadata: TritonMetaData,
            ids: torch.Tensor,
            positions: torch.Tensor,
            states: torch.Tensor | None,
            *,
            is_first: bool,
        ) -> torch.Tensor:
            """Run a pass over consecutive positions of each row; positions without a block are not stored.

            # 2 x [B, n]
            """
            size = self._input_batch.block_size
            at = positions.clamp(max=min(self._input_batch.max_model_len, tables.shape[1] * size) - 1)
            metadata.seq_lens = (at[:, -1] + 1).int()
            metadata.slot_mapping = mapped(tables, at, size).masked_fill(positions >= capacity[:, None], NO_SLOT)
            metadata.slot_mapping = metadata.slot_mapping.flatten()
            output = self._passes.run_on_device(metadata, ids.flatten(), at.flatten(), states, is_first=is_first)
            return output.view(*ids.shape, -1)[:, -1]

        if latest is None:
            # Entries of the step's own positions, with the tokens after them; rejected ones are overwritten later.
            ids = step.input_ids.index_copy(0, step.last_tokens, token_ids.clamp(min=0))
            output = self._passes.run_on_device(step.metadata, ids, step.positions, hidden, is_first=True)
            state = output[accepted.last]
        else:
            # If the last draft was accepted, it has no entry yet.
            at = accepted.lengths[:, None] + torch.arange(-2, 0, device=tables.device)
            state = run(latest, accepted.tokens, at, None, is_first=True)
        rows, choices = np.arange(len(slots)), list[_Choice]()
        firsts = inputs.sampled_positions[np.searchsorted(inputs.sampled_rows, rows)] + 1
        later = Later(accepted.counts - 1, int(np.bincount(inputs.sampled_rows).max()))
        for depth in range(most):
            choices.append(self._choose(state, rows, slots, firsts + depth, later, is_greedy=is_greedy))
            tokens = self._share_on_device(choices[-1])
            device_batch.drafts[on_device, depth] = tokens
            if depth + 1 < most:
                at = accepted.lengths[:, None] + (depth - self._token_offset)
                state = run(following, tokens[:, None], at, state if self.reads_hidden else None, is_first=False)
        if self._loaded.parallel.rank:
            return DeviceDrafts(tables, [])
        found = [each.launched.candidates for each in choices if each.launched is not None]
        columns = [each.tokens.masked_fill(~each.peaks.isfinite(), NO_TOKEN) for each in found]
        return DeviceDrafts(torch.stack(columns, 1) if columns else accepted.tokens[:, :0], choices)

    def settle(self, inputs: StepInputs, wanted: list[int]) -> None:
        """Record which entries `draft_on_device` has computed, once the step's tokens are stored."""
        slots = inputs.slots
        ends, stored = self._input_batch.num_read(slots) - self._token_offset, self._num_stored[slots]
        self._num_done[slots] = done = np.minimum(ends, stored)
        guessed = np.zeros_like(done)
        if not self.reads_hidden:
            computed = np.minimum(wanted or 0, max(wanted, default=1) - 1)
            guessed = np.clip(computed, 0, stored - done)
        self._num_guessed[slots] = guessed

    def take_from_device(self, inputs: StepInputs, made: DeviceDrafts, wanted: list[int]) -> list[list[int]]:
        """The drafts of each row from `draft_on_device`, after both they and the step's tokens were read. # [B]"""
        self.settle(inputs, wanted)
        slots, ends = inputs.slots, self._input_batch.num_read(inputs.slots)
        token_ids = made.on_host.reshape(len(slots), max(wanted, default=0))
        wanted = wanted or [0] * len(slots)
        drafts = token_ids.clip(0, self._vocab_size - 1)
        at = ends[:, None] + np.arange(drafts.shape[1])
        exists = at <= self._input_batch.max_model_len
        self._input_batch.write_drafts(np.broadcast_to(slots[:, None], at.shape)[exists], at[exists], drafts[exists])
        self._forget_sampled(slots)
        is_valid = (drafts == token_ids).cumprod(1)
        for depth, choice in enumerate(made.choices):
            if choice.probabilities is not None:
                is_next = (is_valid[:, depth] * (np.array(wanted) > depth)).tolist()
                self._store_proposals(choice._replace(positions=ends + depth), drafts[:, depth], is_next)
        return [row[:count] for row, count in zip(drafts.tolist(), wanted, strict=True)]

    def _can_choose(self, slots: _Ints, *, is_greedy: bool) -> bool:
        """Whether the operators support the sampling parameters of these slots."""
        chain = self._passes.chain
        if chain is None or is_greedy:
            return chain is not None
        return chain.samples and self._input_batch.are_of_operators(slots)

    def take(self, verified: Verified, rows: VerifiedRows, ends: list[int]) -> list[list[int]]:
        """The drafts of each row from `verify`. `ends`: end of the entries of the accepted tokens. # each [B]"""
        slots = rows.slots
        if self._are_current:
            self._num_done[slots] = ends
        else:
            firsts, past = np.array(rows.firsts), np.array(ends)
            is_current = self._num_done[slots] == firsts
            waiting = np.flatnonzero(~is_current)
            done = np.maximum(self._num_done[slots], firsts - self._states.most)
            spans = slots, np.array(rows.counts), np.array(rows.ends)
            self._states.store(verified.hidden, spans, waiting, np.maximum(done, firsts)[waiting], past[waiting])
            self._num_done[slots] = np.where(is_current, past, done)
        self.has_caught_up = False
        drafts: list[list[int]] = [[] for _ in range(len(slots))]
        _fill(drafts, verified.rows, verified.drafts, verified.counts)
        return drafts

    def proposals(self, inputs: StepInputs) -> Proposals | None:
        """Those of a step's drafts that were sampled at random, with their distributions, for rejection sampling."""
        if not self._sampled or not inputs.has_drafts:
            return None
        rows, token_ids, probabilities = [], [], []
        positions = inputs.sampled_positions
        for row in np.flatnonzero(inputs.sampled_rows[1:] == inputs.sampled_rows[:-1]).tolist():
            sampled = self._sampled.get(int(inputs.sampled_slots[row]))
            depth = -1 if sampled is None else int(positions[row]) - sampled.position
            if sampled is not None and 0 <= depth < len(sampled.token_ids):
                assert sampled.token_ids[depth] == inputs.input_ids[inputs.last_tokens[row] + 1]
                rows.append(row)
                token_ids.append(sampled.token_ids[depth])
                probabilities.append(sampled.probabilities[depth])
        if not rows:
            return None
        at = np.array(rows)
        return Proposals(at, inputs.sampled_slots[at], np.array(token_ids), torch.stack(probabilities))

    def wait(self, inputs: StepInputs, hidden: torch.Tensor | None, starting: _Ints) -> bool:
        """Replaces `draft` where no row drafts: store the step's hidden states for later entries.

        Returns False, and stores nothing, where the step verified drafts. The arguments are as in `draft`.
        # hidden [T, features]
        """
        if inputs.has_drafts:
            return False
        slots = inputs.slots
        self._forget_sampled(slots)
        self._begin(slots, inputs.seq_lens - inputs.query_lens, starting)
        if not self.reads_hidden:
            return True
        assert hidden is not None
        self._states.store_idle_step(hidden, inputs)
        return True

    def skip(self, inputs: StepInputs, starting: _Ints) -> None:
        """Replaces `wait` where no row will draft for many steps: store nothing. The arguments are as in `draft`.

        This call is the drafter's whole cost in such a step, so it does as little as possible.
        """
        self._sampled.clear()
        if self.reads_hidden:
            self._has_skipped = True
        elif len(starting):
            self._begin(inputs.slots, inputs.seq_lens - inputs.query_lens, starting)

    def _begin(self, slots: _Ints, firsts: _Ints, starting: _Ints = _NO_SLOTS) -> None:
        """Register the rows of a step, which begins at positions `firsts` of the rows. # 2 x [B], [starting]

        Entries before the step are skipped for rows that start, and for all rows if earlier steps were skipped.
        """
        if self._has_skipped:
            self._has_skipped = False
            self._num_done.fill(_SKIPPED)
            self._states.drop_idle_steps()
        self._num_done[starting] = _SKIPPED
        is_new = self._num_done[slots] == _SKIPPED
        if is_new.any():
            self._num_done[slots[is_new]], self._num_guessed[slots[is_new]] = firsts[is_new], 0

    # Steps of one call

    def _computed(self, inputs: StepInputs) -> tuple[_Ints, _Ints, _Ints, npt.NDArray[np.bool_]]:
        """For each row: slot, first position of the step, number of tokens with valid KV, and whether it sampled."""
        slots = inputs.slots
        is_sampled = np.zeros(len(slots), dtype=np.bool_)
        is_sampled[inputs.sampled_rows] = True
        computed = np.where(is_sampled, self._input_batch.num_read(slots) - 1, inputs.seq_lens)
        return slots, inputs.seq_lens - inputs.query_lens, computed, is_sampled

    def _drafts_with_room(
        self, slots: _Ints, computed: _Ints, is_sampled: npt.NDArray[np.bool_], wanted: _Ints
    ) -> tuple[_Ints, _Ints]:
        """For each row: the number of drafts, limited by its blocks and context length, and the end of its entries.

        # 4 x [B] -> 2 x [B]
        """
        ends = computed if self._token_offset else computed + is_sampled
        capacity = self._input_batch.capacity(slots)
        room = np.minimum(capacity - ends + 1, self._input_batch.max_model_len - computed - 1)
        num_drafts = np.maximum(np.minimum(wanted, room), 0) * is_sampled
        return num_drafts, np.minimum(ends, capacity)

    def _forget_sampled(self, slots: _Ints) -> None:
        """Drop the drafts that slots sampled at random: the step has verified them."""
        if self._sampled:
            for slot in slots.tolist():
                self._sampled.pop(slot, None)

    def _first_pass(
        self, entries: Entries, hidden: torch.Tensor | None, inputs: StepInputs, firsts: _Ints, rows: _Ints
    ) -> torch.Tensor:
        """Run the first pass. Returns the drafter's output for each slot's last entry. # [rows, hidden_size]"""
        last: list[torch.Tensor] = []
        for chosen, part in self._split_passes(entries):
            states = None
            if self.reads_hidden:
                assert hidden is not None
                states = self._states.of_entries(part, hidden, inputs, firsts[chosen], rows[chosen])
            if part is entries and (output := self._replayed(part, states, is_first=True)) is not None:
                return output
            span = self._input_batch.draft_span(*part, self._token_offset)
            metadata = self._passes.prepare(span, part.ends - part.begins, part.ends)
            output = self._passes.run(metadata, span, states, is_first=True)
            is_last = part.ends == entries.ends[chosen]
            at = (np.cumsum(part.ends - part.begins) - 1)[is_last]
            last.append(output[torch.from_numpy(at).to(output.device)])
        return last[0] if len(last) == 1 else torch.cat(last)

    def _replayed(
        self, entries: Entries, states: torch.Tensor | None, tokens: torch.Tensor | None = None, *, is_first: bool
    ) -> torch.Tensor | None:
        """Run a pass by a captured graph, with the `states` of all entries; None if no graph fits the pass.

        `tokens`: the token of each row's single entry, on the device, if the host has not read it. # [rows] int64
        """
        graphs = self._passes.graphs
        if graphs is None:
            return None
        slots, begins, ends = entries
        length = int((ends - begins).max())
        runner = graphs.runner_for(ends, length, is_first=is_first)
        if runner is None:
            return None
        span = self._input_batch.draft_span(slots, ends - length, ends, self._token_offset)
        return graphs.draft(runner, span, begins, ends, states, tokens)

    def _draft_at_once(
        self,
        entries: Entries,
        hidden: torch.Tensor | None,
        inputs: StepInputs,
        firsts: _Ints,
        rows: _Ints,
        drafting: _Ints,
        num_drafts: _Ints,
        drafts: list[list[int]],
        *,
        is_greedy: bool,
    ) -> bool:
        """Write drafts to `drafts` by one call of the operators; False if several calls are needed.

        `drafting`: indices into `rows` of the rows that draft. `num_drafts`: number of drafts of each row of the step.
        """
        chain = self._passes.chain
        slots, begins, ends = entries
        lengths = ends - begins
        stops = np.cumsum(lengths)
        if chain is None or not 0 < len(drafting) <= chain.max_rows or int(stops[-1]) > self._passes.max_tokens:
            return False
        counts = num_drafts[rows[drafting]]
        if (counts[1:] > counts[:-1]).any():
            drafting = drafting[np.argsort(-counts, kind="stable")]
            counts = num_drafts[rows[drafting]]
        most = int(counts[0])
        states = None
        if self.reads_hidden:
            assert hidden is not None
            states = self._states.of_entries(entries, hidden, inputs, firsts, rows)
        span = self._input_batch.draft_span(slots, begins, ends, self._token_offset, num_more=most)
        metadata = self._passes.prepare(span, lengths, ends)
        assert metadata.step is not None, "recorded passes run where the operators read the step"
        found = chain.run(
            torch.from_numpy(span.token_ids),
            torch.from_numpy(span.positions),
            metadata.step,
            states,
            DraftingRows(
                counts=counts,
                slots=slots[drafting],
                last=stops[drafting] - 1,
                next_positions=self._input_batch.carried_positions(slots[drafting], ends[drafting]),
                block_tables=span.block_tables[drafting],
            ),
            is_sampled=not is_greedy,
        )
        _fill(drafts, rows[drafting], found, counts)
        if not self.reads_hidden:
            num_valid = np.array([len(drafts[row]) for row in rows[drafting].tolist()])
            self._num_guessed[slots[drafting]] = np.minimum(counts - 1, num_valid)
        return True

    def _split_passes(self, entries: Entries) -> Iterator[tuple[_Ints, Entries]]:
        """Split entries into passes of at most `max_num_batched_tokens`, each with its rows."""
        slots, begins, ends = entries
        counts = ends - begins
        total = int(counts.sum())
        if total <= self._passes.max_tokens:
            yield np.arange(len(slots)), entries
            return
        stops = np.cumsum(counts)
        for start in range(0, total, self._passes.max_tokens):
            # Each row's share of the entries `start` to `start + max_tokens`, counted over all rows.
            low = np.clip(start - (stops - counts), 0, counts)
            high = np.clip(start + self._passes.max_tokens - (stops - counts), 0, counts)
            chosen = np.flatnonzero(high > low)
            yield chosen, Entries(slots[chosen], (begins + low)[chosen], (begins + high)[chosen])

    def _draft_following(
        self,
        state: torch.Tensor,
        rows: _Ints,
        slots: _Ints,
        ends: _Ints,
        num_drafts: _Ints,
        drafts: list[list[int]],
        *,
        is_greedy: bool,
    ) -> None:
        """Append the drafts that follow `state`, one per pass. # state [rows, hidden_size], the rest [rows]

        On a GPU each pass reads the previous tokens on the device, and the host waits once, for all drafts, unless a
        row's penalties, masks or bad words depend on its previous draft.
        """
        most, first_rows, first_slots, wanted = int(num_drafts.max()), rows, slots, num_drafts
        waits = self._loaded.device_api.is_host or not is_greedy
        if waits and self._loaded.parallel.size == 1 and not self._loaded.device_api.is_host:
            # Other ranks have no sampling parameters, so they know only for greedy steps that drafts are independent.
            waits = self._input_batch.need_drafts(slots, ends + (self._token_offset + most))
        unread: list[_Choice] = []
        span: DraftSpan | None = None
        metadata: AttentionMetaData | None = None
        for depth in range(most):
            positions = ends + (self._token_offset + depth)
            choice = self._choose(state, rows, slots, positions, is_greedy=is_greedy)
            goes_on, tokens = num_drafts > depth + 1, None
            if waits:
                token_ids, is_valid = self._read([choice], drafts)
                self._input_batch.write_drafts(slots, positions, np.where(is_valid, token_ids, 0))
                goes_on &= is_valid
            else:
                unread.append(choice)
                if goes_on.any():
                    tokens = self._share_on_device(choice)
            if not goes_on.any():
                break
            if not goes_on.all():
                kept = np.flatnonzero(goes_on)
                rows, slots, ends, num_drafts = rows[kept], slots[kept], ends[kept], num_drafts[kept]
                [at] = [torch.from_numpy(kept)] if tokens is None else self._uploads.send([kept])
                state = state[at.to(state.device)]
                tokens = None if tokens is None else tokens[at]
                span = None
            begins = ends + depth
            states = state if self.reads_hidden else None
            replayed = self._replayed(Entries(slots, begins, begins + 1), states, tokens, is_first=False)
            if replayed is not None:
                state = replayed
                continue
            if span is not None and metadata is not None and self._passes.are_recorded:
                # A recorded pass reads the step's arrays again on each call.
                span.token_ids[:] = self._input_batch.tokens_at(slots, begins + self._token_offset)
                span.positions[:] += 1
                span.slot_mapping[:] = self._input_batch.slot_mapping(slots, begins)
                metadata.seq_lens += 1
            else:
                span = self._input_batch.draft_span(slots, begins, begins + 1, self._token_offset, num_more=most)
                metadata = self._passes.prepare(span, np.ones(len(slots), dtype=np.int64), begins + 1)
            state = self._passes.run(metadata, span, states, tokens, is_first=False)
        if unread:
            self._read(unread, drafts)
        if not self.reads_hidden:
            # Every draft up to the first invalid one, except the last, was the input of a pass.
            num_valid = np.array([len(drafts[row]) for row in first_rows.tolist()])
            self._num_guessed[first_slots] = np.minimum(wanted - 1, num_valid)

    def _choose(
        self,
        state: torch.Tensor,
        rows: _Ints,
        slots: _Ints,
        positions: _Ints,
        later: Later | None = None,
        *,
        is_greedy: bool,
    ) -> _Choice:
        """Choose a token for each row, with the noise that the target will sample with; the result is on the device.

        With rejection sampling the noise is the drafter's own. `later`: offset from `positions` to the positions of
        the chosen tokens. # [rows, hidden_size], 3 x [rows]
        """
        parallel, head = self._loaded.parallel, self._passes.head
        if parallel.size == 1 and is_greedy and head is not None and len(state) <= head.max_rows:
            return _Choice(rows, slots, positions, LaunchedTokens.of_host(*head.choose(state)))
        logits = self._model.compute_logits(state)
        if parallel.rank:
            return _Choice(rows, slots, positions, None)
        stream = DRAFT if self._by_rejection else SAMPLE
        known = later is None
        sampling = self._input_batch.draft_sampling(slots, positions, stream=stream, are_tokens_known=known)
        sampling = dataclasses.replace(sampling, later=later)
        send = None if self._loaded.device_api.is_host else self._uploads.send
        if not self._by_rejection:
            return _Choice(rows, slots, positions, self._sampler.launch(logits, sampling, send))
        launched, probabilities = self._sampler.launch_from(logits, sampling, send)
        return _Choice(rows, slots, positions, launched, probabilities)

    def _share_on_device(self, choice: _Choice) -> torch.Tensor:
        """A choice's tokens on the devices of all ranks, before the host has read them. # [rows] int64

        An invalid token is replaced by a valid token id, since the next pass reads its embedding.
        """
        parallel = self._loaded.parallel
        if choice.launched is None:
            tokens = torch.empty(len(choice.rows), dtype=torch.int64, device=self._loaded.device)
        else:
            tokens = choice.launched.token_ids.clamp(0, self._vocab_size - 1)
        return tokens if parallel.size == 1 else parallel.broadcast(tokens)

    def _read(self, choices: list[_Choice], drafts: list[list[int]]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
        """Wait for the choices of consecutive depths, and append each row's tokens to `drafts`, up to its first
        invalid one. Returns the tokens, and whether each is valid. # -> 2 x [rows of all choices]
        """
        counts = [len(choice.rows) for choice in choices]
        token_ids = np.zeros(sum(counts), dtype=np.int64)
        stops = np.cumsum(counts)
        for each, found in zip(np.split(token_ids, stops[:-1]), self._sampled_tokens(choices), strict=True):
            each[:] = found
        token_ids = self.share(token_ids)
        is_valid = (token_ids >= 0) & (token_ids < self._vocab_size)
        before = {row: len(drafts[row]) for row in choices[0].rows.tolist()} if len(choices) > 1 else {}
        for depth, (choice, stop) in enumerate(zip(choices, stops.tolist(), strict=True)):
            of_choice, rows = slice(stop - len(choice.rows), stop), choice.rows.tolist()
            # A row has no further drafts after its first invalid one.
            is_next = [not depth or len(drafts[row]) == before[row] + depth for row in rows]
            if choice.probabilities is not None:
                self._store_proposals(choice, token_ids[of_choice], is_next)
            tokens = zip(rows, token_ids[of_choice].tolist(), is_valid[of_choice].tolist(), is_next, strict=True)
            for row, token_id, is_good, is_due in tokens:
                if is_good and is_due:
                    drafts[row].append(token_id)
        return token_ids, is_valid

    def _sampled_tokens(self, choices: list[_Choice]) -> Iterator[_Ints]:
        """The tokens of each choice, -1 where none could be sampled; zeros where other ranks sample. # [rows] each"""
        on_device = [each.launched for each in choices if each.launched is not None and each.launched.on_host is None]
        words: Iterator[torch.Tensor | None] = iter([None] * len(choices))
        download: Download | None = None
        if on_device and not self._loaded.device_api.is_host:
            parts = [each.candidates.words for each in on_device]
            download = self._downloads.begin(torch.cat(parts, 1))
            arrived, stops = download.wait(), np.cumsum([part.shape[1] for part in parts]).tolist()
            words = iter([arrived[:, stop - part.shape[1] : stop] for part, stop in zip(parts, stops, strict=True)])
        for choice in choices:
            if choice.launched is None:
                yield np.zeros(len(choice.rows), dtype=np.int64)
                continue
            sampled = choice.launched.read(None if choice.launched.on_host is not None else next(words))
            token_ids = sampled.token_ids.copy()
            token_ids[[*sampled.non_finite, *sampled.refused]] = -1
            yield token_ids
        if download is not None:
            self._downloads.give_back(download)

    def _store_proposals(self, choice: _Choice, token_ids: _Ints, is_next: list[bool]) -> None:
        """Store the distributions of drafts until they are verified, for rows whose previous drafts are valid."""
        assert choice.launched is not None
        assert choice.launched.rows.random is not None
        assert choice.probabilities is not None
        for row, of_row in zip(choice.launched.rows.random.rows.tolist(), choice.probabilities, strict=True):
            if is_next[row]:
                slot, position = int(choice.slots[row]), int(choice.positions[row])
                made = self._sampled.setdefault(slot, _Sampled(position, [], []))
                made.token_ids.append(int(token_ids[row]))
                made.probabilities.append(of_row)

    def share(self, token_ids: _Ints) -> _Ints:
        """Broadcast rank 0's tokens to all ranks. # [rows]"""
        parallel = self._loaded.parallel
        if parallel.size == 1 or not len(token_ids):
            return token_ids
        return parallel.broadcast(torch.tensor(token_ids, device=self._loaded.device)).cpu().numpy()
