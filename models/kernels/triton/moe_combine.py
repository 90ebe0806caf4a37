"""What a token's experts give, added up by their weights in their order: no sum depends on who finishes first."""

import torch
import triton
import triton.language as tl

from models.kernels.triton.arithmetic import cdiv
from models.kernels.triton.compilation import Compilation
from models.kernels.triton.configs import TARGETS, config_of
from models.kernels.triton.configs_dense import launch_of


@triton.jit
def moe_combine_kernel(
    products,  # [tokens * TOP_K, size]
    weights,  # [tokens, TOP_K] float32
    ids,  # [tokens, TOP_K] int64
    beside,  # [tokens, size]; any pointer where not HAS_BESIDE
    gate,  # [tokens] float32; any pointer where not HAS_GATE
    out,  # [tokens, size]
    size,
    beside_stride,
    num_experts,
    TOP_K: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    COLUMNS: tl.constexpr,  # Of one program
):
    """A run of one token's columns in float32. Grid: (tokens, runs)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    total = tl.zeros([COLUMNS], tl.float32)
    for nth in tl.static_range(TOP_K):
        pair = token * TOP_K + nth
        # Products of experts that are held elsewhere were never made.
        is_here = tl.load(ids + pair) < num_experts
        product = tl.load(products + pair * size + columns, mask=inside & is_here, other=0.0)
        total += product.to(tl.float32) * tl.load(weights + pair)
    if HAS_BESIDE:
        # The sum is rounded before what is beside it is added, as where ranks add up theirs in between.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        shared = tl.load(beside + token * beside_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared = (shared * tl.sigmoid(tl.load(gate + token))).to(out.dtype.element_ty).to(tl.float32)
        total += shared
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


def moe_combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    beside: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sum(weights * products)` of each token in float32, and what is `beside` it or, by `gate`'s sigmoid, a share.

    # [tokens * top_k, size], [tokens, top_k] float32, [tokens, top_k] int64, [tokens, size], [tokens, 1] float32

    Ids of `num_experts` and more count for nothing. # -> [tokens, size]
    """
    num_tokens, top_k = ids.shape
    size = products.shape[1]
    out = products.new_empty(num_tokens, size)
    launch = launch_of("moe_combine", products.device)
    moe_combine_kernel[(num_tokens, cdiv(size, launch.blocks["COLUMNS"]))](
        products,
        weights,
        ids,
        products if beside is None else beside,
        weights if gate is None else gate,
        out,
        size,
        0 if beside is None else beside.stride(0),
        num_experts,
        TOP_K=top_k,
        HAS_BESIDE=beside is not None,
        HAS_GATE=gate is not None,
        **launch.keywords,
    )
    return out


COMPILATIONS = tuple(
    Compilation(
        kernel=moe_combine_kernel,
        variant=variant,
        target=target,
        config=config_of("moe_combine", target),
        signature={
            **dict.fromkeys(("products", "beside", "out"), "*bf16"),
            **dict.fromkeys(("weights", "gate"), "*fp32"),
            "ids": "*i64",
            **dict.fromkeys(("size", "beside_stride", "num_experts"), "i32"),
        },
        constexprs={"TOP_K": 8, "HAS_BESIDE": has_beside, "HAS_GATE": has_beside},
        divisible=frozenset({"size", "beside_stride"}),
        large=frozenset({"products"}),
    )
    for target in TARGETS.values()
    for variant, has_beside in (("bf16", False), ("bf16 shared", True))
)
