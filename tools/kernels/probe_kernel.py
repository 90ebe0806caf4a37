"""The forms of the kernels of `models.ops.triton.probe_kernel`, for each target."""

from models.ops.triton.configs import TARGETS, Config
from models.ops.triton.probe_kernel import SIDE, probe_kernel
from tools.kernels.compilation import Compilation

COMPILATIONS = tuple(
    Compilation(
        kernel=probe_kernel,
        variant="fp16",
        target=target,
        config=Config(),
        signature={"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32"},
        constexprs={"SIZE": SIDE},
        has_dot=True,
        has_wide_loads=False,
    )
    for target in TARGETS.values()
)
