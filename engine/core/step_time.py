"""`StepTimeModel`: predicts the duration of a step from the measured durations of earlier steps.

The scheduler bounds steps by time with it. A step's seconds are modelled as a linear function of its work:

    base + a * prompt tokens + b * decode tokens + c * (query, key) pairs of prompts + d * keys that decodes read

The five coefficients follow the measurements by a Kalman filter whose state is a random walk (R. E. Kalman, "A New
Approach to Linear Filtering and Prediction Problems", 1960): each measurement changes them in proportion to their
uncertainty, and coefficients that no recent step depended on become uncertain again.
"""

import math
import operator
from typing import NamedTuple

from engine.batch import ScheduledBatch

_FIRST_TOKENS = 64
"""Most prompt tokens of a step before any step was measured: few even for a large model on a slow processor."""
_GROWTH = 4
"""Predictions are made up to this multiple of the most prompt tokens of a measured step."""
_DECODES_BETWEEN = 8
"""One in this number of steps with decodes alone is measured."""

_RELATIVE_NOISE = 0.1
"""Standard deviation of a step's duration, as a share of it."""
_ABSOLUTE_NOISE = 2e-4
"""Standard deviation in seconds, for the shortest steps."""
_DRIFT = 0.02
"""Change of a coefficient between two measurements, as a share of it."""
_EXCESS_RATE, _MOST_EXCESS = 0.1, 3.0
"""Weight of a step in the mean excess over the prediction, and the largest excess that one step counts."""
_SLOWER_WEIGHT = 0.1
"""Weight of the error of a step that took longer than predicted. Other work on the machine can only delay steps, so
the prediction is for undisturbed steps (expectile regression: W. Newey and J. Powell, 1987)."""
_SMALL_TOKENS = 8
"""Most tokens of a step from which the fixed cost is measured."""
_SLOWER_FIXED = 0.02
"""Weight of such a step in the fixed cost if it took longer. A shorter step sets the fixed cost at once."""
_STEPS_UNTIL_KNOWN = 32
"""Number of measured steps up to which slower steps have the same weight as faster ones."""
_OUTLIER = 3.0
"""Errors are limited to this number of standard deviations."""
_OUTLIERS_BELIEVED, _SLOWER_BELIEVED = 3, 8
"""Number of successive outliers on one side that count as a change of the machine: shorter steps, and longer ones."""


class StepWork(NamedTuple):
    """The work of a step, which determines its duration."""

    base: float = 1.0
    prompt_tokens: float = 0.0
    decode_tokens: float = 0.0
    prompt_pairs: float = 0.0
    """Number of (query, key) pairs of the computed prompt tokens."""
    decode_keys: float = 0.0
    """Sum of the context lengths of the decodes."""

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepWork":
        """Compute the work of a scheduled step."""
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
    """Learns the durations of steps. Until prompts have been measured, its predictions are cautious.

    `max_step_seconds` is the longest planned step, which scales the initial coefficients.
    """

    def __init__(self, max_step_seconds: float) -> None:
        bound = max_step_seconds
        # The amount of each kind of work that alone would take the bound's duration, as initially assumed.
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
        """Mean excess of durations over predictions, as a share of the prediction; shorter steps count as 0."""
        self._fixed = math.inf
        self._observed = 0
        """Number of measured steps."""
        self._outliers = 0
        """Number of successive outliers; negative if these steps took less than predicted."""
        self._decode_steps = 0

    def note(self, batch: ScheduledBatch, seconds: float) -> None:
        """Update the model with the duration of a step. Most decode steps are skipped, since they are alike."""
        if batch.total_seqs_num_prefill == 0:
            self._decode_steps += 1
            if self._decode_steps % _DECODES_BETWEEN:
                return
        self.observe(StepWork.of(batch), seconds)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Update the model with the duration of a step with this work."""
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
        """Predict the duration of a step, in seconds."""
        predicted: float = sum(map(operator.mul, self._coefficients, work))
        return predicted

    @property
    def fixed_seconds(self) -> float:
        """Duration of a step with few tokens, the fixed cost; until one was measured, that of the shortest step.

        It is not one of the coefficients: while all steps take about as long as a bound that is a multiple of the
        fixed cost, any share of their duration could be fixed, and the bound and the coefficient would grow together.
        """
        return self._coefficients[0] if math.isinf(self._fixed) else self._fixed

    def prompt_seconds(self, start: int, count: int) -> float:
        """Predict the seconds that `count` tokens of a prompt, after `start` others, add to a step."""
        _, token, _, pair, _ = self._coefficients
        return count * (token + pair * (start + 0.5 * count))

    def prompt_tokens(self, start: int, seconds: float, so_far: int) -> int:
        """Return the most tokens of a prompt, after `start` others, that fit `seconds`, in a step with `so_far`
        others."""
        most = max(_FIRST_TOKENS, _GROWTH * self._largest) - so_far
        _, token, _, pair, _ = self._coefficients
        linear, quadratic = token + pair * start, 0.5 * pair
        if seconds <= 0:
            return 0
        # quadratic * n^2 + linear * n = seconds, in the form that does not cancel.
        root = linear + math.sqrt(linear * linear + 4 * quadratic * seconds)
        return max(0, int(min(most, 2 * seconds / root if root > 0 else most)))

    def _weight_of_slower(self, noise: float) -> float:
        """Return the weight of the error of a step that took longer. `noise` is the share of the measurement's noise
        in the variance; the rest, which comes from uncertain coefficients, counts fully."""
        return 1.0 if self._is_new else 1.0 - (1.0 - _SLOWER_WEIGHT) * noise

    @property
    def _is_new(self) -> bool:
        return self._observed <= _STEPS_UNTIL_KNOWN

    def _limited(self, error: float, deviation: float) -> float:
        """Limit the error of an outlier, unless several successive outliers agree."""
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
