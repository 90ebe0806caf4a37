"""Settings of every test process. Imported by pytest before any test, so before torch."""

import os
import signal

# Two spinning OpenMP teams on two cores, one a test worker, slow torch down a hundredfold: idle threads shall sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Other people's clients, each in an environment of its own: `make conformance`.
collect_ignore = ["conformance"]
