"""How many drafts each sequence is to have: `DraftPlan`, from what steps have cost and what sequences have accepted.

A step of more tokens takes longer, and so does making drafts: `StepCosts` measures both. With the chance `p` that a
draft is accepted after those before it, `n` drafts bring `p + p^2 + ... + p^n` tokens. For each number of drafts, the
plan takes the geometric mean of the sequences' tokens a second, compares it with that of no drafts, and gives drafts
only where they win. While it gives none, a few sequences try drafts from time to time. The drafter keeps the hidden
states of the steps before such a try, and computes nothing otherwise.

The drafter also computes prompts, for drafts that come later. `NetGain` compares what that has cost with what drafts
have gained since, and stops drafting for a while where prompts cost more.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Rows

from engine.batch import DraftWork, ScheduledBatch
from engine.sequence import Sequence

_FIRST_RATE = 0.7
"""Chance of acceptance that is assumed before anything was verified."""
_LEARNT, _LEARNT_BY_ALL = 0.1, 0.02
"""Weight of a draft in its sequence's rate, and in that of all sequences, which holds for those without drafts."""
_LEAST_GAIN = 1.05
"""Gain in tokens a second from which drafts are made: a smaller gain cannot be distinguished from noise."""
_RATE_AFTER_TRY = 0.6
"""Least chance that is assumed after a try that succeeded."""
_MARGIN = 1.1
"""What a draft has to bring, of what it costs: the rates that are known are above the true ones as often as below."""
_TRIES, _LEAST_TRIES = 0.008, 0.002
"""Share of the time that is spent on tries while some succeed; each failed try halves it, down to the least."""
_TRYING_ROWS = 8
"""Most sequences of a try."""
_RATE_IN_TRIES = 0.9
"""Chance of acceptance with which a try has to pay: where even such drafts bring no gain, there is no try."""
_STEPS_PER_PLAN, _MOST_STEPS_PER_PLAN, _MOST_STEPS_PER_IDLE_PLAN = 8, 16, 64
"""Steps for which a plan holds while the number of rows hardly changes. Each plan that changes nothing doubles it, up
to the second number, or up to the third while no drafts are made."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Tokens without drafts after a try that failed, doubled with each, and most of them."""
KEPT_STEPS = 8
"""Steps before a try in which the drafter keeps what the target has computed."""
_FIRST_TIMES = 4
"""Of the first measurements of a cost the least counts: they include what is set up on first use."""
_SECONDS_LEARNT = 0.2
"""Weight of a measurement in a mean cost."""
_LARGEST_FACTOR = 1.5
"""Most that one measurement may raise a mean by, as its multiple."""
_EXACT = 8
"""Sizes up to which each is measured by itself; above, those of each eighth of a power of two together."""
_STEPS_JUDGED, _STEPS_JUDGED_AGAIN = 64, 12
"""Steps over which gains and costs are summed before drafting is stopped, or goes on and half are forgotten; and steps
after which it is stopped for a large loss, if it was stopped before."""
_MOST_DRAFTING = 4.0
"""Most that drafting after a step of decodes counts for, in plain steps: others may have interrupted it."""
_LEAST_LOSS, _LARGE_LOSS = 0.005, 0.03
"""Shares of the time: a small and a large loss."""
_FIRST_STOP, _LONGEST_STOP = 16.0, 128.0
"""How long drafting is stopped at first, in units of the time in which it lost, and at most. Each stop doubles it."""
_LONGEST_STOP_SECONDS = 600.0
"""Most seconds of a stop: where steps are long, the units above would be hours, in which other requests may come."""
_WITHOUT_PROMPTS = 8.0
"""How many times its duration a step of decodes shortens a stop by: drafts may gain soon where no prompts come."""
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


class _Means:
    """Mean seconds by size."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._sizes: list[int] = []
        """The keys of that, in ascending order."""

    def note(self, size: int, seconds: float, step: int) -> None:
        mean = self._means.get(size)
        if mean is None:
            mean = self._means[size] = _Mean()
            insort(self._sizes, size)
        mean.note(seconds, step)

    def step(self, size: int) -> int | None:
        """The step in which a size was measured last; None: it was not."""
        mean = self._means.get(size)
        return None if mean is None else mean.step

    def at(self, size: int, since: int) -> float | None:
        """The seconds of a size, by measurements from step `since` on; None if there are none."""
        return _between(self._sizes, size, lambda known: self._known(known, since))

    def _known(self, size: int, since: int) -> float | None:
        mean = self._means[size]
        if mean.step >= since:
            return mean.seconds
        del self._means[size]
        return None


class StepCosts:
    """Mean seconds of steps that only decode, by their number of tokens, and of drafting, by rows and depth."""

    def __init__(self) -> None:
        self._steps, self._kept_steps, self._catching_up = _Means(), _Means(), _Means()
        self._drafting_steps = _Means()
        """Of steps that cannot be measured without the drafting after them."""
        self._drafting: dict[int, _Means] = {}
        """Of each number of rows, by depth."""
        self._rows: list[int] = []
        """The keys of that, in ascending order."""
        self._num_steps = 0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn how long a step of decodes took, without drafting."""
        self._num_steps += 1
        self._steps.note(_size(num_tokens), seconds, self._num_steps)

    def note_drafting_step(self, num_tokens: int, seconds: float) -> None:
        """As `note_step`, of a step with the drafting after it, which the device does before the step is read."""
        self._num_steps += 1
        self._drafting_steps.note(_size(num_tokens), seconds, self._num_steps)

    def note_drafting(self, work: DraftWork) -> None:
        """Learn how long it took to draft."""
        if not work.num_rows:
            return
        size = _size(work.num_rows)
        if not work.depth:
            self._catching_up.note(size, work.seconds, self._num_steps)
            return
        if size not in self._drafting:
            self._drafting[size] = _Means()
            insort(self._rows, size)
        self._drafting[size].note(work.depth, work.seconds, self._num_steps)

    def is_recent(self, num_tokens: int) -> bool:
        """Whether such a step was measured lately, or none was."""
        last = self._steps.step(_size(num_tokens))
        return not self._num_steps or (last is not None and self._num_steps - last < _STEPS_WITH_DRAFTS)

    def step(self, num_tokens: int) -> float:
        """Expected seconds of a step; where larger sizes are unknown, those of the largest known: it is tried."""
        return self._steps.at(_size(num_tokens), self._since) or 0.0

    def with_drafting(self, num_tokens: int, num_rows: int, depth: int) -> float:
        """Expected seconds of a step, and of making `depth` drafts of `num_rows` rows after it."""
        whole = self._drafting_steps.at(_size(num_tokens), self._since)
        return self.step(num_tokens) + self.drafting(num_rows, depth) if whole is None else whole

    def keeping(self, num_rows: int) -> float:
        """Expected seconds by which a step takes longer if the drafter keeps its hidden states."""
        kept = self._kept_steps.at(_size(num_rows), self._since)
        return 0.0 if kept is None else max(0.0, kept - self.step(num_rows))

    def drafting(self, num_rows: int, depth: int) -> float:
        """Expected seconds of drafting; 0 where nothing is known. Larger sizes than the known ones cost as those."""
        if not depth or not num_rows:
            return 0.0
        since = self._since
        return _between(self._rows, _size(num_rows), lambda rows: self._drafting_of(rows, depth, since)) or 0.0

    def note_kept_step(self, num_tokens: int, seconds: float) -> None:
        """As `note_step`, of a step without drafts of which the drafter has kept the hidden states."""
        self._num_steps += 1
        self._kept_steps.note(_size(num_tokens), seconds, self._num_steps)

    def pass_steps(self, count: int) -> None:
        """Count steps that were not measured."""
        self._num_steps += count

    def catching_up(self, num_rows: int) -> float:
        """Expected seconds of drafting where entries that waited are computed first; 0 where nothing is known."""
        return self._catching_up.at(_size(num_rows), self._since) or 0.0

    @property
    def _since(self) -> int:
        """The first step whose costs count."""
        return self._num_steps - _STALE_STEPS + 1

    def _drafting_of(self, rows: int, depth: int, since: int) -> float | None:
        seconds = self._drafting[rows].at(depth, since)
        if seconds is None:
            del self._drafting[rows]
        return seconds


def _size(count: int) -> int:
    """The size that counts for a number of tokens."""
    if count <= _EXACT:
        return count
    unit = 1 << max(0, count.bit_length() - 4)
    return count // unit * unit


def _between(sizes: list[int], at: int, value: Callable[[int], float | None]) -> float | None:
    """The value at a point, on the line between its neighbours among `sizes`; outside of them the nearest one.

    The sizes ascend; sizes that turn out to have no value are removed. None if no size has a value.
    """
    above = bisect_left(sizes, at)
    low = high = None
    while above < len(sizes) and (high := value(sizes[above])) is None:
        del sizes[above]
    if high is not None and sizes[above] == at:
        return high
    while above and (low := value(sizes[above - 1])) is None:
        above -= 1
        del sizes[above]
    if low is None or high is None:
        return high if low is None else low
    share = (at - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return low + (high - low) * share


class NetGain:
    """The seconds that drafts have gained lately in steps of decodes, less those that they have cost in steps with
    prompts, where the drafter computes the prompts too and verification adds tokens to a step that is long anyway.

    While the sum is negative, drafting is stopped: for as many seconds as it has lasted, times a factor that grows.
    """

    def __init__(self) -> None:
        self._net, self._seconds, self._steps = 0.0, 0.0, 0
        """Sums over the steps since drafting began, or since the older half was forgotten."""
        self._left = 0.0
        """Seconds for which drafting stays stopped."""
        self._factor = _FIRST_STOP

    @property
    def is_stopped(self) -> bool:
        """Whether no sequence is to draft, and the drafter to compute no prompts."""
        return self._left > 0.0

    def note(self, seconds: float, gained: float, *, has_prompts: bool) -> None:
        """Count a step that took `seconds`, in which drafts gained so many; less than 0: they cost as many."""
        if self._left > 0.0:
            self._left -= seconds if has_prompts else _WITHOUT_PROMPTS * seconds
            return
        self._net += gained
        self._seconds += seconds
        self._steps += 1
        is_long = self._steps >= _STEPS_JUDGED
        if not is_long and (self._steps < _STEPS_JUDGED_AGAIN or self._factor == _FIRST_STOP):
            return
        if self._net < -(_LEAST_LOSS if is_long else _LARGE_LOSS) * self._seconds:
            self._left = min(self._factor * self._seconds, _LONGEST_STOP_SECONDS)
            self._factor = min(2.0 * self._factor, _LONGEST_STOP)
            self._net = self._seconds = 0.0
            self._steps = 0
        elif is_long:
            if self._net > 0.0:
                self._factor = _FIRST_STOP
            self._net, self._seconds, self._steps = 0.5 * self._net, 0.5 * self._seconds, self._steps // 2


class _Record:
    """What is known of one sequence's drafts."""

    __slots__ = ("limit", "misses", "rate", "resume", "tried")

    def __init__(self, limit: int) -> None:
        self.rate: float | None = None
        """Chance of acceptance; None: no draft of it was verified yet."""
        self.limit = limit
        self.misses = 0
        self.resume = 0
        """Length from which on a sequence without drafts tries some."""
        self.tried = 0
        """The number of its last try."""


class DraftPlan:
    """The number of drafts of each sequence, at most `max_drafts`."""

    def __init__(self, max_drafts: int, *, by_model: bool = False) -> None:
        """`by_model`: a model drafts; more of its drafts are accepted if it has kept hidden states before."""
        self.costs, self.net_gain = StepCosts(), NetGain()
        self._max_drafts, self._by_model = max_drafts, by_model
        self._rate = _FIRST_RATE
        """Of all sequences lately."""
        self._records: dict[int, _Record] = {}
        self._first_limit = max_drafts
        """Drafts of a sequence that begins to decode."""
        self._try_rows, self._try_depth = 0, 1
        """Most sequences of a try, and their drafts."""
        self._try_cost: float | None = None
        """What a try costs, in plain steps; None where even drafts that are mostly right would not pay."""
        self._try_credit, self._try_share = 0.0, _TRIES
        """Plain steps' worth of time that may be spent on tries, and what each step adds to it."""
        self._num_tries = 0
        self._trying: set[int] = set()
        """Sequences without drafts that try some in the next step."""
        self._has_drafts = True
        """Whether the plan gives drafts to a sequence."""
        self._is_awaited = False
        """Whether drafts will be given as soon as the drafter has kept enough steps."""
        self._num_kept = KEPT_STEPS
        """Steps that the drafter has kept without a gap, at most so many."""
        self._is_plain = False
        """Whether the next step is to have no drafts, so that its cost is known."""
        self._steps_left, self._interval = 0, _STEPS_PER_PLAN
        self._planned_size = 0

    @property
    def is_idle(self) -> bool:
        """Whether no sequence that it knows is to have drafts for now."""
        return self._is_plain or self.net_gain.is_stopped or not (self._trying or self._has_drafts)

    @property
    def is_keeping(self) -> bool:
        """Whether the drafter is to keep the hidden states of the next step."""
        return self._num_kept > 0 and not self.net_gain.is_stopped

    def limit(self, seq: Sequence) -> int:
        """Most drafts of a sequence for now."""
        if self._is_plain or self.net_gain.is_stopped:
            return 0
        if seq.id in self._trying:
            return self._try_depth
        record = self._records.get(seq.id)
        return self._first_limit if record is None else record.limit

    def note_step(
        self, num_rows: int, num_tokens: int, seconds: float, *, is_kept: bool = False, has_drafted: bool = False
    ) -> None:
        """Learn how long a step of decodes took, without drafting unless `has_drafted`.

        `is_kept`: nothing was drafted after it, but the drafter has kept its hidden states.
        """
        if has_drafted:
            self.costs.note_drafting_step(num_tokens, seconds)
        elif is_kept and num_tokens == num_rows:
            self.costs.note_kept_step(num_tokens, seconds)
        else:
            self.costs.note_step(num_tokens, seconds)

    def note_gain(
        self,
        batch: ScheduledBatch,
        seconds: float,
        num_accepted: int,
        drafting_seconds: float,
        *,
        has_drafted: bool = False,
    ) -> None:
        """Learn what drafts have gained or cost in a step that took `seconds`, `drafting_seconds` of them included.

        `has_drafted`: drafts were made in the step itself, as of `note_step`, and `drafting_seconds` lacks their time.
        """
        num_rows, num_drafts = batch.total_seqs_num_decode, sum(map(len, batch.scheduled_spec_decode_tokens.values()))
        if batch.total_seqs_num_prefill or not num_rows:
            # Drafts take as long as prompt tokens there, and so would the accepted ones as tokens of later steps.
            num_rejected, num_tokens = num_drafts - num_accepted, max(1, batch.total_tokens_num)
            gained = -drafting_seconds - num_rejected / num_tokens * max(0.0, seconds - drafting_seconds)
        elif num_drafts or drafting_seconds or has_drafted:
            plain = self.costs.step(num_rows)
            gained = plain * (1.0 + num_accepted / num_rows) - self.costs.with_drafting(num_rows + num_drafts, 0, 0)
            gained -= min(drafting_seconds, _MOST_DRAFTING * plain)
        else:
            gained = 0.0
        self.net_gain.note(seconds, gained, has_prompts=batch.total_seqs_num_prefill > 0)

    def plan(self, seqs: Rows[Sequence], room: int, num_steps: int = 1) -> None:
        """Decide for the sequences of a step, which has room for `room` drafts, and for the next ones.

        `num_steps`: this step, and those before it that were not planned, as `num_unplanned` allows.
        """
        self._is_plain = False
        self._steps_left -= num_steps
        if num_steps > 1:
            self.costs.pass_steps(num_steps - 1)
        if self.net_gain.is_stopped:
            # What the drafter has kept is of no use after steps of which it keeps nothing.
            self._has_drafts, self._is_awaited, self._num_kept, self._trying = False, False, 0, set()
            self._first_limit, self._steps_left, self._planned_size = 0, _STEPS_PER_PLAN, 0
            return
        # A few new or ended sequences hardly change which number of drafts pays, and neither do a few steps.
        if self._steps_left <= 0 or _size(len(seqs)) != self._planned_size:
            self._decide(seqs, room)
        is_near = False
        if self._try_cost is not None:
            self._try_credit = min(self._try_credit + num_steps * self._try_share, self._try_cost)
            is_near = self._try_cost - self._try_credit <= KEPT_STEPS * self._try_share
        if is_near or self._has_drafts or self._is_awaited:
            self._num_kept = min(self._num_kept + 1, KEPT_STEPS)
        else:
            self._num_kept = 0
        if self._trying:
            self._trying = set()
        if is_near and self._try_credit == self._try_cost and (self._num_kept == KEPT_STEPS or not self._by_model):
            self._try(seqs)

    @property
    def num_unplanned(self) -> int:
        """Steps after the planned one that need no plan while the number of rows is the same.

        Nothing is drafted in them, and the drafter keeps nothing of them.
        """
        if self._num_kept or self._is_awaited or not self.is_idle:
            return 0
        steps = self._steps_left - 1
        if self.net_gain.is_stopped:
            return steps
        if self._try_cost is not None:
            until_kept = (self._try_cost - self._try_credit) / self._try_share - KEPT_STEPS
            steps = min(steps, int(until_kept) - 1)
        return max(0, steps)

    def _decide(self, seqs: Rows[Sequence], room: int) -> None:
        """Plan for some steps: the limit of each sequence, and what a try is."""
        num_rows = len(seqs)
        records = [self._record(seq) for seq in seqs]
        rates = [self._rate if record.rate is None else record.rate for record in records]
        self._is_plain = not self.costs.is_recent(num_rows)
        plain = self.costs.step(num_rows)
        best, limits = _LEAST_GAIN, [0] * num_rows
        best_try, self._try_cost = _LEAST_GAIN, None
        for depth in range(1, self._max_drafts + 1 if room > 0 else 1):
            num_most = min(num_rows * depth, room)
            seconds = self.costs.with_drafting(num_rows + num_most, num_rows, depth)
            pace = plain / seconds if plain else 1.0
            gain = (1.0 + _expected(_RATE_IN_TRIES, depth) * num_most / (num_rows * depth)) * pace
            if gain > best_try:
                best_try = gain
                self._plan_try(num_rows, depth, room, plain)
            # What a draft costs, in the tokens that plain steps make in that time: less likely ones are left out.
            least = _MARGIN * num_rows * (1.0 / pace - 1.0) / num_most
            if least >= 1.0:
                continue
            chosen = _fitting([_useful(rate, least, depth) for rate in rates], rates, room)
            num_drafts = sum(chosen)
            if not num_drafts:
                continue
            # The geometric mean: a large gain of a few sequences does not make up for a slowdown of all others.
            progress = sum(math.log1p(_expected(rate, n)) for rate, n in zip(rates, chosen, strict=True) if n)
            seconds = self.costs.with_drafting(num_rows + num_drafts, sum(map(bool, chosen)), max(chosen))
            gain = math.exp(progress / num_rows) * (plain / seconds if plain else 1.0)
            if gain > best:
                best, limits = gain, chosen
        steps_to_keep = KEPT_STEPS - self._num_kept if self._by_model else 0
        self._is_awaited = steps_to_keep > 0 and any(limits)
        if self._is_awaited:
            limits = [0] * num_rows
        is_new = _size(num_rows) != self._planned_size
        for record, limit in zip(records, limits, strict=True):
            is_new |= record.limit != limit
            record.limit = limit
        self._has_drafts = any(limits)
        self._planned_size = _size(num_rows)
        most = _MOST_STEPS_PER_PLAN if self._has_drafts else _MOST_STEPS_PER_IDLE_PLAN
        self._interval = _STEPS_PER_PLAN if is_new else min(2 * self._interval, most)
        self._steps_left = steps_to_keep if self._is_awaited else self._interval
        # A new sequence has as many drafts as the others on average.
        self._first_limit = max(1, round(sum(limits) / num_rows)) if self._has_drafts else 0

    def _plan_try(self, num_rows: int, depth: int, room: int, plain: float) -> None:
        """Set the number of drafts of a try, its number of sequences, and its cost."""
        self._try_depth = depth
        self._try_rows = max(1, min(num_rows, room // depth, _TRYING_ROWS if self._by_model else num_rows))
        seconds = self.costs.step(num_rows + min(room, self._try_rows * depth))
        seconds += self.costs.catching_up(self._try_rows) or self.costs.drafting(self._try_rows, depth)
        seconds += KEPT_STEPS * self.costs.keeping(num_rows)
        self._try_cost = max(0.0, seconds / plain - 1.0) if plain else 0.0

    def _try(self, seqs: Rows[Sequence]) -> None:
        """Have sequences without drafts make some after the next step: those whose last try is the longest ago."""
        waiting = [seq for seq in seqs if not self._record(seq).limit and seq.num_tokens >= self._record(seq).resume]
        if not waiting:
            return
        waiting.sort(key=lambda seq: self._records[seq.id].tried)
        self._num_tries += 1
        self._try_credit = 0.0
        for seq in waiting[: self._try_rows]:
            self._trying.add(seq.id)
            self._records[seq.id].tried = self._num_tries

    def note(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from a sequence's verified drafts; its tokens are known."""
        record = self._record(seq)
        rate = self._rate if record.rate is None else record.rate
        learnt_by_all = _LEARNT_BY_ALL
        if not record.limit:
            # A try: what was known may be of other text.
            learnt_by_all = _LEARNT
            if num_accepted:
                rate = max(rate, _RATE_AFTER_TRY)
                self._try_share, self._steps_left = _TRIES, 0
            else:
                self._try_share = max(_LEAST_TRIES, self._try_share * 0.5 ** (1.0 / max(1, self._try_rows)))
        for is_accepted in [True] * num_accepted + [False] * (num_accepted < num_drafts):
            rate += _LEARNT * (is_accepted - rate)
            self._rate += learnt_by_all * (is_accepted - self._rate)
        record.rate = rate
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
            record = self._records[seq.id] = _Record(self._first_limit)
        return record


def _useful(rate: float, least: float, depth: int) -> int:
    """Drafts, at most `depth`, of which each is accepted with a chance of at least `least`."""
    if rate < least:
        return 0
    if least <= 0.0 or rate >= 1.0:
        return depth
    return min(depth, int(math.log(least) / math.log(rate))) if rate > 0.0 else 0


def _fitting(chosen: list[int], rates: list[float], room: int) -> list[int]:
    """The drafts of each row, fewer where there is not room for all: then each has as many, or where there is not room
    for one each, those with the highest rates of acceptance have one."""
    if sum(chosen) <= room:
        return chosen
    most = room // len(chosen)
    if most:
        return [min(count, most) for count in chosen]
    best = sorted(range(len(chosen)), key=lambda row: -rates[row] if chosen[row] else 1.0)[:room]
    return [int(row in best and count > 0) for row, count in enumerate(chosen)]


def _expected(rate: float, count: int) -> float:
    """Tokens that `count` drafts are expected to bring."""
    return float(count) if rate >= 1.0 else rate * (1.0 - rate**count) / (1.0 - rate)
