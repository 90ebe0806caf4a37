"""The kernel of `probe`: one product of two small matrices."""

import torch
import triton
import triton.language as tl

from models.ops.triton.launcher import jit

SIDE = 32


@jit
def probe_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    """`out = a @ b`. # [SIZE, SIZE] each, float16 and float32"""
    rows = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + rows, tl.dot(tl.load(a_ptr + rows), tl.load(b_ptr + rows)))


def largest_error(device: torch.device) -> float:
    """The largest difference from torch's product of the same matrices."""
    a = (torch.arange(SIDE * SIDE, device=device) % 7 - 3).view(SIDE, SIDE).half()
    b = (torch.arange(SIDE * SIDE, device=device) % 5 - 2).view(SIDE, SIDE).half()
    expected = a.float() @ b.float()
    errors = []
    for _ in range(2):  # Triton's own launch, and one of ours.
        out = torch.empty(SIDE, SIDE, device=device)
        probe_kernel[(1,)](a, b, out, SIZE=SIDE)
        errors.append(float((out - expected).abs().max()))
    return max(errors)


def version() -> str:
    """Triton's release."""
    return str(triton.__version__)
