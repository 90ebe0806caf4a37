"""Benchmarks: each module measures one thing, `python -m benchmarks` all of them."""

import os

# As in the engine, whose operators and torch share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
