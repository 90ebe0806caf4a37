"""What `models.kernels.triton.draw` computes, in torch: one row at a time, in whole numbers."""

import torch

_ONE = 2.0**40


def draw(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    least_likely: float,
    bits: int,
    is_filtered: bool,
) -> int:
    """The token of a row of finite maximum. # [V] float32

    `least_likely`: how far from the likeliest a token may be. `bits`: the row's number in [0, 1), times 2^64.
    """
    distance = (logits.max() - logits) / torch.tensor(temperature, dtype=torch.float32)
    weights = (torch.exp(-distance) * _ONE).to(torch.int64)
    order = torch.arange(len(logits))
    if is_filtered:
        order = distance.sort(stable=True).indices
        running = weights[order].cumsum(0)
        kept = min(top_k, int((distance <= least_likely).sum()))
        if top_p < 1.0:
            needed = torch.tensor(top_p, dtype=torch.float64) * running[top_k - 1].double()
            kept = min(kept, 1 + int((running.double() < needed.ceil()).sum()))
        order = order[:kept]
    running = weights[order].cumsum(0)
    target = bits * int(running[-1]) >> 64
    return int(order[int((running <= target).sum())])
