"""What bounds a step: `StepLimits` its tokens and rows, `StepBudget` its predicted time.

`StepBudget` says how many decodes and how much of prompts the next step may compute:

    one owner, only prompts               4 x bound, at most 66 x what a step costs before its first token
    one owner, prompts next to decodes    1.5 x bound, at most 33 x that cost
    several owners                        1 x bound, at most 10 x that cost

The bound is `max_step_seconds`. That cost is small in small models, so that where owners share the device their steps
take some milliseconds, and near a tenth of the bound in large ones.

A longer step of several owners is paused when a short prompt arrives of an owner that was served little, which is then
computed as a step of its own. The sum of what such interposed steps cost beyond their tokens is bounded.
"""

import logging
import math
from collections.abc import Collection

from engine.batch import DecodeRows, ScheduledBatch, StepBuilder
from engine.core.step_time import StepTimeModel, StepWork

logger = logging.getLogger(__name__)

_STEPS_BEFORE_GROWTH = 1024
"""Steps that must succeed before larger ones are tried again: each failure has prompts computed twice."""

_ALONE_PROMPTS, _ALONE_DECODING = 4.0, 1.5
"""What a step may take, in units of the bound, while there is one owner: where nothing decodes, and else."""
_ALONE_AFTER_SECONDS = 30.0
"""An owner counts as alone when there has been no other for so long."""
_LEAST_PROMPTS, _LEAST_PROMPTS_MIXED = 0.5, 0.25
"""In the same unit, what prompts get of each step, however long its decodes take; the second under `mixed`."""
_ALONE_PROMPTS_COSTS, _ALONE_DECODING_COSTS, _SHARED_COSTS = 66.0, 33.0, 10.0
"""Likewise, how many times what it costs before its first token a step takes at most: that cost is then 1.5 % of the
step, 3 % where the streams of one owner wait, and a tenth where owners share the device."""
_LEAST = 0.005
"""Seconds below which steps are not shortened: the scheduler and the messages cost time too."""
_MOST_GROWTH = 8.0
"""A default bound is at least `_SHARED_COSTS`, but grows no more than by this factor: otherwise large models on slow
processors would mostly read their weights."""
_CHUNK_MULTIPLE = 16
"""Chunks that time cuts are multiples of it, which suits the cache's blocks and the processor's tiles."""
_LEAST_CHUNK = 64
"""A step that computes prompts takes no smaller part of another one."""

_PAUSED_SECONDS, _PAUSED_COSTS = 0.008, 2.5
"""The least time of a step that is paused, in seconds and in units of what a step costs before its first token: a
pause costs up to half a millisecond, because the computing threads have to be woken again."""
_PAUSE_SECONDS = 0.0005
"""A pause in which nothing is interposed is counted as so much of what interposed steps may cost."""
_INTERPOSED_SHARE, _MOST_INTERPOSED = 0.01, 6.0
"""The share of all time that interposed steps may take beyond what their tokens would add to other steps, and how many
times what a step costs before its first token the allowance saves up."""
_MOST_SERVICE, _MOST_LEFT = 0.75, 5.0
"""A step is interposed for an owner with at most this recent service, where 1 is the mean of all owners. For an owner
with exactly that much, the allowance must hold so many fixed costs beyond that of the step, which are left to owners
that were served less; for an owner with less service, proportionally fewer."""
_INTERPOSED_BOUND, _LEAST_BOUND = 0.5, 0.02
"""The steps interposed in one step take at most the first number times its bound, and streams wait longer by that.
A bound counts as at least the second number of seconds, for small models, and as at most `max_step_seconds`."""
_FAILED_SECONDS = 10.0
"""After an interposed step raised, none is interposed for this time: other steps compute its sequences first."""


class StepLimits:
    """Most tokens that a step computes and most sequences that run, which a step out of memory halves for a while.

    No memory is measured here: a step that was too large is tried again as smaller ones.
    """

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self._max_tokens, self._max_rows = num_tokens, num_rows
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self._steps_left = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """Allow half of a step that ran out of memory. False where that step cannot be made smaller."""
        if num_tokens <= 1:
            return False
        if num_tokens > num_rows:
            # Prompts, which can be computed in smaller chunks.
            self.num_tokens = max(1, min(self.num_tokens, num_tokens) // 2)
        else:
            self.num_rows = max(1, min(self.num_rows, num_rows) // 2)
        self._steps_left = _STEPS_BEFORE_GROWTH
        logger.warning(
            "the device ran out of memory in a step of %d tokens of %d sequences; steps have at most %d tokens and %d "
            "sequences run for now: lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization",
            num_tokens,
            num_rows,
            self.num_tokens,
            self.num_rows,
        )
        return True

    def note_step(self) -> None:
        """Count a scheduled step; after enough of them the limits double, up to the configured ones."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
                self.num_rows = min(2 * self.num_rows, self._max_rows)
                if (self.num_tokens, self.num_rows) != (self._max_tokens, self._max_rows):
                    self._steps_left = _STEPS_BEFORE_GROWTH


class StepBudget:
    """What fits a step, by the durations of earlier ones.

    `max_step_seconds` is the configured bound; None: `default_seconds`, which grows with a step's fixed cost.
    `max_interposed_tokens`: the most tokens of an interposed step; 0: no step is interposed. `mixed`: whether decodes
    go before prompts. Call `begin_step` first in each step.
    """

    def __init__(
        self, max_step_seconds: float | None, default_seconds: float, max_interposed_tokens: int = 0, *, mixed: bool
    ) -> None:
        self._max_seconds = default_seconds if max_step_seconds is None else max_step_seconds
        self._grows = max_step_seconds is None
        self._max_interposed_tokens = max_interposed_tokens
        self._mixed = mixed
        self._model = StepTimeModel(self._max_seconds)
        self._is_alone = True
        self._owners: Collection[str] = ()
        """The owners that had sequences when a step was scheduled last."""
        self._alone_from = 0.0
        """When an owner that has no company counts as alone."""
        self._bound = self._max_seconds
        self._fixed = 0.0
        """What the next step costs before its first token, as predicted."""
        self._turn = 0
        self._interposed_left = 0.0
        """Seconds that may be interposed in the step that is scheduled now."""
        self._allowance = 0.0
        """Seconds that interposed steps may take now beyond what their tokens would add to other steps."""
        self._allowed_until = math.inf
        """When the allowance was last increased."""

    def note(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn how long a step took."""
        self._model.note(batch, seconds)

    def begin_step(self, owners: Collection[str], now: float) -> None:
        """Bound the step that is scheduled now. `owners` are those that have sequences."""
        if len(owners) > 1:
            self._alone_from = now + _ALONE_AFTER_SECONDS
        self._is_alone = now >= self._alone_from
        self._owners = owners
        self._fixed = self._model.fixed_seconds
        shared = _SHARED_COSTS * self._fixed
        bound = self._max_seconds
        if self._grows:
            bound = max(bound, min(shared, _MOST_GROWTH * bound))
        self._bound = bound if self._is_alone else min(bound, max(shared, _LEAST))
        gained = _INTERPOSED_SHARE * max(0.0, now - self._allowed_until)
        self._allowance = min(self._allowance + gained, _MOST_INTERPOSED * self._fixed)
        self._allowed_until = now
        self._interposed_left = _INTERPOSED_BOUND * min(self._max_seconds, max(self._bound, _LEAST_BOUND))

    def may_pause(self, batch: ScheduledBatch) -> bool:
        """Whether a step is long enough that others are interposed in it."""
        if not self._max_interposed_tokens:
            return False
        return self._model.seconds(StepWork.of(batch)) >= max(_PAUSED_SECONDS, _PAUSED_COSTS * self._fixed)

    @property
    def has_allowance(self) -> bool:
        """Whether one more step may be interposed, for an owner that was not served lately."""
        if not self._max_interposed_tokens or not self._owners:
            return False
        return self._interposed_left >= self._fixed and self._allowance >= self._fixed

    def may_interpose(self, owner: str, service: float) -> bool:
        """Whether one more step may be interposed, for an owner of this recent service, where 1 is the mean of all.

        The more an owner was served, the more of the allowance it leaves to others. An owner that is alone has its
        prompts in its own steps. Called in any thread.
        """
        if not self.has_allowance or service > _MOST_SERVICE or (self._is_alone and owner in self._owners):
            return False
        return self._allowance >= self._fixed * (1.0 + _MOST_LEFT * service / _MOST_SERVICE)

    def interposed_step(self, num_tokens: int) -> StepBuilder:
        """A step to interpose, of at most so many tokens, with the time that its prompts may take."""
        step = StepBuilder(min(self._max_interposed_tokens, num_tokens), 0)
        step.seconds = self._interposed_left - self._fixed
        return step

    def note_interposed(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count an interposed step, which took so long."""
        added = self._model.seconds(StepWork.of(batch)) - self._model.seconds(StepWork())
        # Other processes delay steps of any kind, and are no cost of this one.
        self._allowance -= min(max(0.0, seconds - added), self._fixed)
        self._interposed_left -= seconds

    def note_idle_pause(self) -> None:
        """Count a pause in which nothing was interposed, because the prompt that asked for it was too long."""
        self._allowance -= _PAUSE_SECONDS

    def note_failed_interposed(self) -> None:
        """Interpose no step for a while, because an interposed step raised."""
        self._allowance = -_INTERPOSED_SHARE * _FAILED_SECONDS

    def give_prompts_time(self, step: StepBuilder) -> None:
        """Set how long the prompts of a step may take whose decodes are chosen."""
        model, bound = self._model, self._bound
        seconds = bound
        if self._is_alone and not step.num_decodes:
            seconds = max(min(_ALONE_PROMPTS * bound, _ALONE_PROMPTS_COSTS * self._fixed), _LEAST)
        elif self._is_alone:
            most = bound if self._mixed else _ALONE_DECODING * bound
            seconds = max(min(most, _ALONE_DECODING_COSTS * self._fixed), _LEAST)
        if step.num_decodes:
            # On a machine whose other work disturbs steps, streams would otherwise often wait too long.
            seconds /= 1.0 + model.excess
        work = StepWork(decode_tokens=step.num_decode_tokens, decode_keys=sum(step.context_lens))
        least = (_LEAST_PROMPTS_MIXED if self._mixed else _LEAST_PROMPTS) * min(bound, seconds)
        step.seconds = max(seconds - model.seconds(work), least)

    def take(self, step: StepBuilder, start: int, count: int) -> None:
        """Count `count` tokens of a prompt after `start` others, which are added to the step."""
        step.seconds -= self._model.prompt_seconds(start, count)

    def chunk(self, step: StepBuilder, start: int, count: int) -> int:
        """How many of `count` tokens of a prompt, after `start` others, the rest of the step's time is for."""
        fitting = self._model.prompt_tokens(start, step.seconds, step.num_prompt_tokens)
        if fitting >= count:
            return count
        fitting -= fitting % _CHUNK_MULTIPLE
        if not step.num_prefills:
            return min(count, max(fitting, _CHUNK_MULTIPLE))
        return fitting if fitting >= _LEAST_CHUNK else 0

    def take_turns(self, rows: DecodeRows, lengths: list[int], tokens_per_row: float) -> tuple[DecodeRows, list[int]]:
        """Of several owners' decodes, as many as the bound suffices for: those of each owner take turns."""
        seqs = rows.seqs
        if self._is_alone or len(seqs) <= len(rows.costs):
            return rows, lengths
        work = StepWork(decode_tokens=tokens_per_row * len(seqs), decode_keys=sum(lengths))
        base = self._model.seconds(StepWork())
        added, left = self._model.seconds(work) - base, self._bound - base
        if added <= left:
            return rows, lengths
        room = max(len(rows.costs), int(len(seqs) * left / added))
        if room >= len(seqs):
            return rows, lengths
        first = self._turn % len(seqs)
        self._turn += room
        ranks: dict[str, float] = {}
        ranked = []
        # Among equals the order rotates, so that none of them is always among the first.
        rotated = (*range(first, len(seqs)), *range(first))
        for index in sorted(rotated, key=lambda index: seqs[index].last_turn):
            seq = seqs[index]
            ranks[seq.owner] = rank = ranks.get(seq.owner, 0.0) + 1.0 / seq.weight
            ranked.append((rank, index))
        # Sorting keeps the order of turns among equal ranks.
        ranked.sort(key=lambda entry: entry[0])
        chosen = sorted(index for _, index in ranked[:room])
        for index in chosen:
            seqs[index].last_turn = self._turn
        return DecodeRows(seqs[index] for index in chosen), [lengths[index] for index in chosen]
