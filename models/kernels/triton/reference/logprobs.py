"""What `models.kernels.triton.logprobs` computes, in torch."""

import torch

from models.kernels.triton.logprobs import Logprobs


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """As the kernel's launcher."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranks = 1 + ((logits > own) | ((logits == own) & (ids < token_ids[:, None]))).sum(-1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return Logprobs((own - normaliser)[:, 0], ranks, best, logits.gather(1, best) - normaliser)
