"""Where the vocabulary is shared out over ranks: each row's likeliest token of all, with a few bytes a row moved."""

import numpy as np
import torch

from engine.worker.likeliest import argmax
from engine.worker.sampled_tokens import SampledTokens
from models.parallel import TensorParallel


def likeliest_of_ranks(peaks: torch.Tensor, token_ids: torch.Tensor, parallel: TensorParallel) -> SampledTokens:
    """The choice among the ranks' best tokens, on rank 0; nothing elsewhere. # [S] float32, [S] int64

    Of equal logits the lowest token wins, and a NaN before any number, as in one row of logits.
    """
    mine = torch.stack((peaks.double(), token_ids.double()), -1)  # [S, 2], exact for any id
    gathered = parallel.gather(mine)  # [S, 2 * size]
    if parallel.rank:
        return SampledTokens(np.zeros(0, dtype=np.int64), {}, [], {})
    pairs = gathered.view(len(mine), parallel.size, 2).cpu().numpy()
    best = pairs[:, :, 0].argmax(1)
    rows = np.arange(len(mine))
    broken = np.flatnonzero(~np.isfinite(pairs[rows, best, 0])).tolist()
    return SampledTokens(pairs[rows, best, 1].astype(np.int64), {}, broken, {})


def best_of_part(logits: torch.Tensor, first_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's best logit among a rank's tokens, and which that is. # [S, tokens] float32 -> 2 x [S]"""
    if logits.shape[1] == 0:
        return logits.new_full((len(logits),), -torch.inf), logits.new_zeros(len(logits), dtype=torch.int64)
    best = argmax(logits)
    return logits.gather(-1, best[:, None])[:, 0], best + first_token
