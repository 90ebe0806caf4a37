"""What `models.kernels.triton.rejection` computes, in torch: a row and a draft at a time."""

import itertools

import torch

_ONE = 2.0**40


def keep_equal(sampled: torch.Tensor, drafts: torch.Tensor, first_drafts: torch.Tensor) -> list[list[int]]:
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


def keep_likely(
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
