"""`DraftPlan`: chooses the number of drafts of each sequence by measured costs of steps and acceptance rates.

A step of more tokens takes longer, and drafting takes time too: `StepCosts` measures both. If a draft is accepted with
probability `p` after accepted ones, `n` drafts yield `p + p^2 + ... + p^n` tokens. For each number of drafts, the plan
compares the geometric mean of the sequences' tokens per second with that of no drafts, and drafts only if that is
faster. Sequences without drafts try some at intervals.

A model that drafts also takes part in steps without drafts and computes prompts. Whether it runs at all is therefore
decided by `DraftGate`, which compares the pace of whole blocks of steps with the drafter and without.
"""

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from collections.abc import Sequence as Rows

from engine.batch import DraftWork, ScheduledBatch
from engine.sequence import Sequence

_FIRST_RATE = 0.7
"""Acceptance rate that is assumed before any draft was verified."""
_LEARNT, _LEARNT_BY_ALL = 0.1, 0.02
"""Weight of a draft in its sequence's acceptance rate, and in the rate of all sequences, used for new ones."""
_LEAST_GAIN = 1.05
"""Least relative gain in tokens per second for which drafts are made: smaller ones are within measurement noise."""
_RATE_AFTER_TRY = 0.6
"""Least acceptance rate that is assumed after a successful try."""
_MARGIN = 1.1
"""Least expected gain of a draft relative to its cost: a margin, since measured acceptance rates may be too high."""
_TRIES, _LEAST_TRIES = 0.008, 0.002
"""Share of time spent on tries while some succeed, and the least share; each failed try halves it."""
_TRYING_ROWS = 8
"""The most sequences of a try where a model drafts."""
_FIRST_SHARE = 8
"""One in so many sequences, but at least `_TRYING_ROWS`, drafts with a model until costs of that are known."""
_FIRST_MEASURED = 0.75
"""Share of these sequences with which their costs are known: a drafter may find nothing for some of them."""
_CLEARLY_SMALLER = 0.75
"""Size relative to the largest measured one from which costs of larger sizes are extrapolated."""
_RATE_IN_TRIES = 0.9
"""Acceptance rate that is assumed for the value of a try: if drafts would bring no gain even then, none is made."""
_STEPS_PER_PLAN, _MOST_STEPS_PER_PLAN, _MOST_STEPS_PER_IDLE_PLAN = 8, 16, 64
"""Steps for which a plan is valid while the number of rows hardly changes. Each unchanged plan doubles it, up to the
second number, or up to the third while no drafts are made."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Tokens without drafts after a failed try, doubled by each further failure, and their maximum."""
_FIRST_TIMES = 4
"""Number of first measurements of a cost of which only the least counts, since they include lazy initialisation."""
_SECONDS_LEARNT, _MORE_SECONDS_LEARNT = 0.2, 0.04
"""Weight of a measurement in a cost: one below the present value, and one above it. Other processes only lengthen
steps, so the cost is nearer to the short measurements than the mean is."""
_LARGEST_FACTOR = 3.0
"""The largest factor by which a measurement may exceed the mean of its size, or that between the sizes around it."""
_EXACT = 8
"""Size up to which each size is measured separately; above it, sizes are grouped in eighths of a power of two."""
_BLOCK_STEPS, _SHORT_BLOCK_STEPS = 32, 16
"""Steps of a block, in which a model drafts or does not, and of a try or a block whose size has no pace yet; each
round of a step counts."""
_BLOCKS_PER_CHECK, _FIRST_BLOCKS_PER_CHECK = 64, 8
"""Blocks with drafts after which one without drafts measures the costs of plain steps again, and their number while
these costs are based on one block only; each further one adds as many."""
_OPENING_PACE, _LEAST_PACE = 1.1, 1.04
"""Least pace with drafts, relative to that without, for which drafting begins, and for which it goes on."""
_DEBT_REPAID = 0.003
"""Share of the time without drafts that repays what earlier blocks with drafts have lost."""
_LEAST_STEPS, _MOST_LOST, _MOST_STEPS_LOST, _MOST_UNJUDGED = 4, 0.004, 2, 0.03
"""A short block with drafts ends early, after at least so many steps, where it has lost so many seconds and so many of
its mean steps, or has taken so many seconds before the pace without drafts is known."""
_LARGE_LOSS = 0.75
"""Pace with drafts of a size below which an open gate closes when the number of rows rises to it."""
_FEW_ROWS_SIZE = 4
"""Sizes of 2 to 16 rows have one debt. Drafts gain more there than a try of a few steps loses, and after text with
which they lost, other text would otherwise wait long for a try."""
_CREDIT = 0.005
"""Seconds that tries may lose in advance, so that a single lost try does not delay the next one."""
_LARGEST_DELAY = 2.0
"""The largest factor by which a plain step may exceed its expected duration: a longer one was interrupted, and does
not count. One with drafts that exceeds its expected duration by as much counts as expected, and in any case as at most
twice this factor of the plain duration."""
_WITH_REMEMBERED, _WITHOUT_REMEMBERED = 0.7, 0.9
"""Weight of earlier blocks with drafts, and without, relative to the block after them."""
_REJECTED_SECONDS = 2.0
"""Seconds without drafts after a try that was not made, because its drafts would not pay even if accepted."""
_STALE_STEPS = 4096
"""Steps after which a cost that was not measured again is dropped."""
_STEPS_WITH_DRAFTS = 512
"""Steps after which a step without drafts is made to measure its cost, if there was none and no model drafts."""


class _Mean:
    __slots__ = ("count", "seconds", "step")

    def __init__(self) -> None:
        self.seconds, self.count, self.step = 0.0, 0, 0

    def note(self, seconds: float, step: int) -> None:
        # The subtracted part of a step's time was measured separately, so the difference may be negative.
        seconds = max(seconds, 0.0)
        self.count += 1
        self.step = step
        if self.count <= _FIRST_TIMES:
            self.seconds = seconds if self.count == 1 else min(self.seconds, seconds)
            return
        learnt = _SECONDS_LEARNT if seconds < self.seconds else _MORE_SECONDS_LEARNT
        self.seconds += learnt * (seconds - self.seconds)


class _Means:
    """Mean seconds by size."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._sizes: list[int] = []
        """Its keys, in ascending order."""

    def note(self, size: int, seconds: float, step: int) -> None:
        if self._sizes and self._sizes[0] <= size <= self._sizes[-1]:
            expected = self.at(size, step - _STALE_STEPS + 1)
            seconds = min(seconds, _LARGEST_FACTOR * expected) if expected else seconds
        mean = self._means.get(size)
        if mean is None:
            mean = self._means[size] = _Mean()
            insort(self._sizes, size)
        mean.note(seconds, step)

    def latest_step(self, lowest: int, highest: int) -> int | None:
        """The last step in which a size within these bounds was measured; None if none was."""
        sizes = self._sizes[bisect_left(self._sizes, lowest) : bisect_right(self._sizes, highest)]
        return max((self._means[size].step for size in sizes), default=None)

    def at(self, size: int, since: int) -> float | None:
        """The mean seconds of a size over measurements since step `since`; None if there are none."""
        return _between(self._sizes, size, lambda known: self._known(known, since))

    def beyond(self, size: int, since: int) -> float:
        """Expected seconds by which a size takes longer than the largest measured one, 0 for smaller sizes.

        They grow from the largest size on as they grow below it, but at most in proportion to the size.
        """
        seconds = self.at(size, since)
        if seconds is None or size <= (largest := self._sizes[-1]):
            return 0.0
        smaller = _CLEARLY_SMALLER * largest
        growth = seconds - (_between(self._sizes, smaller, lambda known: self._known(known, since)) or 0.0)
        return min(max(0.0, growth) / (largest - smaller), seconds / largest) * (size - largest)

    def _known(self, size: int, since: int) -> float | None:
        mean = self._means[size]
        if mean.step >= since:
            return mean.seconds
        del self._means[size]
        return None


class StepCosts:
    """Mean seconds of steps with decodes only, by number of tokens, and of drafting, by rows and depth."""

    def __init__(self) -> None:
        self._steps, self._drafting_steps = _Means(), _Means()
        """Costs of steps, the latter of those that can be measured only together with the drafting after them."""
        self._drafting: dict[int, _Means] = {}
        """Costs of drafting for each number of rows, by depth."""
        self._rows: list[int] = []
        """Its keys, in ascending order."""
        self._drafted: dict[int, int] = {}
        """The last step in which so many rows drafted, on the host or on the device, by size."""
        self._num_steps = 0
        self._prompts = _Means(), _Means()
        """Costs of prompts by their tokens in a step: where a model drafts, and in plain steps."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of decodes, without drafting."""
        self._num_steps += 1
        self._steps.note(_size(num_tokens), seconds, self._num_steps)

    def note_drafting_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """As `note_step`, for a step including the drafting for `num_rows` rows that the device did before the step
        was read."""
        self._num_steps += 1
        self._drafted[_size(num_rows)] = self._num_steps
        self._drafting_steps.note(_size(num_tokens), seconds, self._num_steps)

    def note_drafting(self, work: DraftWork) -> None:
        """Record the duration of drafting."""
        if not work.num_rows or not work.depth:
            return
        size = _size(work.num_rows)
        if size not in self._drafting:
            self._drafting[size] = _Means()
            insort(self._rows, size)
        self._drafted[size] = self._num_steps
        self._drafting[size].note(work.depth, work.seconds, self._num_steps)

    def is_recent(self, num_tokens: int) -> bool:
        """Whether a step of about this size was measured recently, or no step was."""
        near = max(1, num_tokens // 4)
        last = self._steps.latest_step(_size(num_tokens - near), _size(num_tokens + near))
        return not self._num_steps or (last is not None and self._num_steps - last < _STEPS_WITH_DRAFTS)

    def step(self, num_tokens: int) -> float:
        """Expected seconds of a step. Sizes above the largest measured one count as it, so that they are tried."""
        return self._steps.at(_size(num_tokens), self._since) or 0.0

    def with_drafting(self, num_tokens: int, num_rows: int, depth: int) -> float:
        """Expected seconds of a step and of drafting `depth` tokens for each of `num_rows` rows after it."""
        if not depth:
            return self.step(num_tokens)
        whole = self._drafting_steps.at(_size(num_tokens), self._since)
        return self.step(num_tokens) + self.drafting(num_rows, depth) if whole is None else whole

    def drafting(self, num_rows: int, depth: int) -> float:
        """Expected seconds of drafting; 0 without measurements. Sizes above the largest measured one count as it."""
        if not depth or not num_rows:
            return 0.0
        since = self._since
        return _between(self._rows, _size(num_rows), lambda rows: self._drafting_of(rows, depth, since)) or 0.0

    def beyond(self, num_tokens: int, num_rows: int, depth: int) -> float:
        """Expected seconds to add to `with_drafting`, which counts sizes above the largest measured one as that.

        With them, a try of a size that was never measured is not planned if it would be too slow.
        """
        size, since = _size(num_tokens), self._since
        if self._drafting_steps.at(size, since) is not None:
            return self._drafting_steps.beyond(size, since)
        drafting = self.drafting(num_rows, depth)
        more = drafting * (num_rows / self._rows[-1] - 1.0) if drafting else 0.0
        return self._steps.beyond(size, since) + max(0.0, more)

    @property
    def most_drafting_rows(self) -> int:
        """The most rows of which drafting was measured recently, alone or with its step; 0 without measurements."""
        since = self._since
        return max((size for size, step in self._drafted.items() if step >= since), default=0)

    def note_prompts(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        """Record by how much longer a step took with `num_tokens` of prompts than without."""
        self._prompts[is_plain].note(_size(num_tokens), seconds, self._num_steps)

    def prompts(self, num_tokens: int, *, is_plain: bool) -> float | None:
        """Expected seconds by which prompts lengthen a step; None if none was measured, with drafts or without."""
        if not num_tokens:
            return 0.0
        size, since = _size(num_tokens), self._since
        seconds = self._prompts[is_plain].at(size, since)
        return self._prompts[not is_plain].at(size, since) if seconds is None else seconds

    def plain_seconds(self, num_rows: int, num_generated: int, num_prompt_tokens: int) -> tuple[float, float]:
        """Expected seconds in which steps of `num_rows` without drafts generate and compute so many tokens, and those
        of the generated tokens alone.

        Both are 0 if this is not known yet.
        """
        step = self.step(num_rows) if num_rows else 0.0
        prompts = self.prompts(num_prompt_tokens, is_plain=True)
        if (num_rows and not step) or prompts is None:
            return 0.0, 0.0
        generating = step * num_generated / max(1, num_rows)
        return generating + prompts, generating

    def pass_steps(self, count: int) -> None:
        """Count `count` steps that were not measured."""
        self._num_steps += count

    @property
    def _since(self) -> int:
        """The first step whose measurements are recent enough to count."""
        return self._num_steps - _STALE_STEPS + 1

    def _drafting_of(self, rows: int, depth: int, since: int) -> float | None:
        seconds = self._drafting[rows].at(depth, since)
        if seconds is None:
            del self._drafting[rows]
        return seconds


def _size(count: int) -> int:
    """The size group of a number of tokens."""
    if count <= _EXACT:
        return count
    unit = 1 << max(0, count.bit_length() - 4)
    return count // unit * unit


def _between(sizes: list[int], at: float, value: Callable[[int], float | None]) -> float | None:
    """The value at a size, interpolated linearly between its neighbours in `sizes`; outside of them the nearest value.

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


class _Pace:
    """Sums over blocks of steps: the seconds in which plain steps would have had their tokens, and those they took.

    `generating`: the part of these plain steps' seconds that generates the `num_generated` tokens, in `num_decodes`
    steps.
    """

    __slots__ = ("count", "generating", "num_decodes", "num_generated", "plain", "seconds")

    def __init__(self) -> None:
        self.plain = self.seconds = self.generating = self.num_generated = self.num_decodes = 0.0
        self.count = 0

    def add(
        self,
        plain: float,
        seconds: float,
        remembered: float,
        generating: float = 0.0,
        num_generated: float = 0.0,
        num_decodes: float = 0.0,
    ) -> None:
        self.count += 1
        self.plain = remembered * self.plain + plain
        self.seconds = remembered * self.seconds + seconds
        self.generating = remembered * self.generating + generating
        self.num_generated = remembered * self.num_generated + num_generated
        self.num_decodes = remembered * self.num_decodes + num_decodes

    def plain_as(self, without: "_Pace") -> float:
        """The seconds in which plain steps would have had the tokens, with at least as many rows as in `without`.

        Drafts end answers sooner and leave fewer rows, of which each token costs a plain step more. A step of more
        rows takes no less time, which bounds the difference: other ones come from contexts that have grown since.
        """
        if not (without.num_generated and self.num_generated):
            return self.plain
        generating = self.num_generated * without.generating / without.num_generated
        num_rows, usual_rows = (each.num_generated / each.num_decodes for each in (self, without))
        generating = max(generating, self.generating * num_rows / usual_rows)
        return self.plain - max(0.0, self.generating - generating)

    @property
    def value(self) -> float:
        """The pace relative to the expected one of plain steps; 0 before the first block."""
        return self.plain / self.seconds if self.seconds else 0.0


def _power(num_rows: int) -> int:
    """The exponent of the least power of two that is not below a number of rows."""
    return (num_rows - 1).bit_length()


def _indebted(size: int) -> int:
    """The size that has the debt of a size."""
    return max(size, _FEW_ROWS_SIZE) if size else 0


class DraftGate:
    """Decides in blocks of steps whether a model drafts, by the measured pace of blocks with drafts and without.

    Between blocks in which drafts pay, a block without drafts measures plain steps now and then. Where drafts do not
    pay, a try of one short block is made whenever no debt is left. What blocks with drafts lose is a debt of their
    size; what they gain and a small share of the time without drafts with this size repay it. So that share bounds
    the time that drafts lose with each size, whatever they gain with others. Sizes of 2 to 16 rows share a debt.
    """

    def __init__(self) -> None:
        self.is_open = True
        """Whether the model drafts. Otherwise it takes no part in steps, and stores nothing of prompts."""
        self.is_trying = False
        """Whether this block is a try, in which sequences draft whose drafts are not expected to pay."""
        self.needs_plain_steps = True
        """Whether plain steps of this size have no pace yet, so that each one is to be measured."""
        self._paces: dict[int, tuple[_Pace, _Pace]] = {}
        """Paces with drafts and without, by the exponent of the next power of two of the mean number of rows.

        That with drafts is relative to the latest one without: the expected durations of plain steps, to which all
        paces refer, change with each measurement, for a new server by half and more.
        """
        self._debts: dict[int, float] = {}
        """Seconds that drafting has lost with the sizes of one debt and nothing has repaid; below 0 it is a credit. By
        `_indebted` of their keys in `_paces`."""
        self._num_open_blocks = 0
        """Number of successive blocks with drafts."""
        self._plain_size: int | None = None
        """The key of the last block without drafts."""
        self._begin()

    def _begin(self) -> None:
        self._num_steps = self._num_rows = 0
        self._seconds = 0.0
        self._block = _Pace()

    def note(
        self,
        num_rows: int,
        seconds: float,
        plain: float,
        num_steps: int = 1,
        *,
        generating: float = 0.0,
        num_generated: float = 0.0,
        num_decodes: float = 0.0,
    ) -> None:
        """Count a step, or `num_steps` equal ones: its rows, its duration, and that of plain steps for its tokens.

        `plain` is 0 if it is not known. `generating`: the part of it for the `num_generated` tokens of decodes, which
        are those of `num_decodes` plain steps.
        """
        self._num_steps += num_steps
        self._num_rows += num_steps * num_rows
        self._seconds += num_steps * seconds
        if plain and (self.is_open or seconds <= _LARGEST_DELAY * plain):
            seconds = min(seconds, 2.0 * _LARGEST_DELAY * plain)
            sums = (num_steps * each for each in (generating, num_generated, num_decodes))
            self._block.add(num_steps * plain, num_steps * seconds, 1.0, *sums)
        if self._is_over():
            self._end_block()

    def _is_over(self) -> bool:
        """Whether the block ends."""
        without = self._without(self._size)
        self.needs_plain_steps = not without.count
        is_short = self.is_trying or not without.count
        if self._num_steps >= (_SHORT_BLOCK_STEPS if is_short else _BLOCK_STEPS):
            return True
        if not self.is_open or not is_short or self._num_steps < _LEAST_STEPS:
            return False
        # `_block` has only steps whose plain duration is known.
        if without.value:
            return self._lost(without) > max(_MOST_LOST, _MOST_STEPS_LOST * self._seconds / self._num_steps)
        return self._seconds > _MOST_UNJUDGED

    def reject(self) -> None:
        """End a try because its drafts would not pay even if they were accepted."""
        self.is_open = self.is_trying = False
        if self._plain_size is not None:
            size = _indebted(self._plain_size)
            self._debts[size] = max(self._debt(size), _DEBT_REPAID * _REJECTED_SECONDS)
        self._begin()

    def review(self, num_rows: int, *, is_gain_expected: bool, may_pay: bool = True) -> None:
        """End a block with drafts early if drafts are likely to lose with `num_rows`, unless the block is a try.

        This is so in two cases. The last plain block had far fewer rows, and with so many drafts lost much before, or
        have not gained yet and, by `may_pay`, would not pay even if they were accepted. Or the plan expects no gain,
        and the block has lost.
        """
        if not self.is_open or self.is_trying:
            return
        size = _power(num_rows)
        is_new = self._plain_size is not None and size > self._plain_size + 1
        if is_new and (self._has_lost_much(size) or not (may_pay or self._has_gained(size))):
            self.is_open = False
            self._begin()
        elif not is_gain_expected and self._seconds > _MOST_UNJUDGED:
            without = self._without(self._size)
            if without.value and self._lost(without) > _MOST_LOST:
                # What drafts gained earlier was with other text.
                self._end_block(remembered=0.0)

    @property
    def _size(self) -> int:
        """The block's key in `_paces`.

        Drafts change the number of running rows, so a block with drafts whose size has no pace without them has the
        key of the last block without drafts, if the two are adjacent.
        """
        size = _power(-(-self._num_rows // self._num_steps))
        if self.is_open and self._plain_size in (size - 1, size + 1) and not self._without(size).value:
            return self._plain_size
        return size

    def _without(self, size: int) -> _Pace:
        """The pace of a size without drafts."""
        return self._paces[size][1] if size in self._paces else _Pace()

    def _has_lost_much(self, size: int) -> bool:
        """Whether drafts lost much in the last blocks with them of this size."""
        return size in self._paces and 0.0 < self._paces[size][0].value < _LARGE_LOSS

    def _has_gained(self, size: int) -> bool:
        """Whether drafts paid in the last blocks with them of this size."""
        return size in self._paces and self._paces[size][0].value >= _LEAST_PACE

    def _debt(self, size: int) -> float:
        """The debt of a size; a new one has the largest debt of smaller ones, since drafts lose with more rows too."""
        size = _indebted(size)
        if size in self._debts:
            return self._debts[size]
        return max((debt for other, debt in self._debts.items() if other < size), default=-_CREDIT)

    def _lost(self, without: _Pace) -> float:
        """Seconds that the block has lost by drafts; below 0 it has gained."""
        return self._block.seconds - self._block.plain_as(without) / without.value

    def _owe(self, size: int, seconds: float) -> None:
        self._debts[_indebted(size)] = max(-_CREDIT, self._debt(size) + seconds)

    def _end_block(self, *, remembered: float = _WITH_REMEMBERED) -> None:
        size = self._size
        with_drafts, without = self._paces.setdefault(size, (_Pace(), _Pace()))
        block = self._block
        if self.is_open:
            self._num_open_blocks += 1
            if without.value:
                with_drafts.add(block.plain_as(without) / without.value, block.seconds, remembered)
                self._owe(size, self._lost(without))
        else:
            self._num_open_blocks = 0
            self._plain_size = size
            sums = block.generating, block.num_generated, block.num_decodes
            without.add(block.plain, block.seconds, _WITHOUT_REMEMBERED, *sums)
            self._owe(size, -_DEBT_REPAID * block.seconds)
        least = _LEAST_PACE if self.is_open and not self.is_trying else _OPENING_PACE
        is_gaining = with_drafts.value >= least
        if self.is_open:
            most = min(_BLOCKS_PER_CHECK, _FIRST_BLOCKS_PER_CHECK * without.count)
            self.is_open = is_gaining and self._num_open_blocks < most
        else:
            self.is_open = without.value > 0.0 and (is_gaining or self._debt(size) <= 0.0)
        self.is_trying = self.is_open and not is_gaining
        self._begin()


class _Record:
    """The acceptance statistics of one sequence."""

    __slots__ = ("limit", "misses", "rate", "resume", "tried")

    def __init__(self, limit: int) -> None:
        self.rate: float | None = None
        """Acceptance rate; None if no draft of the sequence was verified yet."""
        self.limit = limit
        self.misses = 0
        self.resume = 0
        """Length from which a sequence without drafts may try some."""
        self.tried = 0
        """The number of the sequence's last try."""


class DraftPlan:
    """Chooses the number of drafts of each sequence, at most `max_drafts`."""

    def __init__(self, max_drafts: int, *, by_model: bool = False) -> None:
        """`by_model`: a model drafts, which takes part in steps without drafts too."""
        self.costs, self.gate = StepCosts(), DraftGate()
        self._max_drafts, self._by_model = max_drafts, by_model
        self._rate = _FIRST_RATE
        """Recent acceptance rate of all sequences."""
        self._records: dict[int, _Record] = {}
        self._first_limit = max_drafts
        """Number of drafts of a sequence that begins to decode."""
        self._try_rows, self._try_depth = 0, 1
        """The most sequences of a try, and their number of drafts."""
        self._try_cost: float | None = None
        """Cost of a try in plain steps; None if drafts would not pay even at a high acceptance rate."""
        self._is_try_short = True
        """Whether the gate's shortest try takes no longer than a block that it does not judge."""
        self._try_credit, self._try_share = 0.0, _TRIES
        """Time that may be spent on tries, in plain steps, and the amount that each step adds to it."""
        self._has_few_rows = False
        """Whether `limit_rows` let only few rows draft in the last step."""
        self._num_tries = 0
        self._trying: set[int] = set()
        """Sequences without drafts that try some in the next step."""
        self._gain = _LEAST_GAIN
        """Expected tokens per second of the planned drafts relative to plain steps; 0 without drafts."""
        self._has_drafts = True
        """Whether the plan has drafts for any sequence."""
        self._is_plain = False
        """Whether the next step has no drafts, so that its cost is measured."""
        self._steps_left, self._interval = 0, _STEPS_PER_PLAN
        self._planned_size = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a model drafts in general but not in these steps, in which it also stores nothing."""
        return self._by_model and not self.gate.is_open

    @property
    def is_idle(self) -> bool:
        """Whether no known sequence has drafts for now."""
        return self.is_stopped or self._is_plain or not (self._trying or self._has_drafts or self.gate.is_trying)

    def limit(self, seq: Sequence) -> int:
        """The most drafts of a sequence for now."""
        if self.is_stopped or self._is_plain:
            return 0
        if seq.id in self._trying:
            return self._try_depth
        record = self._records.get(seq.id)
        limit = self._first_limit if record is None else record.limit
        return max(limit, self._try_depth) if self.gate.is_trying else limit

    def limit_rows(self, limits: list[int]) -> list[int]:
        """Set to 0 what is too much in `limits`, the most drafts of each row that a model may make after a step.

        Until costs of drafting for many rows are known, the first few rows that may draft keep their limits: a step
        of many could lose more than tries may.
        """
        few = max(_TRYING_ROWS, len(limits) // _FIRST_SHARE)
        self._has_few_rows = len(limits) - limits.count(0) > few and (
            self.gate.needs_plain_steps or self.costs.most_drafting_rows < _FIRST_MEASURED * few
        )
        if not self._has_few_rows:
            return limits
        numbers = itertools.accumulate(map(bool, limits))
        return [limit if number <= few else 0 for limit, number in zip(limits, numbers, strict=True)]

    def note_step(
        self,
        batch: ScheduledBatch,
        seconds: float,
        num_generated: int,
        *,
        num_rounds: int = 1,
        num_steps: int = 1,
        draft_seconds: float = 0.0,
        has_drafted: bool = False,
    ) -> None:
        """Record the duration of a step, which stands for `num_steps` that are alike; it includes `draft_seconds`.

        `num_generated`: the tokens of its decodes, in all of its rounds. `has_drafted`: drafts were made in the step
        itself, and `draft_seconds` excludes their time.
        """
        num_rows, num_drafts = batch.total_seqs_num_decode, sum(map(len, batch.scheduled_spec_decode_tokens.values()))
        num_prompt_tokens = batch.total_tokens_num - num_rows - num_drafts
        takes_part = self._by_model and bool(batch.num_next_drafts)
        is_plain = not (takes_part or num_drafts)
        if num_prompt_tokens:
            without = self._seconds_without_prompts(batch, num_rows + num_drafts)
            self.costs.note_prompts(num_prompt_tokens, seconds - without, is_plain=is_plain)
        elif has_drafted:
            num_drafting = sum(map(bool, batch.num_next_drafts))
            self.costs.note_drafting_step(batch.total_tokens_num, num_drafting, seconds / num_rounds)
        elif num_drafts or not takes_part:
            self.costs.note_step(batch.total_tokens_num, seconds / num_rounds - draft_seconds)
        if self._by_model and is_plain is not self.gate.is_open:
            # Steps that were scheduled before the gate opened or closed belong to neither kind of block.
            plain, generating = self.costs.plain_seconds(num_rows, num_generated, num_prompt_tokens)
            if takes_part and plain:
                usual = self._seconds_without_prompts(batch, num_rows + num_drafts) * num_rounds
                usual += self.costs.prompts(num_prompt_tokens, is_plain=False) or 0.0
                if seconds > usual + (_LARGEST_DELAY - 1.0) * plain:
                    seconds = usual
            self.gate.note(
                batch.total_seqs_num,
                seconds / num_rounds,
                plain / num_rounds,
                num_rounds * num_steps,
                generating=generating / num_rounds,
                num_generated=num_generated / num_rounds,
                num_decodes=num_generated / max(1, num_rows) / num_rounds,
            )

    def _seconds_without_prompts(self, batch: ScheduledBatch, num_tokens: int) -> float:
        """The expected duration of a step's decodes of `num_tokens`, and of the drafting after them."""
        next_drafts = batch.num_next_drafts[: batch.total_seqs_num_decode]
        if not num_tokens:
            return 0.0
        return self.costs.with_drafting(num_tokens, sum(map(bool, next_drafts)), max(next_drafts, default=0))

    def plan(self, seqs: Rows[Sequence], room: int, num_steps: int = 1) -> None:
        """Plan the drafts of a step's sequences, at most `room` in total, and of the next steps.

        `num_steps`: number of steps since the last plan, this one included; see `num_unplanned`.
        """
        self._is_plain = False
        self._trying.clear()
        self._steps_left -= num_steps
        if num_steps > 1:
            self.costs.pass_steps(num_steps - 1)
        if self.gate.is_trying and self._has_few_rows:
            self._steps_left = 0
        if not self.is_stopped and (self._steps_left <= 0 or _size(len(seqs)) != self._planned_size):
            # A few steps, or a few new or ended sequences, hardly change the best number of drafts.
            self._decide(seqs, room)
            if self.gate.is_trying and not self._may_pay:
                self.gate.reject()
        if self._by_model:
            self.gate.review(len(seqs), is_gain_expected=self._gain > 1.0, may_pay=self._may_pay)
        if self.is_stopped:
            self._has_drafts, self._first_limit = False, 0
            self._steps_left, self._planned_size = _MOST_STEPS_PER_IDLE_PLAN, 0
        elif self._try_cost is not None:
            self._try_credit = min(self._try_credit + num_steps * self._try_share, self._try_cost)
            if self._try_credit == self._try_cost:
                self._try(seqs)

    @property
    def _may_pay(self) -> bool:
        """Whether drafts of all sequences would pay if they were accepted. Short tries show it themselves, since the
        costs may be those of a few first steps, which are longer."""
        return self._try_cost is not None or self._is_try_short

    @property
    def num_unplanned(self) -> int:
        """Number of steps after the planned one that need no plan while the number of rows is the same.

        In these steps nothing is drafted, and a drafter stores nothing.
        """
        if self.is_stopped:
            return self._steps_left - 1
        if self._by_model or not self.is_idle:
            return 0
        steps = self._steps_left - 1
        if self._try_cost is not None:
            steps = min(steps, int((self._try_cost - self._try_credit) / self._try_share) - 1)
        return max(0, steps)

    def _decide(self, seqs: Rows[Sequence], room: int) -> None:
        """Set the most drafts of each sequence and the size of a try for the next steps."""
        num_rows = len(seqs)
        records = [self._record(seq) for seq in seqs]
        rates = [self._rate if record.rate is None else record.rate for record in records]
        self._is_plain = not self._by_model and not self.costs.is_recent(num_rows)
        plain = self.costs.step(num_rows)
        # Where a model drafts, `DraftGate` decides by its measurements whether it does, and the plan how many tokens.
        best, limits = 0.0 if self._by_model else _LEAST_GAIN, [0] * num_rows
        best_try, self._try_cost = 0.0, None
        shallower, num_fewer = plain, 0
        for depth in range(1, self._max_drafts + 1 if room > 0 else 1):
            num_most = min(num_rows * depth, room)
            seconds = self.costs.with_drafting(num_rows + num_most, num_rows, depth)
            seconds_of_try = seconds
            if self._by_model:
                seconds_of_try += self.costs.beyond(num_rows + num_most, num_rows, depth)
            pace = plain / seconds_of_try if plain else 1.0
            gain = (1.0 + _expected(_RATE_IN_TRIES, depth) * num_most / (num_rows * depth)) * pace
            if gain > best_try:
                best_try = gain
                self._plan_try(num_rows, depth, room, plain)
                self._is_try_short = _LEAST_STEPS * seconds_of_try <= _MOST_UNJUDGED
                if gain <= _LEAST_GAIN:
                    self._try_cost = None
            # The cost of each row's last draft in tokens of plain steps: drafts with a lower probability of acceptance
            # are left out.
            least = _MARGIN * num_rows * (seconds - shallower) / plain / max(1, num_most - num_fewer) if plain else 0.0
            shallower, num_fewer = seconds, num_most
            if least >= 1.0:
                continue
            chosen = _fitting([_useful(rate, least, depth) for rate in rates], rates, room)
            num_drafts = sum(chosen)
            if not num_drafts:
                continue
            # With the geometric mean, a large gain of a few sequences does not outweigh a slowdown of all others.
            progress = sum(math.log1p(_expected(rate, n)) for rate, n in zip(rates, chosen, strict=True) if n)
            seconds = self.costs.with_drafting(num_rows + num_drafts, sum(map(bool, chosen)), max(chosen))
            gain = math.exp(progress / num_rows) * (plain / seconds if plain else 1.0)
            if gain > best:
                best, limits = gain, chosen
        self._gain = best
        is_new = _size(num_rows) != self._planned_size
        for record, limit in zip(records, limits, strict=True):
            is_new |= record.limit != limit
            record.limit = limit
        self._has_drafts = any(limits)
        self._planned_size = _size(num_rows)
        most = _MOST_STEPS_PER_PLAN if self._has_drafts else _MOST_STEPS_PER_IDLE_PLAN
        self._interval = _STEPS_PER_PLAN if is_new else min(2 * self._interval, most)
        self._steps_left = self._interval
        # A new sequence has the average number of drafts of the others.
        self._first_limit = max(1, round(sum(limits) / num_rows)) if self._has_drafts else 0

    def _plan_try(self, num_rows: int, depth: int, room: int, plain: float) -> None:
        """Set the number of drafts of a try, its number of sequences, and its cost."""
        self._try_depth = depth
        self._try_rows = max(1, min(num_rows, room // depth, _TRYING_ROWS if self._by_model else num_rows))
        seconds = self.costs.with_drafting(num_rows + self._try_rows * depth, self._try_rows, depth)
        self._try_cost = max(0.0, seconds / plain - 1.0) if plain else 0.0

    def _try(self, seqs: Rows[Sequence]) -> None:
        """Choose the sequences without drafts that try some after the next step: those with the oldest last try."""
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
        """Update a sequence's acceptance rate with its verified drafts; its tokens are known."""
        record = self._record(seq)
        rate = self._rate if record.rate is None else record.rate
        learnt_by_all = _LEARNT_BY_ALL
        if not record.limit:
            # This was a try: the earlier rate may be that of other text, so it is replaced.
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
        """Remove the record of a finished sequence."""
        self._records.pop(seq.id, None)

    def _record(self, seq: Sequence) -> _Record:
        record = self._records.get(seq.id)
        if record is None:
            record = self._records[seq.id] = _Record(self._first_limit)
        return record


def _useful(rate: float, least: float, depth: int) -> int:
    """The number of drafts, at most `depth`, that are each accepted with a probability of at least `least`."""
    if rate < least:
        return 0
    if least <= 0.0 or rate >= 1.0:
        return depth
    return min(depth, int(math.log(least) / math.log(rate))) if rate > 0.0 else 0


def _fitting(chosen: list[int], rates: list[float], room: int) -> list[int]:
    """The numbers of drafts of each row, reduced to fit `room`: evenly, or if there is not room for one each, to one
    for the rows with the highest acceptance rates."""
    if sum(chosen) <= room:
        return chosen
    most = room // len(chosen)
    if most:
        return [min(count, most) for count in chosen]
    best = sorted(range(len(chosen)), key=lambda row: -rates[row] if chosen[row] else 1.0)[:room]
    return [int(row in best and count > 0) for row, count in enumerate(chosen)]


def _expected(rate: float, count: int) -> float:
    """The expected number of accepted tokens of `count` drafts."""
    return float(count) if rate >= 1.0 else rate * (1.0 - rate**count) / (1.0 - rate)
