"""Settings of the property tests: Hypothesis shrinks a failure for seconds, not for minutes."""

from hypothesis.internal.conjecture import engine

engine.MAX_SHRINKING_SECONDS = 15
