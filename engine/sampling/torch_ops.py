"""The sampler's operations as torch's: `TorchOps` on any device, and `CPUOps`, which uses the CPU's operators too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.parameters import FREQUENCY, PRESENCE, REPETITION, RandomRows
from engine.sampling.top_k import argmax, block_view, index_of_rank, sorted_descending, stable_topk
from models.ops.cpu import sampling as cpu_sampling

_CDF_BLOCK = 256
"""Tokens whose probabilities are summed in float32 before the running sum in float64."""
_WIDEST = 1024
"""Largest top-k for which only that many tokens are ordered, and not the whole vocabulary."""
_CPU_WIDTHS = (64, 1024)
"""Numbers of top tokens that are tried for the cut of top-k, top-p and min-p before the whole vocabulary is sorted."""
_MASKED_AT_ONCE = 1 << 18
"""Logits that the CPU masks in one operation, instead of row by row."""

LogprobColumns: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Columns of R rows: the token's log probability and rank, then ids and log probabilities of the top tokens.

# [R] float32, [R] int64, [R, count] int64, [R, count] float32
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A token and the largest logit of each of N rows, as views of one buffer that is read in one copy."""

    words: torch.Tensor  # [2, N or more] int64: the tokens, and the bits of the peaks, two to a word
    tokens: torch.Tensor  # [N] int64
    peaks: torch.Tensor  # [N] float32

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Candidates":
        """Memory for `num_rows` rows."""
        words = torch.empty(2, num_rows, dtype=torch.int64, device=device)
        return cls(words, words[0], words[1].view(torch.float32)[:num_rows])


class TorchOps:
    """By torch, on any device. All operations are on logits [N, V] float32, which they overwrite."""

    logits_at_a_time = 1 << 24
    """Logits that are drawn from at a time: their running sums in float64 take sixteen bytes each."""

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int
    ) -> None:
        """Apply a penalty or a bias to single logits, each `kind` by itself. # 3 x [num_changes]

        `REPETITION` divides positive logits and multiplies others, `PRESENCE` subtracts: once a token, however often
        it is named. `FREQUENCY` subtracts and `BIAS` adds for each entry.
        """
        # Repeats of a token write the same value, except where they add up.
        index = (rows, ids)
        if kind == REPETITION:
            seen = logits[index]
            logits[index] = torch.where(seen > 0, seen / values, seen * values)
        elif kind == PRESENCE:
            logits[index] = logits[index] - values
        else:
            logits.index_put_(index, -values if kind == FREQUENCY else values, accumulate=True)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Minus infinity for tokens whose bit is not set. # [R] int64, [R, V / 32] int32"""
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
        logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)

    def argmax(self, logits: torch.Tensor) -> Candidates:
        """Each row's token with the largest logit, the first of equal ones; a NaN counts as largest."""
        found = Candidates.empty(len(logits), logits.device)
        found.tokens.copy_(argmax(logits))
        found.peaks.copy_(logits.gather(-1, found.tokens[:, None])[:, 0])
        return found

    def draw_arrays(self, random: RandomRows, vocab_size: int) -> Sequence[npt.NDArray[Any]]:
        """What `draw` needs on the device: here, six arrays a part of the rows."""
        return [
            array
            for part in self._parts(random, vocab_size)
            for array in (part.rows, part.temperature, part.top_k, part.top_p, part.min_p, part.uniform)
        ]

    def draw(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> None:
        """Replace the tokens of the random rows, except of those whose peak is not finite. # arrays: `draw_arrays`'

        A row's uniform number selects the token whose share of probability it lies in. Shares follow each other by
        token id; in rows with top-k, top-p or min-p, which keep a prefix of that order, by descending probability.
        """
        peaks, is_finite = candidates.peaks[:, None], candidates.peaks.isfinite()
        for index, part in enumerate(self._parts(random, logits.shape[-1])):
            rows, temperature, top_k, top_p, min_p, uniform = arrays[6 * index : 6 * index + 6]
            # The maximum is subtracted first: nothing overflows, however small the temperature.
            scaled = logits.index_select(0, rows).sub_(peaks[rows]).div_(temperature[:, None])
            # A row that is not finite would lead the search for a token out of the vocabulary.
            scaled.masked_fill_(~is_finite[rows, None], 0.0)
            if part.filtered[0]:
                tokens = self._draw_filtered(scaled, int(part.top_k.max()), top_k, top_p, min_p, uniform)
            else:
                tokens = draw_unfiltered(scaled, uniform)
            candidates.tokens.index_copy_(0, rows, tokens.where(is_finite[rows], candidates.tokens[rows]))

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobColumns:
        """Log probabilities and ranks of given tokens, and the top `count` tokens. # [R, V], [R] int64

        Ranks begin at 1. Of equal logits the token with the lower id ranks first.
        """
        chosen = token_ids[:, None]
        values = logits.gather(-1, chosen)  # [R, 1]
        normaliser = logits.logsumexp(-1, keepdim=True)
        top_values, top_ids = stable_topk(logits, count) if count else (logits[:, :0], chosen[:, :0])
        return (values - normaliser)[:, 0], self._ranks(logits, token_ids, values), top_ids, top_values - normaliser

    def _parts(self, random: RandomRows, vocab_size: int) -> Iterator[RandomRows]:
        """Rows without filters, with a small top-k, and with others, of each a limited number at a time."""
        at_a_time = max(1, self.logits_at_a_time // vocab_size)
        is_narrow = random.filtered & (random.top_k <= min(_WIDEST, vocab_size - 1))
        for chosen in (~random.filtered, is_narrow, random.filtered & ~is_narrow):
            indexes = np.flatnonzero(chosen)
            for start in range(0, len(indexes), at_a_time):
                yield random.take(indexes[start : start + at_a_time])

    def _draw_filtered(
        self,
        scaled: torch.Tensor,
        max_top_k: int,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """Draw from what top-k, top-p and min-p leave. # [R, V], 4 x [R] -> [R] int64"""
        total = scaled.exp().sum(-1).double()
        if max_top_k <= _WIDEST and max_top_k < scaled.shape[-1]:
            values, ids = stable_topk(scaled, max_top_k)
        else:
            # Stable: equal values come in the order of their tokens.
            values, ids = scaled.sort(dim=-1, descending=True, stable=True)
        ranks, _ = draw_ranked(values, top_k, top_p, min_p, uniform, total)
        return ids.gather(-1, ranks[:, None])[:, 0]

    def _ranks(self, logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """# values [R, 1] -> [R] int64"""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_better = (logits > values) | ((logits == values) & (ids < token_ids[:, None]))
        return 1 + is_better.sum(-1)


class CPUOps(TorchOps):
    """For the CPU, where nothing is pending: the compiled operators where they run, NumPy where it beats torch."""

    logits_at_a_time = 1 << 22
    """Running sums in float64 over more rows would not fit a cache."""

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """See `TorchOps`."""
        vocab_size, masks = logits.shape[-1], words.numpy()
        if len(masks) * vocab_size <= _MASKED_AT_ONCE:
            is_excluded = np.unpackbits(~masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            logits[rows] = logits[rows].masked_fill_(torch.from_numpy(is_excluded.view(np.bool_)), -torch.inf)
            return
        # A mask is read much faster than a wide row of logits: its smaller side decides what is written.
        table = logits.numpy()
        for row, mask in zip((table[row] for row in rows.tolist()), masks, strict=True):
            is_allowed = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
            allowed = np.flatnonzero(is_allowed)
            if 2 * len(allowed) > vocab_size:
                row[np.flatnonzero(~is_allowed)] = -np.inf
            else:
                values = row[allowed]
                row.fill(-np.inf)
                row[allowed] = values

    def draw_arrays(self, random: RandomRows, vocab_size: int) -> Sequence[npt.NDArray[Any]]:
        """See `TorchOps`: none, as `random` is where it is needed."""
        return []

    def draw(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> None:
        """See `TorchOps`."""
        if not cpu_sampling.chooses(logits):
            sent = [torch.from_numpy(array) for array in super().draw_arrays(random, logits.shape[-1])]
            super().draw(logits, candidates, random, sent)
            return
        is_finite = np.isfinite(candidates.peaks.numpy())
        if not is_finite.all():
            random = random.take(np.flatnonzero(is_finite[random.rows]))
            if len(random.rows) == 0:
                return
        tokens = cpu_sampling.draw(
            logits,
            candidates.peaks,
            rows=random.rows,
            temperature=random.temperature,
            top_k=random.top_k,
            top_p=random.top_p,
            min_p=random.min_p,
            uniform=random.uniform,
            filtered=random.filtered,
        )
        candidates.tokens.numpy()[random.rows] = tokens

    def _draw_filtered(
        self,
        scaled: torch.Tensor,
        max_top_k: int,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """See `TorchOps`. Each filter keeps a prefix of the order, so few of the top tokens nearly always show where
        the cut is; rows of which they do not are looked at again, wider. The width does not change the token.
        """
        vocab_size = scaled.shape[-1]
        # Top-p is a share of what top-k leaves: of the whole distribution where it leaves everything.
        total = scaled.exp().sum(-1).double()
        tokens = torch.zeros_like(top_k)
        pending = torch.arange(len(scaled))
        for width in (*(width for width in _CPU_WIDTHS if width < vocab_size), vocab_size):
            k, p = top_k[pending], top_p[pending]
            rows = scaled[pending] if len(pending) < len(scaled) else scaled
            values, ids = stable_topk(rows, width) if width < vocab_size else (sorted_descending(rows), None)
            ranks, num_kept = draw_ranked(values, k, p, min_p[pending], uniform[pending], total[pending])
            is_settled = (k <= width) | ((k == vocab_size) & (num_kept < width))
            tokens[pending] = (
                index_of_rank(rows, values, ranks) if ids is None else ids.gather(-1, ranks[:, None])[:, 0]
            )
            pending = pending[~is_settled]
            if len(pending) == 0:
                break
        return tokens

    def _ranks(self, logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `TorchOps`. NumPy counts ten times faster."""
        rows, own = logits.numpy(), values[:, 0].numpy()
        ranks = [
            1 + int(np.count_nonzero(row[:token] >= value)) + int(np.count_nonzero(row[token + 1 :] > value))
            for row, token, value in zip(rows, token_ids.tolist(), own, strict=True)
        ]
        return torch.tensor(ranks)


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


def draw_ranked(
    values: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among each row's largest values, in descending order: the rank, and how many tokens the filters leave.

    The same rule is in draw.c and filtered.c of `models.ops.cpu`, and in `models.ops.triton.sampling`.

    `total` is the weight of all the row's values, those not in `values` included. # [R, width], 5 x [R] -> 2 x [R]
    """
    width = values.shape[-1]
    weights = values.double().exp_()  # [R, width], 1 for the first
    cdf = weights.cumsum(-1)
    mass = torch.where(top_k <= width, cdf.gather(-1, top_k.clamp(max=width)[:, None] - 1)[:, 0], total)
    needed = torch.where(top_p < 1.0, top_p * mass, torch.inf)
    kept_by_p = (1 + torch.searchsorted(cdf, needed[:, None])[:, 0]).clamp_(max=width)
    kept_by_min_p = (weights >= min_p[:, None]).sum(-1)
    num_kept = torch.minimum(torch.minimum(top_k, kept_by_p), kept_by_min_p)
    ranks = torch.arange(width, device=values.device)
    choice, _ = _invert(weights.masked_fill_(ranks >= num_kept[:, None], 0.0), uniform)
    return choice, num_kept


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
