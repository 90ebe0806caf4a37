"""Settings of the property tests: a failure is made small for some seconds, not for minutes."""

from hypothesis.internal.conjecture import engine

engine.MAX_SHRINKING_SECONDS = 15
