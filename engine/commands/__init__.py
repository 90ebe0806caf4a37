"""The child processes of `kaon doctor`, `kaon kernels build` and `kaon quantize`, one module each.

They import torch, so that the command's own process need not.
"""
