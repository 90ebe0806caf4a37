"""Torch references of the sampling kernels: logit changes, argmax, sampling, log probabilities and rejection."""

import itertools

import torch

from models.ops.triton.logits import FREQUENCY, PRESENCE, REPETITION, Logprobs


def reference_adjust(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int
) -> None:
    """As the kernel's launcher: repeats of a token write the same value, except where they add up."""
    at = (rows, ids)
    if kind == REPETITION:
        seen = logits[at]
        logits[at] = torch.where(seen > 0, seen / values, seen * values)
    elif kind == PRESENCE:
        logits[at] = logits[at] - values
    else:
        logits.index_put_(at, -values if kind == FREQUENCY else values, accumulate=True)


def reference_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As the kernel's launcher."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def reference_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and peaks. # [N, V] -> [N] int64, [N] float32"""
    # A NaN counts as largest; `argmax` leaves open which of equal ones it takes.
    ordered = logits.nan_to_num(nan=torch.inf, posinf=torch.finfo(torch.float32).max)
    tokens = ordered.sort(dim=-1, descending=True, stable=True).indices[:, 0]
    return tokens, logits.gather(1, tokens[:, None])[:, 0]


# Sampling, one row at a time, in integers.

_ONE = 2.0**40


def reference_draw(
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


# Log probabilities and ranks.


def reference_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """As the kernel's launcher."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranks = 1 + ((logits > own) | ((logits == own) & (ids < token_ids[:, None]))).sum(-1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return Logprobs((own - normaliser)[:, 0], ranks, best, logits.gather(1, best) - normaliser)


# Verification of drafts, one row and one draft at a time.


def reference_keep_equal(sampled: torch.Tensor, drafts: torch.Tensor, first_drafts: torch.Tensor) -> list[list[int]]:
    """Each row's tokens."""
    kept = []
    firsts = first_drafts.tolist()
    for row, (first, past) in enumerate(itertools.pairwise(firsts)):
        tokens = sampled[first + row : past + row + 1].tolist()
        number = 0
        while number < past - first and tokens[number] == drafts[first + number]:
            number += 1
        kept.append(tokens[: number + 1])
    return kept


def reference_keep_likely(
    target: torch.Tensor,
    proposed: torch.Tensor,
    drafts: torch.Tensor,
    first_drafts: torch.Tensor,
    acceptance: list[list[float]],
    bits: list[list[int]],
) -> list[list[int]]:
    """Each row's tokens. By row and place, `acceptance` are numbers in [0, 1), `bits` such numbers times 2^64."""
    kept = []
    firsts = first_drafts.tolist()
    for row, (first, past) in enumerate(itertools.pairwise(firsts)):
        tokens: list[int] = []
        for nth, draft in enumerate(drafts[first:past].tolist()):
            p, q = float(target[first + row + nth, draft]), float(proposed[first + nth, draft])
            if acceptance[row][nth] * q >= p:
                break
            tokens.append(draft)
        ended = len(tokens)
        left = target[first + row + ended]
        if first + ended < past:
            left = (left - proposed[first + ended]).clamp(min=0.0)
        running = (left * _ONE).to(torch.int64).cumsum(0)
        total = int(running[-1])
        drawn = int((running <= (bits[row][ended] * total >> 64)).sum())
        kept.append([*tokens, drawn if total else int(drafts[first + ended])])
    return kept
