"""Drafts are kept, and replaced, as the references keep and replace them."""

import itertools

import numpy as np
import pytest
import torch

from models.ops.counter_rng import acceptance_keys, request_key, uniform
from models.ops.triton import rejection
from tests.parity.triton_interpreter import DEVICE

NUM_DRAFTS = [3, 0, 1, 4, 2]
MOST = 4
FIRST_DRAFTS = torch.tensor([0, *np.cumsum(NUM_DRAFTS)], dtype=torch.int32)


def lists(found: tuple[torch.Tensor, torch.Tensor]) -> list[list[int]]:
    """Each row's tokens; the rest must be -1."""
    kept, num_kept = (each.tolist() for each in found)
    assert all(set(row[number:]) <= {-1} for row, number in zip(kept, num_kept, strict=True))
    return [row[:number] for row, number in zip(kept, num_kept, strict=True)]


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
    """Each row's tokens. By row and position, `acceptance` are numbers in [0, 1), `bits` such numbers times 2^64."""
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
        running = (left * 2.0**40).to(torch.int64).cumsum(0)
        total = int(running[-1])
        drawn = int((running <= (bits[row][ended] * total >> 64)).sum())
        kept.append([*tokens, drawn if total else int(drafts[first + ended])])
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_sampled_are_kept(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(2, (sum(NUM_DRAFTS),), generator=generator)
    sampled = torch.randint(2, (sum(NUM_DRAFTS) + len(NUM_DRAFTS),), generator=generator)
    found = rejection.keep_equal(sampled.to(DEVICE), drafts.to(DEVICE), FIRST_DRAFTS.to(DEVICE), MOST)
    assert lists(found) == reference_keep_equal(sampled, drafts, FIRST_DRAFTS)


def numbers(keys: np.ndarray, positions: list[int], count: int) -> list[list[float]]:
    """By row, those of its position and the ones after it."""
    return [
        uniform(np.full(count, key), position + np.arange(count)).tolist()
        for key, position in zip(keys, positions, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab_size", [5, 700])
def test_drafts_are_kept_by_chance_and_replaced_from_what_is_left(vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(NUM_DRAFTS)
    target = (torch.randn(total + len(NUM_DRAFTS), vocab_size, generator=generator) * 2).softmax(-1)
    proposed = (torch.randn(total, vocab_size, generator=generator) * 2).softmax(-1)
    proposed[0] = target[0]  # Kept whatever the number.
    drafts = proposed.multinomial(1, generator=generator)[:, 0]
    keys = np.array([request_key(seed * 10 + row) for row in range(len(NUM_DRAFTS))], np.uint64)
    positions = [17 * row for row in range(len(NUM_DRAFTS))]
    found = rejection.keep_likely(
        target.to(DEVICE),
        proposed.to(DEVICE),
        drafts.to(DEVICE),
        FIRST_DRAFTS.to(DEVICE),
        torch.from_numpy(keys.view(np.int64)).to(DEVICE),
        torch.tensor(positions, device=DEVICE),
        MOST,
    )
    expected = reference_keep_likely(
        target,
        proposed,
        drafts,
        FIRST_DRAFTS,
        numbers(acceptance_keys(keys), positions, MOST),
        [[int(number * 2.0**64) for number in row] for row in numbers(keys, positions, MOST + 1)],
    )
    assert lists(found) == expected
    assert len(expected[0]) > 1


def test_what_is_kept_follows_the_targets_distribution() -> None:
    rows, vocab_size = 200, 4
    target = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat(2 * rows, 1)
    proposed = torch.tensor([0.7, 0.1, 0.1, 0.1]).repeat(rows, 1)
    drafts = proposed.multinomial(1, generator=torch.Generator().manual_seed(0))[:, 0]
    keys = torch.from_numpy(np.array([request_key(seed) for seed in range(rows)], np.uint64).view(np.int64))
    kept, _ = rejection.keep_likely(
        target.to(DEVICE),
        proposed.to(DEVICE),
        drafts.to(DEVICE),
        torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        keys.to(DEVICE),
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        1,
    )
    shares = kept[:, 0].bincount(minlength=vocab_size).cpu() / rows
    torch.testing.assert_close(shares, target[0], atol=0.1, rtol=0)
