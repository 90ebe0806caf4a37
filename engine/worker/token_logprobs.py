"""`token_logprobs`: what logits say of given tokens and of the likeliest ones. Used for sampled and prompt tokens."""

from collections.abc import Sequence

import torch

from engine.messages import TokenLogprobs
from engine.worker.likeliest import likeliest


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log probability and rank of each row's token, and the `counts` likeliest ones. # logits [R, V], token_ids [R]

    Of equally likely tokens the one with the lower id ranks first, as in the order of the likeliest.
    """
    chosen = token_ids[:, None]
    values = logits.gather(-1, chosen)  # [R, 1]
    normaliser = logits.logsumexp(-1, keepdim=True)
    logprobs = (values - normaliser)[:, 0].tolist()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    above = (logits > values).sum(-1) + ((logits == values) & (ids < chosen)).sum(-1)
    most = min(max(counts), logits.shape[-1])
    top_values, top_ids = likeliest(logits, most) if most else (logits[:, :0], chosen[:, :0])
    return [
        TokenLogprobs(token, logprob, likeliest_ids[:count], likeliest_logprobs[:count], 1 + better)
        for count, token, logprob, likeliest_ids, likeliest_logprobs, better in zip(
            counts,
            token_ids.tolist(),
            logprobs,
            top_ids.tolist(),
            (top_values - normaliser).tolist(),
            above.tolist(),
            strict=True,
        )
    ]
