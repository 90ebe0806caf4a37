"""`Drafts`: the draft tokens of running sequences, and how many were accepted. Owned by the scheduler."""

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from typing import Any

from engine.batch import ScheduledBatchOutput
from engine.sequence import Sequence
from engine.speculative.ngram import PromptLookup

logger = logging.getLogger("engine.core.scheduler")

STATS_INTERVAL = 1000
"""Draft tokens between two log lines on their acceptance."""

_RESTS = 1024
"""Steps without drafts, after one that had some found no memory."""

MOST_CHOICES = 64
"""Tokens chosen in a step that verifies drafts, where fewer sequences than that may run."""


def most_choices(max_num_seqs: int) -> int:
    """Tokens chosen in one step, drafts verified included.

    A step of few rows is bound by reading the weights, and verifies drafts for nothing; one of many is bound by
    arithmetic, and drafts would hold up everybody else's tokens.
    """
    return max(max_num_seqs, MOST_CHOICES)


def most_rows(max_num_seqs: int, num_drafts: int) -> int:
    """Sequences of a step that verifies so many drafts of each at most."""
    return most_choices(max_num_seqs) // (1 + num_drafts)


class Drafts:
    """Where the next step's drafts come from: from the runner, or from what sequences looked like before."""

    def __init__(self, config: Any, max_num_seqs: int) -> None:
        """`config` is the scheduler's; drafts are off without its `speculative_config`."""
        speculative = getattr(config, "speculative_config", None)
        self.are_on = speculative is not None
        self.most: int = speculative.num_speculative_tokens if speculative is not None else 0
        """Of a sequence in a step."""
        self._has_proposed = False
        self._rests = 0
        """Steps for which nobody drafts."""
        self.num_proposed = 0
        self.num_accepted = 0
        self._matched: tuple[int, int] | None = None
        """Tokens that must match for a sequence to draft, and that are compared at most; None: the runner drafts."""
        if speculative is not None and getattr(speculative, "speculative_method", None) == "ngram":
            self._matched = speculative.prompt_lookup_min, speculative.prompt_lookup_max
        self._most_rows = most_rows(max_num_seqs, self.most)

    def begin_step(self) -> None:
        """A step is scheduled, which has no drafts so far."""
        self._has_proposed = False

    def drop(self, seqs: Iterable[Sequence]) -> None:
        """Have these not draft in the next step: blocks for it would be others'."""
        self._has_proposed = False
        for seq in seqs:
            seq.spec_token_ids = []

    def propose(self, seqs: Rows[Sequence], budget: int) -> None:
        """Have the sequences that decode in the next step, of so many tokens at most, draft what may follow.

        With more of them than could each have all drafts nobody has any. A grammar drafts nothing, for its next mask
        needs the token before.
        """
        if self._matched is None or not seqs:
            return
        is_full = self._rests > 0 or len(seqs) > min(self._most_rows, budget // (1 + self.most))
        self._rests -= self._rests > 0
        for seq in seqs:
            count = min(self.most, seq.num_useful_drafts)
            if is_full or not count or seq.matcher is not None:
                seq.spec_token_ids = []
                continue
            if seq.lookup is None:
                seq.lookup = PromptLookup(*self._matched)
            seq.spec_token_ids = seq.lookup.propose(seq.token_ids, count, seq.num_placeholder)
            self._has_proposed |= bool(seq.spec_token_ids)

    def rest(self) -> bool:
        """Have nobody draft for a while, as a step found no memory; False where the last one had no drafts anyway."""
        had_any, self._has_proposed = self._has_proposed, False
        if had_any:
            logger.warning("A step that verified drafts found no memory: none are made for %d steps", _RESTS)
            self._rests = _RESTS
        return had_any

    @property
    def tokens_a_row(self) -> int:
        """Which a step must have room for where as many sequences run as may: drafts that are looked up need none."""
        return 1 + self.most if self._matched is None else 1

    def take(
        self, seqs: Iterable[Sequence], fwd_output: ScheduledBatchOutput, verified: Mapping[int, list[int]] | None
    ) -> list[Sequence]:
        """Count what was accepted in a step, and keep the drafts that it brings for the next one.

        `verified`: the step's drafts, by sequence; None: those that the sequences have. Returns the sequences that got
        nothing because of their drafts, which may have left numbers in their last blocks that are none.
        """
        proposed, failed = fwd_output.draft_token_ids or {}, {*(fwd_output.errors or ()), *(fwd_output.refusals or ())}
        spoiled = []
        for seq in seqs:
            drafts = seq.spec_token_ids if verified is None else verified.get(seq.id)
            seq.spec_token_ids = proposed.get(seq.id, [])
            if not drafts or seq.id in failed:
                continue
            num_new = len(fwd_output.token_ids.get(seq.id, ()))
            if num_new:
                self.count(num_new, len(drafts))
            else:
                spoiled.append(seq)
            if seq.lookup is not None:
                seq.lookup.note(len(seq.token_ids), len(drafts), max(0, num_new - 1))
        return spoiled

    def count(self, num_accepted_tokens: int, num_drafts: int) -> None:
        """So many drafts of a sequence were verified; of the tokens that it got, one is the target model's own."""
        self.num_proposed += num_drafts
        self.num_accepted += num_accepted_tokens - 1
        if self.num_proposed % STATS_INTERVAL < num_drafts:
            logger.info(
                "[MTP Stats] Total draft tokens: %d, Accepted: %d, Acceptance rate: %.2f%%",
                self.num_proposed,
                self.num_accepted,
                100.0 * self.num_accepted / self.num_proposed,
            )
