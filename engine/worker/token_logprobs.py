"""`token_logprobs`: what logits say of given tokens and of the likeliest ones. Used for sampled and prompt tokens."""

from collections.abc import Sequence

import numpy as np
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
    most = min(max(counts), logits.shape[-1])
    top_values, top_ids = likeliest(logits, most) if most else (logits[:, :0], chosen[:, :0])
    return [
        TokenLogprobs(token, logprob, likeliest_ids[:count], likeliest_logprobs[:count], rank)
        for count, token, logprob, likeliest_ids, likeliest_logprobs, rank in zip(
            counts,
            token_ids.tolist(),
            logprobs,
            top_ids.tolist(),
            (top_values - normaliser).tolist(),
            _ranks(logits, token_ids, values),
            strict=True,
        )
    ]


def _ranks(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> list[int]:
    """Each token's place in its row, from 1. On CPU NumPy counts ten times faster. # values [R, 1]"""
    if logits.device.type == "cpu":
        rows, own = logits.numpy(), values[:, 0].numpy()
        return [
            1 + int(np.count_nonzero(row[:token] >= value)) + int(np.count_nonzero(row[token + 1 :] > value))
            for row, token, value in zip(rows, token_ids.tolist(), own, strict=True)
        ]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    better = (logits > values) | ((logits == values) & (ids < token_ids[:, None]))
    ranks: list[int] = (1 + better.sum(-1)).tolist()
    return ranks
