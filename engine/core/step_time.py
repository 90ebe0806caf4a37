"""`StepTimeModel`: predicts how long a step takes, from the measured durations of earlier steps.

The scheduler bounds steps by time with it. A step's seconds are modelled as a linear function of its work:

    base + a * prompt tokens + b * decode tokens + c * (query, key) pairs of prompts + d * keys that decodes read

The five coefficients follow the measurements by a Kalman filter whose state is a random walk (R. E. Kalman, "A New
Approach to Linear Filtering and Prediction Problems", 1960): each measurement moves them in proportion to how
uncertain they are, and coefficients that no recent step depended on become uncertain again.
"""

import math
import operator
from typing import NamedTuple

from engine.batch import ScheduledBatch

_FIRST_TOKENS = 64
"""Most prompt tokens of a step before any was measured: little even for a large model on a slow processor."""
_GROWTH = 4
"""How many times more prompt tokens than in any measured step are predicted."""
_DECODES_BETWEEN = 8
"""Of steps that compute decodes only, this part is measured."""

_RELATIVE_NOISE = 0.1
"""Standard deviation of a step's duration, as a share of it."""
_ABSOLUTE_NOISE = 2e-4
"""The same in seconds, for the shortest steps."""
_DRIFT = 0.02
"""Change of a coefficient between two measurements, as a share of it."""
_EXCESS_RATE, _MOST_EXCESS = 0.1, 3.0
"""Weight of a step in the mean of what steps take longer than predicted, and the most that one counts as."""
_SLOWER_WEIGHT = 0.1
"""Weight of an error of a step that took longer than predicted: other work on the machine only ever delays steps, so
that the prediction is of undisturbed ones (expectile regression: W. Newey and J. Powell, 1987)."""
_SMALL_TOKENS = 8
"""A step of at most so many tokens shows what a step costs whatever it computes."""
_SLOWER_FIXED = 0.02
"""Weight of such a step in that cost where it took longer; one that took less shows that the cost is less."""
_STEPS_UNTIL_KNOWN = 32
"""Measured steps before which slower ones are learnt from like faster ones."""
_OUTLIER = 3.0
"""Standard deviations beyond which a measurement counts as if it were there."""
_OUTLIERS_BELIEVED, _SLOWER_BELIEVED = 3, 8
"""So many outliers in a row, all on one side, are a change of the machine; the second is of those that took longer."""


class StepWork(NamedTuple):
    """What determines the duration of a step."""

    base: float = 1.0
    prompt_tokens: float = 0.0
    decode_tokens: float = 0.0
    prompt_pairs: float = 0.0
    """Each computed prompt token times the tokens that it attends to."""
    decode_keys: float = 0.0
    """Context lengths of the decodes."""

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepWork":
        """The work of a scheduled step."""
        decodes, counts, ends = batch.total_seqs_num_decode, batch.num_scheduled_tokens, batch.context_lens
        pairs = sum(count * (end - 0.5 * count) for count, end in zip(counts[decodes:], ends[decodes:], strict=True))
        return cls(
            1.0,
            batch.total_tokens_num_prefill,
            batch.total_tokens_num_decode,
            pairs,
            sum(ends[:decodes]),
        )


class StepTimeModel:
    """Follows the durations of steps. Until prompts were measured its predictions are cautious ones.

    `max_step_seconds` is the longest step that is planned for, which scales what is assumed at first.
    """

    def __init__(self, max_step_seconds: float) -> None:
        bound = max_step_seconds
        # What a step of the bound's duration would have of each, if it had nothing else.
        most = StepWork(10.0, 1024.0, 256.0, 4e6, 1e6)
        self._coefficients = [bound / each for each in most]
        self._first_variances = [(4 * each) ** 2 for each in self._coefficients]
        self._least_drifts = [0.1 * _DRIFT * each for each in self._coefficients]
        size = len(most)
        self._covariance = [
            [self._first_variances[row] if row == column else 0.0 for column in range(size)] for row in range(size)
        ]
        self._largest = 0.0
        """Most prompt tokens of a measured step."""
        self.excess = 0.0
        """By how much steps take longer than predicted, as a share of the prediction; 0 for those that take less."""
        self._fixed = math.inf
        self._observed = 0
        """Measured steps."""
        self._outliers = 0
        """Successive outliers; negative where these steps took less than predicted."""
        self._decode_steps = 0

    def note(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn how long a step took. Of decode steps some are left out, since one is like another."""
        if batch.total_seqs_num_prefill == 0:
            self._decode_steps += 1
            if self._decode_steps % _DECODES_BETWEEN:
                return
        self.observe(StepWork.of(batch), seconds)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn how long a step of this work took."""
        self._observed += 1
        if seconds < self._fixed:
            self._fixed = seconds
        elif work.prompt_tokens + work.decode_tokens <= _SMALL_TOKENS:
            self._fixed += _SLOWER_FIXED * (min(seconds, 2 * self._fixed) - self._fixed)
        self._largest = max(self._largest, work.prompt_tokens)
        covariance, coefficients = self._covariance, self._coefficients
        a, b, c, d, e = work
        spread = [p * a + q * b + r * c + s * d + t * e for p, q, r, s, t in covariance]
        predicted = self.seconds(work)
        if predicted > 0:
            self.excess += _EXCESS_RATE * (min(max(0.0, seconds / predicted - 1.0), _MOST_EXCESS) - self.excess)
        noise = _RELATIVE_NOISE * max(predicted, seconds) + _ABSOLUTE_NOISE
        variance = sum(map(operator.mul, spread, work)) + noise * noise
        error = self._limited(seconds - predicted, math.sqrt(variance))
        if error > 0:
            error *= self._weight_of_slower(noise * noise / variance)
        gains = [entry / variance for entry in spread]
        for index, gain in enumerate(gains):
            coefficients[index] = max(0.0, coefficients[index] + gain * error)
            row = covariance[index] = [
                old - gain * entry for old, entry in zip(covariance[index], spread, strict=True)
            ]
            if row[index] < self._first_variances[index]:
                row[index] += max(self._least_drifts[index], _DRIFT * coefficients[index]) ** 2

    def seconds(self, work: StepWork) -> float:
        """The predicted duration of a step."""
        predicted: float = sum(map(operator.mul, self._coefficients, work))
        return predicted

    @property
    def fixed_seconds(self) -> float:
        """What a step of few tokens takes; until there was one, the shortest step.

        It is no coefficient: while all steps are about as long as a bound that is a multiple of it, any share of them
        could be fixed, and the bound and the coefficient would grow together.
        """
        return self._coefficients[0] if math.isinf(self._fixed) else self._fixed

    def prompt_seconds(self, start: int, count: int) -> float:
        """What computing `count` tokens of a prompt after `start` others adds to a step."""
        _, token, _, pair, _ = self._coefficients
        return count * (token + pair * (start + 0.5 * count))

    def prompt_tokens(self, start: int, seconds: float, so_far: int) -> int:
        """Most tokens of a prompt after `start` others that `seconds` suffice for, in a step with `so_far` others."""
        most = max(_FIRST_TOKENS, _GROWTH * self._largest) - so_far
        _, token, _, pair, _ = self._coefficients
        linear, quadratic = token + pair * start, 0.5 * pair
        if seconds <= 0:
            return 0
        # quadratic * n^2 + linear * n = seconds, in the form that does not cancel.
        root = linear + math.sqrt(linear * linear + 4 * quadratic * seconds)
        return max(0, int(min(most, 2 * seconds / root if root > 0 else most)))

    def _weight_of_slower(self, noise: float) -> float:
        """Part of an error that is learnt of a step that took longer, of whose variance `noise` is a part: all of what
        comes of uncertain coefficients."""
        return 1.0 if self._is_new else 1.0 - (1.0 - _SLOWER_WEIGHT) * noise

    @property
    def _is_new(self) -> bool:
        return self._observed <= _STEPS_UNTIL_KNOWN

    def _limited(self, error: float, deviation: float) -> float:
        """The error that is learnt from: of an outlier less, unless several in a row agree."""
        limit = _OUTLIER * deviation
        if abs(error) <= limit:
            self._outliers = 0
            return error
        sign = 1 if error > 0 else -1
        self._outliers = self._outliers + sign if self._outliers * sign > 0 else sign
        if abs(self._outliers) < (_OUTLIERS_BELIEVED if error < 0 or self._is_new else _SLOWER_BELIEVED):
            return math.copysign(limit, error)
        for index, coefficient in enumerate(self._coefficients):
            self._covariance[index][index] += coefficient * coefficient
        self._outliers = 0
        return error
