"""Operators over tensors, one library a folder (CPU, Triton, aiter), and the registry that chooses.

The lowest layer of `models`: operators know tensors, and import no layers, attention or architectures.
"""
