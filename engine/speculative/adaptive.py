"""`DraftPlan`: the number of drafts of each sequence, by measured costs of steps and acceptance rates.

1. `StepCosts`. A step of more tokens takes longer, and so does drafting for more rows or more drafts. Both are
   measured in every step, by size.
2. `DraftPlan`. If a draft is accepted with probability `p` after accepted ones, `n` drafts yield `p + p^2 + ... + p^n`
   tokens. For each number of drafts, the plan compares the geometric mean of the sequences' tokens per second with
   that of no drafts. It is made every few steps. In between, some sequences without drafts try some.
3. `DraftGate`. A model that drafts also takes part in steps without drafts and computes prompts, and drafts change how
   many rows run. So whether it drafts at all is not computed from these costs: blocks of some steps with the drafter
   are compared with blocks without it. Where drafts pay, a block without them is measured now and then. Where they do
   not, a short try is made as soon as what earlier ones have lost is repaid by a small share of the time.

What a first step or an interrupted one takes is no cost: see `_Mean`, `_Means.note` and `DraftGate.note`.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Rows

from engine.batch import DraftWork, ScheduledBatch
from engine.sequence import Sequence

_FIRST_TIMES = 4
"""Number of first measurements of a cost of which only the least counts, since they include lazy initialisation."""
_SECONDS_LEARNT, _MORE_SECONDS_LEARNT = 0.2, 0.04
"""Weight of a measurement in a cost: one below the present value, and one above it. Other processes only lengthen
steps, so the cost is nearer to the short measurements than the mean is."""
_LARGEST_FACTOR = 3.0
"""The largest factor by which a measurement may exceed the mean of its size, or that between the sizes around it."""
_EXACT = 8
"""Size up to which each size is measured separately; above it, sizes are grouped in eighths of a power of two."""
_STALE_STEPS = 4096
"""Steps after which a cost that was not measured again does not count."""
_MANY_ROWS = 1 << 20
"""More rows than a step has."""


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
    """Mean seconds by size, of the latest `_STALE_STEPS` steps."""

    def __init__(self, costs: "StepCosts") -> None:
        self._costs = costs
        self._means: dict[int, _Mean] = {}
        self.sizes: list[int] = []
        """The known sizes, in ascending order."""

    def note(self, size: int, seconds: float) -> None:
        if self.sizes and self.sizes[0] <= size <= self.sizes[-1]:
            expected = self.at(size)
            seconds = min(seconds, _LARGEST_FACTOR * expected) if expected else seconds
        if size not in self.sizes:
            self._means[size] = _Mean()
            insort(self.sizes, size)
        self._means[size].note(seconds, self._costs.num_steps)

    def known(self, size: int) -> float | None:
        """The mean seconds of a measured size; None if that was too long ago."""
        mean = self._means[size]
        return mean.seconds if self._costs.num_steps - mean.step < _STALE_STEPS else None

    def at(self, size: float) -> float | None:
        """The mean seconds of a size; None if none is known."""
        return _between(self.sizes, size, self.known)

    def latest_step(self, lowest: int, highest: int) -> int:
        """The last step in which a size within these bounds was measured; 0 if none was."""
        return max((mean.step for size, mean in self._means.items() if lowest <= size <= highest), default=0)

    def beyond(self, size: int) -> float:
        """Expected seconds by which a size takes longer than the largest measured one, 0 for smaller sizes.

        They grow from the largest size on as they grow from half of it to it, but at most in proportion to the size.
        """
        seconds = self.at(size)
        if seconds is None or size <= (largest := self.sizes[-1]):
            return 0.0
        growth = max(0.0, seconds - (self.at(largest / 2) or 0.0)) / (largest / 2)
        return min(growth, seconds / largest) * (size - largest)


class StepCosts:
    """Mean seconds of steps of decodes by their tokens, of drafting by rows and depth, of prompts by their tokens."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Number of steps so far, measured or not."""
        self._steps, self._drafting_steps = _Means(self), _Means(self)
        """Costs of steps, the latter of those that can be measured only together with the drafting after them."""
        self._drafting: dict[int, _Means] = {}
        """Costs of drafting for each number of rows, by depth."""
        self._rows: list[int] = []
        """The known numbers of rows, in ascending order."""
        self._prompts = _Means(self), _Means(self)
        """Costs of prompts by their tokens in a step: where a model drafts, and in plain steps."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of decodes, without drafting."""
        self.num_steps += 1
        self._steps.note(_size(num_tokens), seconds)

    def note_drafting_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """As `note_step`, for a step including the drafting for `num_rows` rows that the device did before the step
        was read."""
        self.num_steps += 1
        self._drafting_steps.note(_size(num_tokens), seconds)
        self.note_drafting(DraftWork(0.0, num_rows, 1))

    def note_drafting(self, work: DraftWork) -> None:
        """Record the duration of drafting."""
        if not work.num_rows or not work.depth:
            return
        size = _size(work.num_rows)
        if size not in self._rows:
            self._drafting[size] = _Means(self)
            insort(self._rows, size)
        self._drafting[size].note(work.depth, work.seconds)

    def note_prompts(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        """Record by how much longer a step took with `num_tokens` of prompts than without."""
        self._prompts[is_plain].note(_size(num_tokens), seconds)

    def pass_steps(self, count: int) -> None:
        """Count `count` steps that were not measured."""
        self.num_steps += count

    def is_recent(self, num_tokens: int) -> bool:
        """Whether a step of about this size was measured recently, or no step was."""
        near = max(1, num_tokens // 4)
        last = self._steps.latest_step(_size(num_tokens - near), _size(num_tokens + near))
        return not self.num_steps or (last > 0 and self.num_steps - last < _STEPS_WITH_DRAFTS)

    @property
    def most_drafting_rows(self) -> int:
        """The most rows of which drafting was measured recently, alone or with its step; 0 without measurements."""
        # This removes the numbers of rows that are not known any more.
        self.drafting(_MANY_ROWS, 1)
        return self._rows[-1] if self._rows else 0

    def step(self, num_tokens: int) -> float:
        """Expected seconds of a step. Sizes above the largest measured one count as it, so that they are tried."""
        return self._steps.at(_size(num_tokens)) or 0.0

    def drafting(self, num_rows: int, depth: int) -> float:
        """Expected seconds of drafting; 0 without measurements. Sizes above the largest measured one count as it.

        Fewer drafts than the least measured number count as their share of its time, since a pass over all rows makes
        each draft.
        """
        if not depth or not num_rows:
            return 0.0

        def known(num_known_rows: int) -> float | None:
            means = self._drafting[num_known_rows]
            seconds = means.at(depth)
            return None if seconds is None else seconds * min(1.0, depth / means.sizes[0])

        return _between(self._rows, _size(num_rows), known) or 0.0

    def with_drafting(self, num_tokens: int, num_rows: int, depth: int) -> float:
        """Expected seconds of a step and of drafting `depth` tokens for each of `num_rows` rows after it."""
        whole = self._drafting_steps.at(_size(num_tokens)) if depth else None
        return self.step(num_tokens) + self.drafting(num_rows, depth) if whole is None else whole

    def beyond(self, num_tokens: int, num_rows: int, depth: int) -> float:
        """Expected seconds to add to `with_drafting`, which counts sizes above the largest measured one as that.

        With them, a try of a size that was never measured is not planned if it would be too slow.
        """
        size = _size(num_tokens)
        if self._drafting_steps.at(size) is not None:
            return self._drafting_steps.beyond(size)
        drafting = self.drafting(num_rows, depth)
        more = drafting * (num_rows / self._rows[-1] - 1.0) if drafting else 0.0
        return self._steps.beyond(size) + max(0.0, more)

    def prompts(self, num_tokens: int, *, is_plain: bool) -> float | None:
        """Expected seconds by which prompts lengthen a step; None if none was measured, with drafts or without."""
        if not num_tokens:
            return 0.0
        seconds = self._prompts[is_plain].at(_size(num_tokens))
        return self._prompts[not is_plain].at(_size(num_tokens)) if seconds is None else seconds

    def plain_seconds(
        self, num_rows: int, num_generated: int, num_prompt_tokens: int, usual_rows: float = 0.0
    ) -> float:
        """Expected seconds in which steps without drafts generate and compute so many tokens; 0 if not known yet.

        The steps have `num_rows`, or `usual_rows` if that is more. They then take at least as long: a size that was
        measured when contexts were shorter may seem to take less.
        """
        step, prompts = self.step(num_rows) if num_rows else 0.0, self.prompts(num_prompt_tokens, is_plain=True)
        if (num_rows and not step) or prompts is None:
            return 0.0
        if usual_rows > num_rows > 0:
            step = max(step, self.step(round(usual_rows)))
        return step * num_generated / max(1.0, num_rows, usual_rows) + prompts


def _size(count: int) -> int:
    """The size group of a number of tokens."""
    if count <= _EXACT:
        return count
    unit = 1 << max(0, count.bit_length() - 4)
    return count // unit * unit


def _between(sizes: list[int], at: float, known: Callable[[int], float | None]) -> float | None:
    """The value at a size, interpolated linearly between its neighbours in `sizes`; outside of them the nearest value.

    The sizes ascend; those whose value turns out to be not `known` any more are removed. None if no size has a value.
    """
    above = bisect_left(sizes, at)
    low = high = None
    while above < len(sizes) and (high := known(sizes[above])) is None:
        del sizes[above]
    if high is not None and sizes[above] == at:
        return high
    while above and (low := known(sizes[above - 1])) is None:
        above -= 1
        del sizes[above]
    if low is None or high is None:
        return high if low is None else low
    return low + (high - low) * (at - sizes[above - 1]) / (sizes[above] - sizes[above - 1])


_BLOCK_STEPS, _SHORT_BLOCK_STEPS = 32, 16
"""Steps of a block, and of a try or a block whose row group has no pace yet; each round of a step counts."""
_BLOCKS_PER_CHECK, _FIRST_BLOCKS_PER_CHECK = 64, 8
"""Blocks with drafts after which one without drafts measures plain steps again, and their number while plain steps
were measured in one block only; each further one adds as many."""
_OPENING_PACE, _LEAST_PACE = 1.1, 1.04
"""Least pace with drafts, relative to that without, for which drafting begins, and for which it goes on."""
_DEBT_REPAID, _CREDIT = 0.003, 0.005
"""Share of the time without drafts that repays what drafts have lost, and seconds that they may lose in advance."""
_FEW_ROWS_GROUP = 4
"""The row groups of 2 to 16 rows have one debt. Drafts gain more there than a try of a few steps loses, and after text
with which they lost, other text would otherwise wait long for a try."""
_LEAST_STEPS, _MOST_LOST, _MOST_STEPS_LOST, _MOST_UNJUDGED = 4, 0.004, 2, 0.03
"""A short block with drafts ends early, after at least so many steps, where it has lost so many seconds and so many of
its mean steps, or has taken so many seconds before the pace without drafts is known."""
_WITH_REMEMBERED, _WITHOUT_REMEMBERED = 0.7, 0.9
"""Weight of earlier blocks with drafts, and without, relative to the block after them."""


class _Pace:
    """Sums over steps or blocks: the seconds in which plain steps would have had their tokens, and those they took."""

    __slots__ = ("count", "plain", "seconds")

    def __init__(self) -> None:
        self.plain, self.seconds, self.count = 0.0, 0.0, 0

    def add(self, plain: float, seconds: float, remembered: float = 1.0) -> None:
        self.count += 1
        self.plain = remembered * self.plain + plain
        self.seconds = remembered * self.seconds + seconds

    @property
    def value(self) -> float:
        """The pace relative to the expected one of plain steps; 0 before the first block."""
        return self.plain / self.seconds if self.seconds else 0.0


class _GroupPaces:
    """The paces of the blocks of one row group, with drafts and without.

    The pace with drafts is relative to the latest one without: the expected durations of plain steps, to which all
    paces refer, change with each measurement, for a new server by half and more.
    """

    __slots__ = ("plain", "rows", "with_drafts")

    def __init__(self) -> None:
        self.with_drafts, self.plain = _Pace(), _Pace()
        self.rows = 0.0
        """Mean number of decodes of a step in the latest plain block."""


class DraftGate:
    """Decides in blocks of steps whether a model drafts, by the measured pace of blocks with drafts and without.

    Between blocks in which drafts pay, a block without drafts measures plain steps now and then. Where drafts do not
    pay, a try of one short block is made whenever no debt is left. What blocks with drafts lose is a debt of their
    row group (`_row_group`); what they gain and a small share of the time without drafts in this group repay it. So
    that share bounds the time that drafts lose in each row group, whatever they gain in others.
    """

    def __init__(self) -> None:
        self.is_open = True
        """Whether the model drafts. Otherwise it takes no part in steps, and stores nothing of prompts."""
        self.is_trying = False
        """Whether this block is a try, in which sequences draft whose drafts are not expected to pay."""
        self.needs_plain_steps = True
        """Whether plain steps of this row group have no pace yet, so that each one is to be measured."""
        self._groups = defaultdict[int, _GroupPaces](_GroupPaces)
        """By `_row_group` of the mean number of rows."""
        self._debts: dict[int, float] = {}
        """Seconds that drafting has lost and nothing has repaid, by `_indebted` row group; below 0 it is a credit."""
        self._num_open_blocks = 0
        """Number of successive blocks with drafts."""
        self._plain_group: int | None = None
        """The row group of the last block without drafts."""
        self._begin()

    def _begin(self) -> None:
        self._num_steps = self._num_rows = self._num_decodes = 0
        self._seconds, self._block = 0.0, _Pace()

    def note(
        self,
        num_rows: int,
        seconds: float,
        plain: float,
        num_steps: int = 1,
        *,
        usual: float = math.inf,
        num_decodes: int = 0,
    ) -> None:
        """Count a step, or `num_steps` equal ones: its rows, its duration, and that of plain steps for its tokens.

        `plain` is 0 if it is not known. `usual`: the expected duration of a step with drafts. `num_decodes`: its rows
        that decode.
        """
        self._num_steps += num_steps
        self._num_rows += num_steps * num_rows
        self._num_decodes += num_steps * num_decodes
        self._seconds += num_steps * seconds
        # Something else has interrupted a step that exceeds its expected duration by that of a plain one. With drafts
        # it counts as expected, since longer steps are interrupted more often, and without drafts it does not count.
        if self.is_open and seconds > usual + plain:
            seconds = usual
        if plain and (self.is_open or seconds <= 2.0 * plain):
            self._block.add(num_steps * plain, num_steps * seconds)
        if self._is_over():
            self._end_block()

    def usual_rows(self, num_rows: int) -> float:
        """The decodes of a plain step where steps with drafts have `num_rows`; 0 if no such plain step is known.

        Drafts end answers sooner and leave fewer rows, of which each token costs a plain step more.
        """
        return self._groups[self._group_of(num_rows)].rows

    def review(self, num_rows: int, *, is_gain_expected: bool, may_pay: bool = True) -> None:
        """End a block with drafts early if drafts are likely to lose with `num_rows`, unless the block is a try.

        This is so in two cases. The last plain block had far fewer rows, and with so many drafts did not pay before,
        or were not judged yet and, by `may_pay`, would not pay even if they were accepted. Or the plan expects no
        gain, and the block has lost.
        """
        if not self.is_open or self.is_trying:
            return
        group = _row_group(num_rows)
        pace = self._groups[group].with_drafts.value
        if (
            self._plain_group is not None
            and group > self._plain_group + 1
            and (pace < _LEAST_PACE if pace else not may_pay)
        ):
            self.is_open = False
            self._begin()
        elif not is_gain_expected and self._seconds > _MOST_UNJUDGED and self._lost() > _MOST_LOST:
            # What drafts gained earlier was with other text.
            self._end_block(remembered=0.0)

    def reject(self) -> None:
        """End a try because its drafts would not pay even if they were accepted."""
        self.is_open = self.is_trying = False
        if self._plain_group is not None:
            self._debts[_indebted(self._plain_group)] = max(self._debt(self._plain_group), _CREDIT)
        self._begin()

    def _group_of(self, num_rows: int) -> int:
        """The row group of steps with so many rows.

        Drafts change the number of running rows, so with drafts a row group that has no pace without them counts as
        that of the last block without drafts, if the two are adjacent.
        """
        group = _row_group(num_rows)
        if self.is_open and self._plain_group in (group - 1, group + 1) and not self._groups[group].plain.value:
            return self._plain_group
        return group

    @property
    def _group(self) -> int:
        """The block's row group."""
        return self._group_of(-(-self._num_rows // self._num_steps))

    def _is_over(self) -> bool:
        """Whether the block ends."""
        plain = self._groups[self._group].plain
        self.needs_plain_steps = not plain.count
        is_short = self.is_trying or not plain.count
        if self._num_steps >= (_SHORT_BLOCK_STEPS if is_short else _BLOCK_STEPS):
            return True
        if not self.is_open or not is_short or self._num_steps < _LEAST_STEPS:
            return False
        if plain.value:
            return self._lost() > max(_MOST_LOST, _MOST_STEPS_LOST * self._seconds / self._num_steps)
        return self._seconds > _MOST_UNJUDGED

    def _end_block(self, *, remembered: float = _WITH_REMEMBERED) -> None:
        group, block = self._group, self._block
        of_group = self._groups[group]
        pace, plain = of_group.with_drafts, of_group.plain
        if self.is_open:
            self._num_open_blocks += 1
            if plain.value:
                pace.add(block.plain / plain.value, block.seconds, remembered)
                self._owe(group, self._lost())
            is_gaining = pace.value >= (_OPENING_PACE if self.is_trying else _LEAST_PACE)
            most = min(_BLOCKS_PER_CHECK, _FIRST_BLOCKS_PER_CHECK * plain.count)
            self.is_open = is_gaining and self._num_open_blocks < most
        else:
            self._num_open_blocks, self._plain_group = 0, group
            plain.add(block.plain, block.seconds, _WITHOUT_REMEMBERED)
            of_group.rows = self._num_decodes / self._num_steps
            self._owe(group, -_DEBT_REPAID * block.seconds)
            is_gaining = pace.value >= _OPENING_PACE
            self.is_open = plain.value > 0.0 and (is_gaining or self._debt(group) <= 0.0)
        self.is_trying = self.is_open and not is_gaining
        self._begin()

    def _lost(self) -> float:
        """Seconds that the block has lost by drafts; below 0 it has gained, or it is not known."""
        pace = self._groups[self._group].plain.value
        return self._block.seconds - self._block.plain / pace if pace else -math.inf

    def _owe(self, group: int, seconds: float) -> None:
        self._debts[_indebted(group)] = max(-_CREDIT, self._debt(group) + seconds)

    def _debt(self, group: int) -> float:
        """The debt of a row group; by default the largest of groups of fewer rows: drafts lose with more rows too."""
        group = _indebted(group)
        smaller = (debt for other, debt in self._debts.items() if other < group)
        return self._debts[group] if group in self._debts else max(smaller, default=-_CREDIT)


def _row_group(num_rows: int) -> int:
    """The row group of a number of rows: the exponent of the least power of two that is not below it."""
    return (num_rows - 1).bit_length()


def _indebted(group: int) -> int:
    """The row group whose debt counts for a row group: those of few rows share one."""
    return max(group, _FEW_ROWS_GROUP) if group else 0


_FIRST_RATE, _RATE_IN_TRIES = 0.7, 0.9
"""Acceptance rate that is assumed before any draft was verified, and at least after a successful try; and for the
value of a try: if drafts would bring no gain even then, none is made."""
_LEARNT, _LEARNT_BY_ALL = 0.1, 0.02
"""Weight of a draft in its sequence's acceptance rate, and in the rate of all sequences, used for new ones."""
_LEAST_GAIN, _MARGIN = 1.05, 1.1
"""Least relative gain in tokens per second for which drafts are made, and least expected gain of a row's last draft
relative to its cost: measured times and acceptance rates may be too favourable."""
_STEPS_PER_PLAN, _STEPS_PER_IDLE_PLAN = 8, 64
"""Steps for which a plan is valid while the number of rows hardly changes, with drafts and without."""
_STEPS_WITH_DRAFTS = 512
"""Steps after which a step without drafts is made to measure its cost, if there was none and no model drafts."""
_TRIES, _LEAST_TRIES = 0.008, 0.002
"""Share of time spent on tries while some succeed, and the least share; each failed try halves it."""
_TRYING_ROWS = 8
"""The most sequences of a try where a model drafts."""
_FIRST_SHARE, _FIRST_MEASURED = 8, 0.75
"""One in so many sequences, but at least `_TRYING_ROWS`, drafts with a model until costs of that are known for such a
share of them: a drafter may find nothing for some."""


class _Record:
    """What is known of one sequence's drafts."""

    __slots__ = ("limit", "rate", "tried")

    def __init__(self, limit: int) -> None:
        self.rate: float | None = None
        """Acceptance rate; None if no draft of the sequence was verified yet."""
        self.limit, self.tried = limit, 0
        """The most drafts by the last plan, and the number of the sequence's last try."""


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
        self._steps_left = 0
        self._planned_size = 0
        self._probed: dict[int, int] = {}
        """By size, the number of the step at which steps of that size were last planned in order to measure them."""

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
        # A step with drafts asks for each of its rows, so this calls no other function.
        if self._is_plain or (self._by_model and not self.gate.is_open):
            return 0
        if seq.id in self._trying:
            return self._try_depth
        record = self._records.get(seq.id)
        limit = self._first_limit if record is None else record.limit
        return self._try_depth if self.gate.is_trying and not limit else limit

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
        # Before the step is learnt, since one that is interrupted would else be as long as expected.
        usual = self._usual_seconds(batch, num_rows + num_drafts, num_prompt_tokens, num_rounds)
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
            usual_rows = self.gate.usual_rows(batch.total_seqs_num) if self.gate.is_open else 0.0
            plain = self.costs.plain_seconds(num_rows, num_generated, num_prompt_tokens, usual_rows)
            usual = usual or self._usual_seconds(batch, num_rows + num_drafts, num_prompt_tokens, num_rounds)
            self.gate.note(
                batch.total_seqs_num,
                seconds / num_rounds,
                plain / num_rounds,
                num_rounds * num_steps,
                usual=usual,
                num_decodes=num_rows,
            )

    def _seconds_without_prompts(self, batch: ScheduledBatch, num_tokens: int) -> float:
        """The expected duration of a step's decodes of `num_tokens`, and of the drafting after them."""
        next_drafts = batch.num_next_drafts[: batch.total_seqs_num_decode]
        if not num_tokens:
            return 0.0
        return self.costs.with_drafting(num_tokens, sum(map(bool, next_drafts)), max(next_drafts, default=0))

    def _usual_seconds(self, batch: ScheduledBatch, num_tokens: int, num_prompt_tokens: int, num_rounds: int) -> float:
        """The expected duration of a round, with drafting and its part of the prompts; 0 if it is not known."""
        decodes = self._seconds_without_prompts(batch, num_tokens)
        prompts = self.costs.prompts(num_prompt_tokens, is_plain=False)
        if (num_tokens and not decodes) or prompts is None:
            return 0.0
        if num_tokens:
            next_drafts = batch.num_next_drafts[: batch.total_seqs_num_decode]
            decodes += self.costs.beyond(num_tokens, sum(map(bool, next_drafts)), max(next_drafts, default=0))
        return decodes + prompts / num_rounds

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
            self._steps_left, self._planned_size = _STEPS_PER_IDLE_PLAN, 0
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
                best_try, self._try_depth = gain, depth
                self._try_rows = max(1, min(num_rows, room // depth, _TRYING_ROWS if self._by_model else num_rows))
                self._is_try_short = _LEAST_STEPS * seconds_of_try <= _MOST_UNJUDGED
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
        if best_try > _LEAST_GAIN:
            tokens, rows = num_rows + self._try_rows * self._try_depth, self._try_rows
            seconds = self.costs.with_drafting(tokens, rows, self._try_depth)
            self._try_cost = max(0.0, seconds / plain - 1.0) if plain else 0.0
        self._gain = best
        may_probe = num_rows <= _TRYING_ROWS or not (self.gate.is_trying or self.gate.needs_plain_steps)
        if self._by_model and may_probe and plain:
            limits = self._probing(limits)
        for record, limit in zip(records, limits, strict=True):
            record.limit = limit
        self._has_drafts = any(limits)
        self._planned_size = _size(num_rows)
        self._steps_left = _STEPS_PER_PLAN if self._has_drafts else _STEPS_PER_IDLE_PLAN
        # A new sequence has the average number of drafts of the others.
        self._first_limit = max(1, round(sum(limits) / num_rows)) if self._has_drafts else 0

    def _probing(self, limits: list[int]) -> list[int]:
        """The most drafts of each row, one fewer than `limits` where steps of that size are to be measured again.

        In a step of fewer drafts, more rounds share the host's time. Only a measurement shows the cost of such a step.
        """
        fewer = [min(limit, max(0, max(limits) - 1)) for limit in limits]
        size, step = _size(len(limits) + sum(fewer)), self.costs.num_steps
        if not any(fewer) or step - self._probed.get(size, -_STALE_STEPS) < _STALE_STEPS:
            return limits
        self._probed[size] = step
        return fewer

    def _try(self, seqs: Rows[Sequence]) -> None:
        """Choose the sequences without drafts that try some after the next step: those with the oldest last try."""
        waiting = [seq for seq in seqs if not (self._records.get(seq.id) or self._record(seq)).limit]
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
        record = self._records.get(seq.id) or self._record(seq)
        rate = self._rate if record.rate is None else record.rate
        learnt_by_all = _LEARNT_BY_ALL
        if not record.limit:
            # This was a try: the earlier rate may be that of other text, so it is replaced.
            learnt_by_all = _LEARNT
            if num_accepted:
                rate = max(rate, _FIRST_RATE)
                self._try_share, self._steps_left = _TRIES, 0
            else:
                self._try_share = max(_LEAST_TRIES, self._try_share * 0.5 ** (1.0 / max(1, self._try_rows)))
        # The accepted drafts are learnt, and perhaps a rejected one after them.
        is_rejected = num_accepted < num_drafts
        rate = 1.0 - (1.0 - rate) * (1.0 - _LEARNT) ** num_accepted
        record.rate = rate * (1.0 - _LEARNT * is_rejected)
        rate = 1.0 - (1.0 - self._rate) * (1.0 - learnt_by_all) ** num_accepted
        self._rate = rate * (1.0 - learnt_by_all * is_rejected)

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
