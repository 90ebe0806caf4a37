"""Operators over tensors, one folder per library (CPU, Triton, aiter), and the registry that selects them.

The lowest layer of `models`: operators take tensors, and import no layers, attention or architectures.
"""
