"""What `models.kernels.triton.moe_gemm` and `moe_combine` compute, in torch: a pair at a time, in float32."""

import torch

from models.kernels.triton.reference.gated import gated
from models.layers.activation import Gating


def moe_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """Each pair's row by its expert's weight; zero for experts that there are not. # ids [tokens, top_k] int64"""
    experts = ids.flatten()
    pairs = rows.repeat_interleave(len(experts) // len(rows), 0).float()
    here = experts < len(weight)
    products = pairs.new_zeros(len(experts), weight.shape[1])
    chosen = weight[experts[here]].float()
    products[here] = (chosen @ pairs[here, :, None])[:, :, 0]
    if bias is not None:
        products[here] += bias[experts[here]].float()
    if gating is not None:
        products = gated(products, gating.activation, alpha=gating.alpha, limit=gating.limit)
    return products.to(rows.dtype)


def moe_combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    beside: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the kernel's launcher."""
    by_token = products.float().view(*ids.shape, -1).masked_fill((ids >= num_experts)[..., None], 0.0)
    total = (by_token * weights[..., None]).sum(1).to(products.dtype)
    if beside is None:
        return total
    return total + (beside if gate is None else (beside.float() * gate.sigmoid()).to(beside.dtype))
