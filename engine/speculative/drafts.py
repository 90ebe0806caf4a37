"""`Drafts`: the draft tokens of running sequences, and acceptance statistics. Owned by the scheduler."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Rows
from itertools import islice
from typing import Any

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.sequence import Sequence
from engine.speculative.adaptive import DraftPlan
from engine.speculative.ngram import PromptLookup

logger = logging.getLogger("engine.core.scheduler")

STATS_INTERVAL = 1000
"""Draft tokens between two log lines on the acceptance rate."""

_SUSPENDED_STEPS = 1024
"""Steps without drafts after a step with drafts ran out of memory."""

_MEASURED_EVERY = 8
"""Of this many steps in pauses, one is measured."""

_ROUNDS_SECONDS = 0.006
"""The longest duration of a step of several rounds, during which no prompt can start."""

_MOST_INDEXED = 8192
"""Tokens of long prompts that are indexed for look-ups before a step, which takes 2 to 9 ms. Indexed at once, 16
choices of a prompt of 131,072 tokens delayed a step by a second."""

_MIN_SAMPLED_TOKENS = 64
"""Tokens that a step with drafts may sample, if `max_num_seqs` is smaller."""


def max_sampled_tokens(max_num_seqs: int) -> int:
    """The most tokens sampled in one step, including positions that verify drafts.

    A step of few rows is bound by reading the weights, and verifies drafts at little cost. A step of many rows is
    bound by arithmetic, and drafts would delay the tokens of all other sequences.
    """
    return max(max_num_seqs, _MIN_SAMPLED_TOKENS)


def max_verified_rows(max_num_seqs: int, num_drafts: int) -> int:
    """The most sequences of a step that verifies up to `num_drafts` drafts of each."""
    return max_sampled_tokens(max_num_seqs) // (1 + num_drafts)


class Drafts:
    """Makes the next step's drafts by prompt lookup, or takes the runner's, in the number that `DraftPlan` chooses."""

    def __init__(self, config: Any, max_num_seqs: int, max_rounds: int = 1) -> None:
        """`config` is the scheduler's; drafts are off without its `speculative_config`.

        `max_rounds`: the most rounds of a step that verifies drafts, drafts, and verifies again.
        """
        speculative = getattr(config, "speculative_config", None)
        self.are_on = speculative is not None
        self.max_drafts: int = speculative.num_speculative_tokens if speculative is not None else 0
        """The most drafts of a sequence in a step."""
        self._drafts_by_model: bool = getattr(speculative, "drafts_by_model", False)
        self._max_rounds = max_rounds if self._drafts_by_model else 1
        self._round_seconds = math.inf
        """Duration of a round of the latest measured step of decodes."""
        self.plan = DraftPlan(self.max_drafts, by_model=self._drafts_by_model)
        self.num_verifications = 0
        """Number of verifications: steps that verified drafts, counted per sequence."""
        self.num_proposed = 0
        self.num_accepted = 0
        self.accepted_by_position = [0] * self.max_drafts
        """Number of accepted drafts by their index: first, second, ..."""
        self._has_proposed = False
        """Whether the step being scheduled has drafts."""
        self._suspended_steps = 0
        """Remaining steps for which no drafts are made."""
        self.pause_left = 0
        """Remaining steps of a pause, in which nothing is drafted, planned or stored, so that a step takes as long as
        without a drafter: `take` need not be called for a step without drafts."""
        self._pause_length, self._paused_rows = 0, 0
        """The pause's initial length, and the number of rows for which it is valid."""
        self._num_unmeasured = 0
        """Number of steps since the last one that was measured."""
        self._match_lengths: tuple[int, int] | None = None
        """The fewest tokens that must match in a lookup, and the most compared; None if the runner drafts."""
        if speculative is not None and getattr(speculative, "speculative_method", None) == "ngram":
            self._match_lengths = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        self._lookups: dict[int, PromptLookup] = {}
        """The indices of live sequences by id, created when first needed."""
        self._max_sampled = max_sampled_tokens(max_num_seqs)
        self._draft_seconds = 0.0
        """Seconds of drafting in the step that was read last."""
        self._num_accepted = 0
        """Number of drafts accepted in that step."""
        self._num_verified_rows = 0
        """Number of rows of that step that got a token, summed over its rounds if the step had several."""
        self.num_rounds_read = 1
        """Number of rounds of that step."""

    @property
    def num_lookahead_tokens(self) -> int:
        """Number of positions after a step's tokens at which further rounds and a drafter store keys and values."""
        if not self._drafts_by_model:
            return 0
        return self.max_drafts + (self.num_rounds - 1) * (1 + self.max_drafts)

    @property
    def num_rounds(self) -> int:
        """The most rounds of a step, so that it stays short."""
        fits = self._max_rounds * self._round_seconds <= _ROUNDS_SECONDS
        return self._max_rounds if fits else max(1, int(_ROUNDS_SECONDS / self._round_seconds))

    def begin_step(self) -> None:
        """Begin to schedule a step, which has no drafts yet."""
        self._has_proposed = False

    def propose(self, seqs: Rows[Sequence], budget: int) -> None:
        """Set the drafts of the sequences that decode in the next step, which may have `budget` tokens.

        The runner's drafts are truncated to the budget. Drafts of a sequence with a grammar end before the first one
        that the grammar rejects, or cannot check because the token before is not read yet.
        """
        if not self.are_on or not seqs:
            return
        if self.pause_left and len(seqs) == self._paused_rows:
            self.pause_left -= 1
            return
        num_steps = 1 + self._pause_length - self.pause_left
        room = max(0, min(budget, self._max_sampled) - len(seqs))
        self.plan.plan(seqs, room, num_steps)
        is_suspended = self._suspended_steps > 0
        self._suspended_steps = max(0, self._suspended_steps - num_steps)
        if self._match_lengths is not None:
            num_left, lacking = _MOST_INDEXED, list[tuple[Sequence, int]]()
            for seq in seqs:
                is_unknown = seq.matcher is not None and seq.num_placeholder
                count = 0 if is_suspended or is_unknown else min(self.plan.limit(seq), seq.num_useful_drafts)
                seq.spec_token_ids = []
                if count and self._lookup(seq).lacks_many(len(seq.token_ids)):
                    lacking.append((seq, count))
                elif count:
                    self._look_up(seq, count)
            for seq, count in sorted(lacking, key=lambda each: len(each[0].token_ids)):
                lookup = self._lookup(seq)
                num_left -= lookup.index(seq.token_ids, num_left)
                if lookup.lacks_many(len(seq.token_ids)):
                    break
                self._look_up(seq, count)
        elif is_suspended:
            for seq in seqs:
                seq.spec_token_ids = []
        self._shorten(seqs, room)
        self.pause_left = self._pause_length = 0 if self._has_proposed else self.plan.num_unplanned
        if self.pause_left:
            self._draft_seconds, self._num_accepted, self.num_rounds_read = 0.0, 0, 1
        self._paused_rows = len(seqs)

    def is_idle(self, seqs: Rows[Sequence]) -> bool:
        """Whether these sequences have no drafts for the next step or for the one after it."""
        if self.pause_left or not self.are_on:
            return True
        if any(seq.spec_token_ids for seq in seqs):
            return False
        return not self._drafts_by_model or self.plan.is_idle

    def tokens_per_row(self, seqs: Rows[Sequence]) -> float:
        """The mean number of tokens per sequence in the next step, before `propose`."""
        if not self.are_on or not seqs or self.pause_left:
            return 1.0
        if self._drafts_by_model:
            return 1.0 + sum(len(seq.spec_token_ids) for seq in seqs) / len(seqs)
        return 1.0 if self.plan.is_idle else 1.0 + self.max_drafts

    def num_next(self, seqs: Collection[Sequence], num_decodes: int, *, is_current: bool = True) -> list[int] | None:
        """The number of drafts of each row that the runner makes after a step; None if the runner does not draft.

        Empty if no row drafts, now or for some steps. The first `num_decodes` of the sequences decode. `is_current`:
        False if an earlier step is unread, after which nothing is drafted.
        """
        if not self._drafts_by_model:
            return None
        if self._suspended_steps:
            return [0] * len(seqs)
        if self.pause_left or self.plan.is_stopped:
            return []
        if not is_current:
            return [0] * len(seqs)
        # The scheduled step itself yields at least one token.
        num_idle, limit_of = num_decodes if self.plan.is_idle else 0, self.plan.limit
        limits = [max(0, min(limit_of(seq), seq.num_useful_drafts - 1)) for seq in islice(seqs, num_idle, None)]
        return self.plan.limit_rows([0] * num_idle + limits)

    def num_next_interposed(self, num_rows: int) -> list[int] | None:
        """As `num_next`, for the prompts of an interposed step, whose sequences draft from their next step on."""
        if not self._drafts_by_model:
            return None
        return [] if self.pause_left or self.plan.is_stopped else [0] * num_rows

    def _lookup(self, seq: Sequence) -> PromptLookup:
        lookup = self._lookups.get(seq.id)
        if lookup is None:
            assert self._match_lengths is not None
            lookup = self._lookups[seq.id] = PromptLookup(*self._match_lengths)
        return lookup

    def _look_up(self, seq: Sequence, count: int) -> None:
        """Set at most `count` drafts of a sequence."""
        drafts = self._lookup(seq).propose(seq.token_ids, count, seq.num_placeholder)
        if drafts and seq.matcher is not None:
            drafts = drafts[: seq.matcher.count_allowed(drafts)]
        seq.spec_token_ids = drafts

    def _shorten(self, seqs: Rows[Sequence], room: int) -> None:
        """Truncate drafts to `room`: to equal numbers per sequence, or to one for the first sequences."""
        num_drafts = sum([len(seq.spec_token_ids) for seq in seqs])
        self._has_proposed = num_drafts > 0
        if num_drafts <= room:
            return
        drafting = [seq for seq in seqs if seq.spec_token_ids]
        most = room // len(drafting)
        for index, seq in enumerate(drafting):
            seq.spec_token_ids = seq.spec_token_ids[: most or int(index < room)]

    def drop(self, seqs: Iterable[Sequence]) -> None:
        """Remove the next step's drafts of these sequences, because others need their blocks."""
        self._has_proposed = False
        for seq in seqs:
            seq.spec_token_ids = []

    def suspend(self) -> bool:
        """Make no drafts for a while, because a step ran out of memory. Returns False if that step had none."""
        had_any, self._has_proposed = self._has_proposed, False
        if had_any:
            logger.warning(
                "a step that verified drafts ran out of memory: no drafts are made for %d steps", _SUSPENDED_STEPS
            )
            self._suspended_steps = _SUSPENDED_STEPS
        return had_any

    def may_follow_unread(self, batch: ScheduledBatch) -> bool:
        """Whether no model drafts after this step or the next one is read."""
        if not self._drafts_by_model:
            return True
        return self.pause_left > 0 and not (batch.scheduled_spec_decode_tokens or any(batch.num_next_drafts))

    def take(
        self,
        seqs: Iterable[Sequence],
        fwd_output: ScheduledBatchOutput,
        verified: Mapping[int, list[int]],
        computed: Collection[int] = (),
    ) -> list[Sequence]:
        """Count a step's accepted drafts, `verified` by sequence id, and store the drafts for the next step.

        `computed`: ids of sequences in steps submitted since, whose next drafts follow these. Returns the sequences
        that got no token because of their drafts; KV in their last blocks may be invalid.
        """
        without_token: list[Sequence] = []
        self._draft_seconds, self._num_accepted, self._num_verified_rows = 0.0, 0, 0
        self.num_rounds_read = fwd_output.num_rounds
        proposed, failed = fwd_output.draft_token_ids or {}, {*(fwd_output.errors or ()), *(fwd_output.refusals or ())}
        work, rounds = fwd_output.draft_work, fwd_output.verified_drafts
        if work is not None:
            self._draft_seconds = work.seconds
            self.plan.costs.note_drafting(work)
        if not proposed and not verified:
            for seq in seqs:
                if seq.spec_token_ids and seq.id not in computed:
                    seq.spec_token_ids = []
            return without_token
        for seq in seqs:
            if seq.id not in computed:
                seq.spec_token_ids = proposed.get(seq.id, [])
            drafts = verified.get(seq.id)
            if seq.id in failed or not (drafts or rounds):
                continue
            if rounds:
                verifications = rounds[seq.id]
            else:
                num_new = len(fwd_output.token_ids.get(seq.id, ()))
                verifications = [(len(drafts or ()), num_new - 1)]
                if (lookup := self._lookups.get(seq.id)) is not None:
                    lookup.note(len(seq.token_ids), len(drafts or ()), max(0, num_new - 1))
            for num_drafts, num_accepted in verifications:
                if num_accepted < 0:
                    without_token.append(seq)
                    continue
                self._num_verified_rows += bool(rounds)
                if num_drafts:
                    self.count(1 + num_accepted, num_drafts)
                    self._num_accepted += num_accepted
                    self.plan.note(seq, num_drafts, num_accepted)
        return without_token

    def note_duration(
        self, batch: ScheduledBatch, seconds: float, *, host_seconds: float = 0.0, drafts_on_device: bool = False
    ) -> None:
        """Record the duration of the step that was read last; it includes drafting if `drafts_on_device`.

        `host_seconds`: the time between the step before it and its launch, in which outputs were sent, messages taken
        in and the step scheduled. Drafts save a part of it.
        """
        if not self.are_on:
            return
        self._num_unmeasured += 1
        measures_all = self.plan.is_stopped and self.plan.gate.needs_plain_steps
        if self.pause_left and self._num_unmeasured < _MEASURED_EVERY and not measures_all:
            return
        num_rows, rounds = batch.total_seqs_num_decode, self.num_rounds_read
        # In a pause, the step that `take` has read last may be one before it.
        num_accepted = self._num_accepted if batch.scheduled_spec_decode_tokens else 0
        if num_rows and not batch.total_seqs_num_prefill:
            self._round_seconds = seconds / rounds
        was_stopped = self.plan.is_stopped
        self.plan.note_step(
            batch,
            seconds + host_seconds,
            num_accepted + (self._num_verified_rows if rounds > 1 else num_rows),
            num_rounds=rounds,
            num_steps=self._num_unmeasured,
            draft_seconds=self._draft_seconds if batch.num_next_drafts else 0.0,
            has_drafted=drafts_on_device and any(batch.num_next_drafts),
        )
        self._num_unmeasured = 0
        if self.plan.is_stopped is not was_stopped:
            self.pause_left = self._pause_length = 0

    def forget(self, seq: Sequence) -> None:
        """Free the state of a finished sequence."""
        self._lookups.pop(seq.id, None)
        self.plan.forget(seq)

    def count(self, num_accepted_tokens: int, num_drafts: int) -> None:
        """Count a sequence's verified drafts; one of its `num_accepted_tokens` is the target's own token."""
        self.num_verifications += 1
        self.num_proposed += num_drafts
        self.num_accepted += num_accepted_tokens - 1
        for position in range(num_accepted_tokens - 1):
            self.accepted_by_position[position] += 1
        if self.num_proposed % STATS_INTERVAL < num_drafts:
            logger.info(
                "[MTP Stats] Total draft tokens: %d, Accepted: %d, Acceptance rate: %.2f%%",
                self.num_proposed,
                self.num_accepted,
                100.0 * self.num_accepted / self.num_proposed,
            )
