"""How many drafts each sequence is to have: `DraftPlan`, from what steps have cost and what sequences have accepted.

A step of more tokens takes longer, and so does making drafts: `StepCosts` measures both. With the chance `p` that a
draft is accepted after those before it, `n` drafts bring `p + p^2 + ... + p^n` tokens. The plan compares the tokens a
second of each number of drafts with those of none, and gives drafts only where they win. Sequences that get none try
one again after a pause, which grows while tries fail.
"""

import math
from collections.abc import Sequence as Rows

from engine.batch import DraftWork
from engine.sequence import Sequence

_FIRST_RATE = 0.7
"""Chance of acceptance that is assumed before anything was verified."""
_LEARNT, _LEARNT_BY_ALL = 0.1, 0.02
"""Weight of a draft in its sequence's rate, and in that of all sequences, with which others begin."""
_LEAST_GAIN = 1.03
"""Gain in tokens a second from which drafts are made: below, it is not told from noise."""
_RATE_AFTER_TRY = 0.6
"""Least chance that is assumed after a try that succeeded."""
_MARGIN = 1.1
"""What a draft has to bring, of what it costs: the rates that are known are above the true ones as often as below."""
_TRIES = 0.01
"""Share of the time that is spent on tries of sequences without drafts."""
_STEPS_PER_PLAN, _STEPS_PER_IDLE_PLAN = 8, 32
"""Steps for which a plan holds, while the same rows decode; one without drafts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Tokens without drafts after a try that failed, doubled with each, and most of them."""
_FIRST_TIMES = 4
"""Of the first measurements of a cost the least counts: they include what is set up on first use."""
_SECONDS_LEARNT = 0.2
"""Weight of a measurement in a mean cost."""
_LARGEST_FACTOR = 1.5
"""Most that one measurement may raise a mean by, as its multiple."""
_EXACT = 8
"""Sizes up to which each is measured by itself; above, those of each eighth of a power of two together."""
_STALE_STEPS = 4096
"""Steps after which a cost that was not measured again is forgotten."""
_STEPS_WITH_DRAFTS = 512
"""Steps after which one without drafts is made, where there was none, to know what it costs."""


class _Mean:
    __slots__ = ("count", "seconds", "step")

    def __init__(self) -> None:
        self.seconds, self.count, self.step = 0.0, 0, 0

    def note(self, seconds: float, step: int) -> None:
        # What is subtracted from a step's time was measured by itself.
        seconds = max(seconds, 0.0)
        self.count += 1
        self.step = step
        if self.count <= _FIRST_TIMES:
            self.seconds = seconds if self.count == 1 else min(self.seconds, seconds)
            return
        self.seconds += _SECONDS_LEARNT * (min(seconds, _LARGEST_FACTOR * self.seconds) - self.seconds)


class StepCosts:
    """Mean seconds of steps that only decode, by their number of tokens, and of drafting, by rows and depth."""

    def __init__(self) -> None:
        self._steps: dict[int, _Mean] = {}
        self._drafting: dict[tuple[int, int], _Mean] = {}
        self._num_steps = 0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn how long a step of decodes took, without drafting."""
        self._num_steps += 1
        self._steps.setdefault(_size(num_tokens), _Mean()).note(seconds, self._num_steps)

    def note_drafting(self, work: DraftWork) -> None:
        """Learn how long it took to draft."""
        if work.depth:
            self._drafting.setdefault((_size(work.num_rows), work.depth), _Mean()).note(work.seconds, self._num_steps)

    def is_recent(self, num_tokens: int) -> bool:
        """Whether such a step was measured lately, or none was."""
        mean = self._steps.get(_size(num_tokens))
        return not self._steps or (mean is not None and self._num_steps - mean.step < _STEPS_WITH_DRAFTS)

    def step(self, num_tokens: int) -> float:
        """Expected seconds of a step; where larger sizes are unknown, those of the largest known: it is tried."""
        known = {size: mean.seconds for size, mean in self._steps.items() if self._is_known(mean)}
        return _between(known, _size(num_tokens))

    def drafting(self, num_rows: int, depth: int) -> float:
        """Expected seconds of drafting; 0 where nothing is known. Larger sizes than the known ones cost as those."""
        if not depth or not num_rows:
            return 0.0
        by_rows: dict[int, dict[int, float]] = {}
        for (rows, of), mean in self._drafting.items():
            if self._is_known(mean):
                by_rows.setdefault(rows, {})[of] = mean.seconds
        return _between({rows: _between(known, depth) for rows, known in by_rows.items()}, _size(num_rows))

    def _is_known(self, mean: _Mean) -> bool:
        return self._num_steps - mean.step < _STALE_STEPS


def _size(count: int) -> int:
    """The size that counts for a number of tokens."""
    if count <= _EXACT:
        return count
    unit = 1 << max(0, count.bit_length() - 4)
    return count // unit * unit


def _between(known: dict[int, float], at: int) -> float:
    """The value at a point, on the line between its neighbours among known ones; outside of them the nearest one."""
    if at in known:
        return known[at]
    below, above = [each for each in known if each < at], [each for each in known if each > at]
    if not below or not above:
        return known[max(below) if below else min(above)] if known else 0.0
    low, high = max(below), min(above)
    return known[low] + (known[high] - known[low]) * (at - low) / (high - low)


class _Record:
    """What is known of one sequence's drafts."""

    __slots__ = ("limit", "misses", "rate", "resume")

    def __init__(self, rate: float, limit: int) -> None:
        self.rate, self.limit = rate, limit
        self.misses = 0
        self.resume = 0
        """Length from which on a sequence without drafts tries one."""


class DraftPlan:
    """The number of drafts of each sequence, at most `max_drafts`."""

    def __init__(self, max_drafts: int) -> None:
        self.costs = StepCosts()
        self._max_drafts = max_drafts
        self._rate = _FIRST_RATE
        """Of all sequences lately."""
        self._records: dict[int, _Record] = {}
        self._first_limit = max_drafts
        """Drafts of a sequence that begins to decode."""
        self._try_cost: float | None = None
        """What a try of all sequences without drafts costs, in plain steps; None where even right drafts would not
        pay, and nothing is tried."""
        self._try_credit = 0.0
        """Plain steps' worth of time that may be spent on tries."""
        self._is_try = False
        """Whether sequences without drafts try one in the next step."""
        self._has_drafts = True
        """Whether the plan gives drafts to a sequence."""
        self._is_plain = False
        """Whether the next step is to have no drafts, so that its cost is known."""
        self._steps_left = 0
        self._planned: Rows[Sequence] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no sequence that it knows is to have drafts for now."""
        return self._is_plain or not (self._is_try or self._has_drafts)

    def limit(self, seq: Sequence) -> int:
        """Most drafts of a sequence for now."""
        if self._is_plain:
            return 0
        record = self._records.get(seq.id)
        if record is None:
            return self._first_limit
        if record.limit or not self._is_try or seq.num_tokens < record.resume:
            return record.limit
        return 1

    def plan(self, seqs: Rows[Sequence], room: int) -> None:
        """Decide for the sequences of a step, which has room for `room` drafts, and for the next ones."""
        self._steps_left -= 1
        self._is_plain = False
        self._is_try = self._try_cost is not None and self._try_credit >= self._try_cost
        if self._try_cost is not None:
            # Sequences try together: a pass of the drafter costs nearly the same for one as for all.
            self._try_credit = 0.0 if self._is_try else self._try_credit + _TRIES
        if seqs is self._planned and self._steps_left > 0:
            return
        self._planned = seqs
        records = [self._record(seq) for seq in seqs]
        num_rows = len(records)
        self._is_plain = not self.costs.is_recent(num_rows)
        plain = self.costs.step(num_rows)
        best, limits = _LEAST_GAIN, [0] * num_rows
        self._try_cost = None
        for depth in range(1, self._max_drafts + 1 if room > 0 else 1):
            num_most = min(num_rows * depth, room)
            seconds = self.costs.step(num_rows + num_most) + self.costs.drafting(num_rows, depth)
            # What a draft costs, in the tokens that plain steps make in that time: less likely ones are left out.
            least = _MARGIN * num_rows * (seconds / plain - 1.0) / num_most if plain else 0.0
            if least >= 1.0:
                continue
            if self._try_cost is None:
                self._try_cost = max(0.0, seconds / plain - 1.0) if plain else 0.0
            chosen = _fitting([_useful(record.rate, least, depth) for record in records], records, room)
            num_drafts = sum(chosen)
            if not num_drafts:
                continue
            expected = num_rows + sum(_expected(record.rate, n) for record, n in zip(records, chosen, strict=True))
            num_drafting = sum(map(bool, chosen))
            seconds = self.costs.step(num_rows + num_drafts) + self.costs.drafting(num_drafting, max(chosen))
            gain = expected / num_rows * (plain / seconds if seconds else 1.0)
            if gain > best:
                best, limits = gain, chosen
        for record, limit in zip(records, limits, strict=True):
            record.limit = limit
        self._has_drafts = any(limits)
        self._steps_left = _STEPS_PER_PLAN if self._has_drafts else _STEPS_PER_IDLE_PLAN
        self._first_limit = _first_limit(limits, self._rate, has_gain=best > _LEAST_GAIN)

    def note(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a sequence's verified drafts; its tokens are known."""
        record = self._record(seq)
        if num_accepted and not record.limit:
            # A try: what was known may be of other text.
            record.rate = max(record.rate, _RATE_AFTER_TRY)
        for is_accepted in [True] * num_accepted + [False] * (num_accepted < num_drafts):
            record.rate += _LEARNT * (is_accepted - record.rate)
            self._rate += _LEARNT_BY_ALL * (is_accepted - self._rate)
        if num_accepted:
            record.misses = record.resume = 0
        else:
            pause = min(_FIRST_PAUSE << min(record.misses, 8), _LONGEST_PAUSE)
            record.misses += 1
            record.resume = len(seq.token_ids) + pause

    def forget(self, seq: Sequence) -> None:
        """The sequence has finished."""
        self._records.pop(seq.id, None)

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.id)
        if record is None:
            record = self._records[seq.id] = _Record(self._rate, self._first_limit)
        return record


def _useful(rate: float, least: float, depth: int) -> int:
    """Drafts, at most `depth`, of which each is accepted with a chance of at least `least`."""
    if rate < least:
        return 0
    if least <= 0.0 or rate >= 1.0:
        return depth
    return min(depth, int(math.log(least) / math.log(rate))) if rate > 0.0 else 0


def _fitting(chosen: list[int], records: Rows[_Record], room: int) -> list[int]:
    """The drafts of each row, fewer where there is not room for all: then each has as many, or where there is not room
    for one each, those with the highest rates of acceptance have one."""
    if sum(chosen) <= room:
        return chosen
    most = room // len(chosen)
    if most:
        return [min(count, most) for count in chosen]
    best = sorted(range(len(chosen)), key=lambda row: -records[row].rate if chosen[row] else 1.0)[:room]
    return [int(row in best and count > 0) for row, count in enumerate(chosen)]


def _expected(rate: float, count: int) -> float:
    """Tokens that `count` drafts are expected to bring."""
    return float(count) if rate >= 1.0 else rate * (1.0 - rate**count) / (1.0 - rate)


def _first_limit(limits: Rows[int], rate: float, *, has_gain: bool) -> int:
    """Drafts of a sequence that begins: as many as others have, and a try where others have none but might."""
    if has_gain:
        return max(1, round(sum(limits) / len(limits)))
    return int(rate > 0.5)
