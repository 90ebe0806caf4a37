"""The kernel of `probe`: one product of two small matrices."""

import torch
import triton
import triton.language as tl

from models.ops.triton.compilation import Compilation
from models.ops.triton.configs import TARGETS, Config

_SIZE = 32


@triton.jit
def probe_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    """`out = a @ b`. # [SIZE, SIZE] each, float16 and float32"""
    rows = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + rows, tl.dot(tl.load(a_ptr + rows), tl.load(b_ptr + rows)))


def largest_error(device: torch.device) -> float:
    """The largest difference from torch's product of the same matrices."""
    a = (torch.arange(_SIZE * _SIZE, device=device) % 7 - 3).view(_SIZE, _SIZE).half()
    b = (torch.arange(_SIZE * _SIZE, device=device) % 5 - 2).view(_SIZE, _SIZE).half()
    out = torch.empty(_SIZE, _SIZE, device=device)
    probe_kernel[(1,)](a, b, out, _SIZE)
    return float((out - a.float() @ b.float()).abs().max())


def version() -> str:
    """Triton's release."""
    return str(triton.__version__)


COMPILATIONS = tuple(
    Compilation(
        kernel=probe_kernel,
        variant="fp16",
        target=target,
        config=Config(),
        signature={"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32"},
        constexprs={"SIZE": _SIZE},
        has_dot=True,
        has_wide_loads=False,
    )
    for target in TARGETS.values()
)
