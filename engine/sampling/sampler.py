"""`Sampler`: the next token of each row from its logits, and the log probabilities that rows asked for.

Called by the model runner with the rows that the input batch describes. What a row gets depends on its own logits,
parameters and random number only, never on its neighbours.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import TokenLogprobs
from engine.sampling.logprobs import token_logprobs
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.sampled_tokens import SampledTokens, exhausted
from engine.sampling.top_k import argmax, at_ranks, block_view, descending, likeliest
from engine.text.structured.matcher import MaskedRow, TokenMasks
from models.ops import triton
from models.ops.cpu import sampling as sampling_ops
from models.parallel.tensor_parallel import TensorParallel

_CDF_BLOCK = 256
"""Tokens whose probabilities are summed in float32 before the running sum in float64."""

_DRAWN_LOGITS = 1 << 22
"""Logits that are drawn from at a time."""

_MASKED_AT_ONCE = 1 << 18
"""Logits that are masked in one operation on CPU, instead of row by row."""

Send: TypeAlias = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]
"""Brings arrays to the device that the logits are on."""

_WIDTHS = (64, 1024)
"""Likeliest tokens looked at for the cut of top-k, top-p and min-p, before the whole vocabulary is sorted."""


class Sampler:
    """Chooses tokens: penalties, bias and masks, then argmax, or temperature, top-k, top-p, min-p and one draw."""

    def __init__(self, masks: TokenMasks | None = None) -> None:
        self._masks = masks or TokenMasks()

    def warm_up(self, vocab_size: int, device: torch.device) -> None:
        """Has the kernels compiled, where they run."""
        if triton.takes("sampling"):
            from engine.sampling.triton_sampler import warm_up

            warm_up(vocab_size, device)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """One token a row. `logits` are overwritten. # [N, V] float32"""
        if triton.runs(logits, operator="sampling"):
            from engine.sampling.triton_sampler import launch

            return launch(logits, rows, self._masks).read()
        asked = rows.num_logprobs or {}
        unmodified = logits[list(asked)] if asked else None
        adjust(logits, rows, partial(_send, logits.device))
        refused: dict[int, str] = {}
        if rows.masked is not None:
            # The device may still be busy with the model meanwhile.
            masks, refused = self._masks.fill(rows.masked, logits.shape[-1])
            _mask(logits, rows.masked, masks)
        tokens = argmax(logits)  # [N]
        peaks = logits.gather(-1, tokens[:, None])  # [N, 1]
        # A NaN counts as a row's maximum, so the maximum tells of every value that would spoil the row.
        finite = peaks[:, 0].isfinite().cpu().numpy()
        broken = np.flatnonzero(~finite).tolist()
        if broken:
            refused |= exhausted(broken, peaks[:, 0].cpu().numpy(), rows)
            logits[broken] = peaks[broken] = 0.0
            broken = [row for row in broken if row not in refused]
        if rows.random is not None:
            _draw(logits, peaks, tokens, rows.random)
        token_ids: npt.NDArray[np.int64] = tokens.cpu().numpy()
        logprobs = {} if unmodified is None else _logprobs(unmodified, token_ids, asked)
        for row in (*broken, *refused):
            logprobs.pop(row, None)
        return SampledTokens(token_ids, logprobs, broken, refused)


def adjust(logits: torch.Tensor, rows: SamplingRows, send: Send) -> None:
    """Penalties and biases, in place. Repeats of a token write the same value, except where they add up."""
    if rows.repetition is not None:
        index, penalty = _index_and_values(rows.repetition, send)
        seen = logits[index]
        logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if rows.presence is not None:
        index, penalty = _index_and_values(rows.presence, send)
        logits[index] = logits[index] - penalty
    if rows.frequency is not None:
        index, penalty = _index_and_values(rows.frequency, send)
        logits.index_put_(index, -penalty, accumulate=True)
    if rows.bias is not None:
        index, bias = _index_and_values(rows.bias, send)
        logits.index_put_(index, bias, accumulate=True)


def _mask(logits: torch.Tensor, masked: list[MaskedRow], masks: npt.NDArray[np.int32]) -> None:
    """Minus infinity for what a row's mask leaves out, in place. # logits [N, V], masks [len(masked), V / 32]"""
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu" and masks.shape[0] * vocab_size <= _MASKED_AT_ONCE:
        refused = np.unpackbits(~masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        rows = torch.tensor([each.row for each in masked])
        logits[rows] = logits[rows].masked_fill_(torch.from_numpy(refused), -torch.inf)
        return
    if logits.device.type == "cpu":
        # Of a wide row, a mask is read much faster than the logits: the smaller side of it decides what is written.
        table = logits.numpy()
        for row, mask in zip((table[each.row] for each in masked), masks, strict=True):
            allowed = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
            kept = np.flatnonzero(allowed)
            if 2 * len(kept) > vocab_size:
                row[np.flatnonzero(~allowed)] = -np.inf
            else:
                values = row[kept]
                row.fill(-np.inf)
                row[kept] = values
        return
    rows, words = _send(logits.device, [np.array([each.row for each in masked]), masks])
    mask_rows(logits, rows, words)


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Minus infinity for what the words' bits leave out, in place. # [N, V], [R] int64, [R, V / 32] int32"""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed_ids = (bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill(~allowed_ids, -torch.inf)


def _send(device: torch.device, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]


def _index_and_values(changes: Adjustments, send: Send) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, ids, values = send([changes.rows, changes.token_ids, changes.values])
    return (rows, ids), values


def _draw(logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, random: RandomRows) -> None:
    """Replace the random rows' `tokens` by drawn ones. # logits [N, V], peaks [N, 1], tokens [N]

    By the compiled operators, or by torch, which takes some rows at a time: a float64 running sum over every row's
    vocabulary would not fit a cache, or even memory. They agree but for numbers at the edge of a token's share, where
    float32 sums may tip to its neighbour.
    """
    if sampling_ops.chooses(logits):
        drawn = sampling_ops.draw(
            logits,
            peaks,
            rows=random.rows,
            temperature=random.temperature,
            top_k=random.top_k,
            top_p=random.top_p,
            min_p=random.min_p,
            uniform=random.uniform,
            filtered=random.filtered,
        )
        tokens[torch.from_numpy(random.rows)] = torch.from_numpy(drawn)
        return
    piece = max(1, _DRAWN_LOGITS // logits.shape[-1])
    for filtered in (False, True):
        chosen = np.flatnonzero(random.filtered == filtered)
        for start in range(0, len(chosen), piece):
            part = random.take(chosen[start : start + piece])
            rows = torch.from_numpy(part.rows).to(logits.device)
            temperature = torch.from_numpy(part.temperature).to(logits.device)
            # Less the maximum first: nothing overflows, however small the temperature.
            scaled = logits.index_select(0, rows).sub_(peaks[rows]).div_(temperature[:, None])
            if filtered:
                tokens[rows] = _draw_filtered(scaled, part)
            else:
                tokens[rows] = draw_unfiltered(scaled, torch.from_numpy(part.uniform).to(logits.device))


def draw_unfiltered(scaled: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function in the order of token ids: find the block, then the token in it.

    # logits less their maximum [R, V], [R] float64 -> [R] int64
    """
    vocab_size = scaled.shape[-1]
    probabilities = scaled.softmax(-1)
    blocks, rest = block_view(probabilities, _CDF_BLOCK)
    sums = torch.cat((blocks.sum(-1), rest.sum(-1, keepdim=True)), -1)
    block, remainder = _invert(sums.double(), uniform)
    ids = block[:, None] * _CDF_BLOCK + torch.arange(_CDF_BLOCK, device=scaled.device)  # [R, block]
    weights = probabilities.gather(-1, ids.clamp(max=vocab_size - 1)).double()
    offset, _ = _invert(weights.masked_fill_(ids >= vocab_size, 0.0), remainder)
    return block * _CDF_BLOCK + offset


def _draw_filtered(scaled: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Draw from the tokens that the filters leave, in descending order, equal ones by id. # [R, V]

    Each filter keeps a prefix of that order, so few of the likeliest tokens nearly always tell where the cut is; rows
    of which they do not are looked at again, wider. What is drawn does not depend on the width.
    """
    vocab_size = scaled.shape[-1]
    top_k, top_p, min_p, uniform = (
        torch.from_numpy(column).to(scaled.device)
        for column in (random.top_k, random.top_p, random.min_p, random.uniform)
    )
    # Top-p is a share of what top-k leaves: of the whole distribution where it leaves everything.
    total = scaled.exp().sum(-1).double()
    tokens = torch.zeros_like(top_k)
    pending = torch.arange(len(scaled), device=scaled.device)
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        k, p = top_k[pending], top_p[pending]
        looked_at = scaled[pending] if len(pending) < len(scaled) else scaled
        values, ids = likeliest(looked_at, width) if width < vocab_size else (descending(looked_at), None)
        choice, kept = draw_ranked(values, k, p, min_p[pending], uniform[pending], total[pending])
        settled = (k <= width) | ((k == vocab_size) & (kept < width))
        tokens[pending] = at_ranks(looked_at, values, choice) if ids is None else ids.gather(-1, choice[:, None])[:, 0]
        pending = pending[~settled]
        if len(pending) == 0:
            break
    return tokens


def draw_ranked(
    values: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among each row's largest values, in descending order: the rank, and how many the filters leave.

    `total` is the weight of all the row's values, those not here included. # [R, width], 5 x [R] -> 2 x [R] int64
    """
    width = values.shape[-1]
    weights = values.double().exp_()  # [R, width], 1 for the likeliest
    cdf = weights.cumsum(-1)
    mass = torch.where(top_k <= width, cdf.gather(-1, top_k.clamp(max=width)[:, None] - 1)[:, 0], total)
    needed = torch.where(top_p < 1.0, top_p * mass, torch.inf)
    kept_by_p = (1 + torch.searchsorted(cdf, needed[:, None])[:, 0]).clamp_(max=width)
    kept_by_min_p = (weights >= min_p[:, None]).sum(-1)
    kept = torch.minimum(torch.minimum(top_k, kept_by_p), kept_by_min_p)
    ranks = torch.arange(width, device=values.device)
    choice, _ = _invert(weights.masked_fill_(ranks >= kept[:, None], 0.0), uniform)
    return choice, kept


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of `weights` [R, n] passes `uniform` [R] of its total, and how far into that weight.

    The second is uniform again, in [0, 1]. A weight of zero is never chosen.
    """
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:].contiguous()
    target = uniform[:, None] * total
    last = torch.searchsorted(cdf, total)  # [R, 1], the last weight that is not zero
    index = torch.searchsorted(cdf, target, right=True).minimum(last)
    weight = weights.gather(-1, index)
    below = cdf.gather(-1, index) - weight
    return index[:, 0], ((target - below) / weight).clamp_(0.0, 1.0)[:, 0]


def _logprobs(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int64], asked: dict[int, int]
) -> dict[int, TokenLogprobs]:
    """Of the chosen token and the likeliest ones, for the rows that asked. # logits [len(asked), V], token_ids [N]"""
    chosen = torch.from_numpy(token_ids[list(asked)]).to(logits.device)
    return dict(zip(asked, token_logprobs(logits, chosen, list(asked.values())), strict=True))


# [rank_logits] Where the vocabulary is shared out over ranks: each row's likeliest token of all, with a few bytes a
# row moved.


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
