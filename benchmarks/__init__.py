"""Micro-benchmarks and side-by-side runs; `make bench` runs them. Nothing here is imported by the server."""
