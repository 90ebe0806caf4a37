"""The bounds of a step: `StepLimits` bounds its tokens and rows, `StepBudget` its predicted time.

`StepBudget` bounds the time of the next step's decodes and prompts:

    one owner, only prompts               4 x bound, at most 66 x the fixed cost of a step
    one owner, prompts next to decodes    1.5 x bound, at most 33 x the fixed cost
    several owners                        1 x bound, at most 34 x the fixed cost
    several owners, and no pause          1 x bound, at most 10 x the fixed cost

The bound is `max_step_seconds`. The fixed cost of a step is its time before the first token. It is small in small
models, so that steps of several owners take a few milliseconds, and about a tenth of the bound in large models.

A longer step of several owners is paused when an owner with little recent service sends a short prompt, which is then
computed in an interposed step. The total fixed cost of interposed steps is bounded. The nearer to that bound, the
shorter are the steps of several owners, down to those that are not paused.
"""

import logging
import math
from collections.abc import Collection

from engine.batch import DecodeRows, ScheduledBatch, StepBuilder
from engine.core.step_time import StepTimeModel, StepWork

logger = logging.getLogger(__name__)

_STEPS_BEFORE_GROWTH = 1024
"""Successful steps after which larger ones are tried again: each failure makes prompts be computed twice."""

_ALONE_PROMPTS, _ALONE_DECODING = 4.0, 1.5
"""Time of a step in units of the bound, while there is one owner: without decodes, and with decodes."""
_ALONE_AFTER_SECONDS = 30.0
"""Seconds without another owner after which an owner counts as the only one."""
_LEAST_PROMPTS, _LEAST_PROMPTS_MIXED = 0.5, 0.25
"""Least time of prompts in each step, in units of the bound, however long its decodes take; the second under
`mixed`."""
_ALONE_PROMPTS_COSTS, _ALONE_DECODING_COSTS, _SHARED_COSTS, _SHORT_COSTS = 66.0, 33.0, 34.0, 10.0
"""Most time of a step in units of its fixed cost, in the four cases above. The fixed cost is then 1.5 % of the step, 3
% if streams or several owners wait, and a tenth if prompts of light owners wait, too."""
_LEAST = 0.005
"""Seconds below which steps are not shortened: the scheduler and the messages cost time too."""
_MOST_GROWTH = 8.0
"""A default bound is at least `_SHORT_COSTS`, but grows no more than by this factor: otherwise large models on slow
processors would mostly read their weights."""
_CHUNK_MULTIPLE = 16
"""Chunks that are cut by time are multiples of it, which suits the cache's blocks and the processor's tiles."""
_LEAST_CHUNK = 64
"""Smallest chunk of a further prompt in a step that computes prompts."""

_PAUSED_SECONDS, _PAUSED_COSTS = 0.003, 2.5
"""Least time of a step that may be paused, in seconds and in units of the fixed cost: a pause costs up to 0.5 ms,
because the computing threads must be woken again."""
_PAUSE_SECONDS = 0.0005
"""A pause in which nothing is interposed is counted as so much of what interposed steps may cost."""
_INTERPOSED_SHARE, _MOST_INTERPOSED, _ALLOWANCE_OF_LONG = 0.022, 12.0, 2.0
"""Share of all time that interposed steps may take beyond the time that their tokens would add to other steps, the
most fixed costs that the allowance accumulates, and those that it must hold, beyond that of one step, for the longest
steps of several owners."""
_MOST_SERVICE, _MOST_LEFT = 0.9, 8.0
"""Short prompts precede the next step, or are added to it beyond its bound, for an owner with at most this recent
service, where 1 is the mean of all owners. For an owner with exactly that much, the allowance must hold so many fixed
costs beyond that of the step, which are left to owners that were served less; for an owner with less service,
proportionally fewer."""
_LEAST_BOUND = 0.02
"""The steps interposed before and in a step take at most as long as its bound, and streams wait longer by that. For
this, a bound counts as at least so many seconds, for small models, and as at most `max_step_seconds`."""
_LEFT_BY_LIGHTEST = 0.25
"""Most of that time that the owner which was served least lately leaves, to owners that were not served lately."""
_LEFT_BY_ADDED = 0.5
"""Part of that time that prompts which are added to a step leave, whatever the service of their owner."""
_ADDED_SHARE, _MOST_ADDED = 0.25, 4.0
"""Share of all time that they may take, since streams wait for them, and the most steps' worth of it that accumulates.
They cost no more there than in other steps."""
_FAILED_SECONDS = 10.0
"""Seconds without interposed steps after one has raised: other steps compute its sequences first."""


def _left(service: float, least: float) -> float:
    """Return the part of the time of interposed steps that an owner with this service leaves to others."""
    return min(service, _LEFT_BY_LIGHTEST) if service <= least else service


class StepLimits:
    """Most tokens of a step and most running sequences. A step that runs out of memory halves them for a while.

    Memory is not measured: a step that was too large is tried again as smaller steps.
    """

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self._max_tokens, self._max_rows = num_tokens, num_rows
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self._steps_left = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """Halve the limits after a step that ran out of memory. Returns False if that step cannot be smaller."""
        if num_tokens <= 1:
            return False
        if num_tokens > num_rows:
            # The step has prompts, which can be computed in smaller chunks.
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
        """Count a scheduled step. After enough steps the limits double, up to the configured ones."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
                self.num_rows = min(2 * self.num_rows, self._max_rows)
                if (self.num_tokens, self.num_rows) != (self._max_tokens, self._max_rows):
                    self._steps_left = _STEPS_BEFORE_GROWTH


class StepBudget:
    """Computes how much work fits a step, by the durations of earlier steps.

    `max_step_seconds` is the configured bound; None: `default_seconds`, which grows with a step's fixed cost.
    `max_interposed_tokens` is the most tokens of an interposed step; 0 means no interposed steps. `mixed`: whether
    decodes precede prompts. Call `begin_step` first in each step.
    """

    def __init__(
        self, max_step_seconds: float | None, default_seconds: float, max_interposed_tokens: int = 0, *, mixed: bool
    ) -> None:
        self._max_seconds = default_seconds if max_step_seconds is None else max_step_seconds
        self._grows = max_step_seconds is None
        self.max_interposed_tokens = max_interposed_tokens
        self._mixed = mixed
        self._model = StepTimeModel(self._max_seconds)
        self.is_alone = True
        """Whether no other owner had a sequence lately."""
        self._owners: Collection[str] = ()
        """The owners that had sequences when a step was scheduled last."""
        self._alone_from = 0.0
        """Time from which a single owner counts as the only one."""
        self._bound = self._max_seconds
        self._fixed = 0.0
        """Predicted fixed cost of the next step, in seconds."""
        self._turn = 0
        self._most_interposed = self._interposed = 0.0
        """Seconds that prompts beyond a step's bound may take, added to it or interposed, and those that they have
        taken since the last step ended."""
        self._allowance = 0.0
        """Seconds that interposed steps may now take beyond the time that their tokens would add to other steps."""
        self._added_left = math.inf
        """Seconds that prompts added to steps may now take."""
        self._allowed_until = math.inf
        """Time at which both were last increased."""

    def note(self, batch: ScheduledBatch, seconds: float) -> None:
        """Update the model with the duration of a step, which has ended."""
        self._model.note(batch, seconds)
        self._interposed = 0.0

    def begin_step(self, owners: Collection[str], now: float, *, has_slot: bool) -> None:
        """Compute the bound of the step that is scheduled now. `owners` are the owners with sequences.

        Steps of several owners are short where a light owner that comes could have no interposed step: without a free
        slot, or with little left of the allowance.
        """
        if len(owners) > 1:
            self._alone_from = now + _ALONE_AFTER_SECONDS
        self.is_alone = now >= self._alone_from
        self._owners = owners
        self._fixed = self._model.fixed_seconds
        passed = max(0.0, now - self._allowed_until)
        self._allowance = min(self._allowance + _INTERPOSED_SHARE * passed, _MOST_INTERPOSED * self._fixed)
        bound = self._max_seconds
        if self._grows:
            bound = max(bound, min(_SHORT_COSTS * self._fixed, _MOST_GROWTH * bound))
        shared = _SHORT_COSTS * self._fixed
        if self.max_interposed_tokens and has_slot:
            spare = max(0.0, self._allowance - self._fixed) / _ALLOWANCE_OF_LONG
            shared += (_SHARED_COSTS - _SHORT_COSTS) * min(spare, self._fixed)
        self._bound = bound if self.is_alone else min(bound, max(shared, _LEAST))
        self._allowed_until = now
        self._most_interposed = min(self._max_seconds, max(self._bound, _LEAST_BOUND))
        self._added_left = min(self._added_left + _ADDED_SHARE * passed, _MOST_ADDED * self._most_interposed)

    def may_pause(self, batch: ScheduledBatch) -> bool:
        """Return whether a step is long enough to interpose others."""
        if not self.max_interposed_tokens:
            return False
        return self._model.seconds(StepWork.of(batch)) >= max(_PAUSED_SECONDS, _PAUSED_COSTS * self._fixed)

    @property
    def has_allowance(self) -> bool:
        """Whether one more step may be interposed, for an owner that was not served lately."""
        if not self.max_interposed_tokens or not self._owners:
            return False
        return self._seconds_left(0.0) >= self._fixed and self._allowance >= self._fixed

    def may_interpose(self, owner: str, service: float, least: float) -> bool:
        """Return whether one more step may be interposed for an owner with this recent service, relative to the mean.

        The more an owner was served, the more of the allowance and of the time it leaves to others; of the time, an
        owner with no more than the `least` service leaves at most a fixed part. An owner that is alone has its prompts
        in its own steps. Called in any thread.
        """
        if not self.has_allowance or service > _MOST_SERVICE or (self.is_alone and owner in self._owners):
            return False
        if self._allowance < self._fixed * (1.0 + _MOST_LEFT * service / _MOST_SERVICE):
            return False
        return self._seconds_left(_left(service, least)) >= self._fixed

    def interposed_step(self, num_tokens: int, service: float, least: float) -> StepBuilder:
        """Create a step to interpose for an owner with this recent service, of at most `num_tokens` tokens, with the
        time that its prompts may take."""
        step = StepBuilder(min(self.max_interposed_tokens, num_tokens), 0)
        step.seconds = self._seconds_left(_left(service, least)) - self._fixed
        return step

    def _seconds_left(self, reserved: float) -> float:
        """Return the time that prompts beyond the step's bound may still take, if this part of all is reserved."""
        return (1.0 - reserved) * self._most_interposed - self._interposed

    def seconds_to_add(self, service: float = 0.0) -> float:
        """Return the time beyond a short step's bound for short prompts of an owner with this recent service."""
        if not self.max_interposed_tokens or self.is_alone or self._bound >= _LEAST_BOUND:
            return 0.0
        if service > _MOST_SERVICE:
            return 0.0
        return max(0.0, min(self._seconds_left(_LEFT_BY_ADDED), self._added_left))

    def note_added(self, seconds: float) -> None:
        """Subtract prompts that were added beyond the step's bound from the time of steps interposed in it."""
        self._interposed += seconds
        self._added_left -= seconds

    def note_interposed(self, batch: ScheduledBatch, seconds: float) -> None:
        """Subtract an interposed step, which took `seconds`, from the allowance."""
        added = self._model.seconds(StepWork.of(batch)) - self._model.seconds(StepWork())
        # At most the fixed cost: a longer delay comes from other processes on the machine.
        self._allowance -= min(max(0.0, seconds - added), self._fixed)
        self._interposed += seconds

    def note_idle_pause(self) -> None:
        """Count a pause in which nothing was interposed, because the prompt that asked for it was too long."""
        self._allowance -= _PAUSE_SECONDS

    def note_failed_interposed(self) -> None:
        """Stop interposing steps for a while, because an interposed step raised."""
        self._allowance = -_INTERPOSED_SHARE * _FAILED_SECONDS

    def give_prompts_time(self, step: StepBuilder) -> None:
        """Set the time of a step's prompts, after its decodes were chosen."""
        model, bound = self._model, self._bound
        seconds = bound
        if self.is_alone and not step.num_decodes:
            seconds = max(min(_ALONE_PROMPTS * bound, _ALONE_PROMPTS_COSTS * self._fixed), _LEAST)
        elif self.is_alone:
            most = bound if self._mixed else _ALONE_DECODING * bound
            seconds = max(min(most, _ALONE_DECODING_COSTS * self._fixed), _LEAST)
        if step.num_decodes and bound >= _LEAST_BOUND:
            # If other work on the machine delays steps, streams would otherwise often wait too long. They do not in a
            # small model's steps, and chunks of a few tokens would keep prompts waiting instead.
            seconds /= 1.0 + model.excess
        work = StepWork(decode_tokens=step.num_decode_tokens, decode_keys=sum(step.context_lens))
        least = (_LEAST_PROMPTS_MIXED if self._mixed else _LEAST_PROMPTS) * min(bound, seconds)
        step.seconds = max(seconds - model.seconds(work), least)

    def take(self, step: StepBuilder, start: int, count: int) -> None:
        """Subtract the time of `count` tokens of a prompt, after `start` others, that are added to the step."""
        step.seconds -= self._model.prompt_seconds(start, count)

    def chunk(self, step: StepBuilder, start: int, count: int) -> int:
        """Return how many of `count` tokens of a prompt, after `start` others, fit the rest of the step's time."""
        fitting = self._model.prompt_tokens(start, step.seconds, step.num_prompt_tokens)
        if fitting >= count:
            return count
        fitting -= fitting % _CHUNK_MULTIPLE
        if step.num_prefills == step.num_added:
            return min(count, max(fitting, _CHUNK_MULTIPLE))
        return fitting if fitting >= _LEAST_CHUNK else 0

    def num_tokens(self, seconds: float) -> float:
        """Return the number of prompt tokens that take this time, to charge an owner for other work."""
        token = self._model.prompt_seconds(0, 1)
        return seconds / token if token > 0.0 else 0.0

    def take_turns(self, rows: DecodeRows, lengths: list[int], tokens_per_row: float) -> tuple[DecodeRows, list[int]]:
        """Select the decodes of several owners that fit the bound. The rows of each owner take turns."""
        seqs = rows.seqs
        if self.is_alone or len(seqs) <= len(rows.costs):
            return rows, lengths
        work = StepWork(decode_tokens=tokens_per_row * len(seqs), decode_keys=sum(lengths))
        base = self._model.seconds(StepWork())
        added, left = self._model.seconds(work) - base, self._bound - base
        # Decodes may cost nothing by the model, while a step's base alone exceeds the bound.
        if added <= max(left, 0.0):
            return rows, lengths
        room = max(len(rows.costs), int(len(seqs) * left / added))
        if room >= len(seqs):
            return rows, lengths
        first = self._turn % len(seqs)
        self._turn += room
        ranks: dict[str, float] = {}
        ranked = []
        # Equal rows rotate, so that none of them is always among the first.
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
