"""What `models.kernels.triton.moe_route` computes, in torch; `topk` would leave open which of equals it takes."""

import torch


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel's launcher."""
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    choice = scores if correction is None else scores + correction
    if top_groups < num_groups:
        groups = choice.view(len(choice), num_groups, -1)
        counted = 1 if correction is None else 2
        goodness = groups.sort(-1, descending=True).values[..., :counted].sum(-1)
        best = goodness.argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
        left_out = torch.ones_like(goodness, dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids
