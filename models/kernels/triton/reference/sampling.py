"""What `models.kernels.triton.sampling` computes, in torch."""

import torch

from models.kernels.triton.sampling import FREQUENCY, PRESENCE, REPETITION


def adjust(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int) -> None:
    """As the kernel's launcher: repeats of a token write the same value, except where they add up."""
    at = (rows, ids)
    if kind == REPETITION:
        seen = logits[at]
        logits[at] = torch.where(seen > 0, seen / values, seen * values)
    elif kind == PRESENCE:
        logits[at] = logits[at] - values
    else:
        logits.index_put_(at, -values if kind == FREQUENCY else values, accumulate=True)


def mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As the kernel's launcher."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and peaks. # [N, V] -> [N] int64, [N] float32"""
    # A NaN counts as largest; `argmax` leaves open which of equal ones it takes.
    ordered = logits.nan_to_num(nan=torch.inf, posinf=torch.finfo(torch.float32).max)
    tokens = ordered.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    return tokens, logits.gather(1, tokens[:, None])[:, 0]
