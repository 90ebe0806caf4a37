"""Kaon and other servers, measured in turn over HTTP by one load generator: `python -m benchmarks.peers`."""
