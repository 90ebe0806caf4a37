"""Operators over tensors, one library a folder (CPU, Triton, aiter), and the registry that chooses; imports nothing
above.
"""
