"""Micro-benchmarks and side-by-side runs; `make bench` runs them. Nothing here is imported by the server."""

import os

# As in the engine, whose operators and torch share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
