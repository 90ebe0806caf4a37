"""The sampler's operations in torch: `TorchOps` on any device, and `CPUOps`, which also uses the CPU's operators."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.parameters import FREQUENCY, PRESENCE, REPETITION, Later, Proposals, RandomRows
from engine.sampling.top_k import argmax, index_of_rank, sorted_descending, stable_topk
from models.ops.counter_rng import ACCEPT, approximate_noise, gumbel_noise, row_keys, uniform
from models.ops.cpu import sampling as cpu_sampling
from models.ops.memory import upload

_SCORED = 16
"""Number of tokens of a row without filters that are scored in float64: those with the largest float32 scores."""
_WIDEST = 1024
"""Largest top-k for which only the top k tokens are sorted, rather than the whole vocabulary."""
_CPU_WIDTHS = (64, 1024)
"""Numbers of top tokens in which the cut of top-k, top-p and min-p is sought before the whole vocabulary is sorted."""
_MASKED_AT_ONCE = 1 << 18
"""The most logits that the CPU masks in one operation, instead of row by row."""

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
    """The operations in torch, for any device. They take logits [N, V] float32 and overwrite them."""

    logits_at_a_time = 1 << 24
    """The most logits that are sampled from at a time: their cumulative sums in float64 take 16 bytes each."""

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int
    ) -> None:
        """Apply one kind of penalty or bias to single logits. # 3 x [num_changes]

        `REPETITION` divides positive logits and multiplies others, and `PRESENCE` subtracts, once per token even if it
        is listed several times. `FREQUENCY` subtracts and `BIAS` adds for each entry.
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
        """Set the logits of tokens whose bit is not set to minus infinity. # [R] int64, [R, V / 32] int32"""
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
        logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)

    def argmax(self, logits: torch.Tensor) -> Candidates:
        """Each row's token with the largest logit, the first of equal ones; a NaN counts as largest."""
        found = Candidates.empty(len(logits), logits.device)
        found.tokens.copy_(argmax(logits))
        found.peaks.copy_(logits.gather(-1, found.tokens[:, None])[:, 0])
        return found

    def sampling_arrays(self, random: RandomRows, vocab_size: int, most: int = 1) -> Sequence[npt.NDArray[Any]]:
        """The arrays that `sample` needs on the device: here, six for each part of the rows.

        `most`: as in `Later`; `move_to_later` selects the noise of the true positions from that of all possible ones.
        """
        return [
            array
            for part in self._parts(random, vocab_size)
            for array in (
                part.rows,
                part.temperature,
                part.top_k,
                part.top_p,
                part.min_p,
                part.row_keys.view(np.int64)
                if most == 1
                else np.stack([row_keys(part.key, part.position + by).view(np.int64) for by in range(most)]),
            )
        ]

    def move_to_later(
        self, random: RandomRows, arrays: Sequence[torch.Tensor], later: Later
    ) -> tuple[RandomRows, Sequence[torch.Tensor]]:
        """Select, from `sampling_arrays`, the arrays that `sample` takes for rows at later positions."""
        chosen = list(arrays)
        if later.most > 1:
            for index in range(5, len(arrays), 6):
                by = later.by.clamp(min=0)[arrays[index - 5]]
                chosen[index] = arrays[index].gather(0, by[None])[0]
        return random, chosen

    def sample(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> None:
        """Replace the tokens of the random rows with a finite peak. `arrays`: those of `sampling_arrays`.

        The token is the argmax of scaled logits plus noise, among the tokens within top-k, top-p and min-p.
        """
        peaks, is_finite = candidates.peaks[:, None], candidates.peaks.isfinite()
        for index, part in enumerate(self._parts(random, logits.shape[-1])):
            rows, temperature, top_k, top_p, min_p, row_keys = arrays[6 * index : 6 * index + 6]
            # Subtracting the maximum first prevents overflow for any temperature.
            scaled = logits.index_select(0, rows).sub_(peaks[rows]).div_(temperature[:, None])
            # The token of a row that is not finite is not used.
            scaled.masked_fill_(~is_finite[rows, None], 0.0)
            if part.filtered[0]:
                tokens = self._sample_filtered(scaled, int(part.top_k.max()), top_k, top_p, min_p, row_keys)
            else:
                tokens = sample_unfiltered(scaled, row_keys)
            candidates.tokens.index_copy_(0, rows, tokens.where(is_finite[rows], candidates.tokens[rows]))

    def sample_with_probabilities(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """As `sample`; also returns the distributions from which it sampled. # -> [D, V] float32"""
        self.sample(logits, candidates, random, arrays)
        return self.probabilities(logits, candidates.peaks, random)

    def sample_verified(
        self,
        logits: torch.Tensor,
        candidates: Candidates,
        random: RandomRows,
        arrays: Sequence[torch.Tensor],
        proposals: Proposals,
    ) -> None:
        """`sample`, then `verify`. The tokens of a sequence's rows after a rejected draft may be any."""
        self.sample(logits, candidates, random, arrays)
        self.verify(logits, candidates, random, proposals)

    def probabilities(self, logits: torch.Tensor, peaks: torch.Tensor, random: RandomRows) -> torch.Tensor:
        """The distributions that `sample` samples from, for rows with a finite peak. # peaks [N] -> [D, V] float32"""
        device, vocab_size = logits.device, logits.shape[-1]
        found = logits.new_empty(len(random.rows), vocab_size)
        at_a_time = max(1, self.logits_at_a_time // vocab_size)
        for start in range(0, len(found), at_a_time):
            part = random.take(np.arange(start, min(len(found), start + at_a_time)))
            columns = (part.rows, part.temperature, part.top_k, part.top_p, part.min_p)
            rows, temperature, top_k, top_p, min_p = upload(columns, device)
            scaled = logits.index_select(0, rows).sub_(peaks[rows, None]).div_(temperature[:, None])
            scaled.masked_fill_(~peaks[rows, None].isfinite(), 0.0)
            if part.filtered.any():
                width = int(part.top_k.max())
                values, ids = (
                    stable_topk(scaled, width)
                    if width <= min(_WIDEST, vocab_size - 1)
                    else scaled.sort(dim=-1, descending=True, stable=True)
                )
                num_allowed = count_within_filters(values, top_k, top_p, min_p, scaled.exp().sum(-1).double())
                is_excluded = torch.arange(values.shape[-1], device=device) >= num_allowed[:, None]
                scaled = torch.full_like(scaled, -torch.inf).scatter_(
                    -1, ids, values.masked_fill(is_excluded, -torch.inf)
                )
            found[start : start + at_a_time] = scaled.softmax(-1)
        return found

    def verify(self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, proposals: Proposals) -> None:
        """Apply rejection sampling (Leviathan, Kalman and Matias, 2023) after `sample`, without a wait for the device.

        A draft with probability q becomes the row's token with probability min(1, p / q). Otherwise the token is
        sampled from max(p - q, 0), which is never the draft. A row whose peak is not finite is not changed.
        """
        part = random.take(np.searchsorted(random.rows, proposals.rows))
        at_a_time = max(1, self.logits_at_a_time // logits.shape[-1])
        for start in range(0, len(part.rows), at_a_time):
            chosen = np.arange(start, min(len(part.rows), start + at_a_time))
            some = part.take(chosen)
            columns = (some.rows, proposals.token_ids[chosen], uniform(some.of_stream(ACCEPT).row_keys))
            rows, drafts, numbers, row_keys = (
                torch.from_numpy(each).to(logits.device) for each in (*columns, some.row_keys.view(np.int64))
            )
            p = self.probabilities(logits, candidates.peaks, some)
            q = proposals.probabilities[start : start + at_a_time]
            of_drafts = drafts[:, None]
            is_accepted = numbers < (p.gather(-1, of_drafts).double() / q.gather(-1, of_drafts).double())[:, 0]
            sampled = candidates.tokens[rows]
            replaced = self._sample_rest(p, q, row_keys, sampled, is_accepted)
            tokens = drafts.where(is_accepted, replaced).where(candidates.peaks[rows].isfinite(), sampled)
            candidates.tokens.index_copy_(0, rows, tokens)

    def _sample_rest(
        self,
        p: torch.Tensor,
        q: torch.Tensor,
        row_keys: torch.Tensor,
        sampled: torch.Tensor,
        is_accepted: torch.Tensor,
    ) -> torch.Tensor:
        """Sample from max(p - q, 0) for each row; any token for rows that accept. # 2 x [R, V], 3 x [R] -> [R]"""
        rest = (p - q).clamp_(min=0.0)
        # If max(p - q, 0) is empty, p and q are equal up to rounding, and the row's own sample is used.
        return sample_unfiltered(rest.log(), row_keys).where(rest.sum(-1) > 0.0, sampled)

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
        """Split the rows into those without filters, with a small top-k, and with other filters, in limited groups."""
        at_a_time = max(1, self.logits_at_a_time // vocab_size)
        is_narrow = random.filtered & (random.top_k <= min(_WIDEST, vocab_size - 1))
        for chosen in (~random.filtered, is_narrow, random.filtered & ~is_narrow):
            indexes = np.flatnonzero(chosen)
            for start in range(0, len(indexes), at_a_time):
                yield random.take(indexes[start : start + at_a_time])

    def _sample_filtered(
        self,
        scaled: torch.Tensor,
        max_top_k: int,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        row_keys: torch.Tensor,
    ) -> torch.Tensor:
        """Sample among the tokens within top-k, top-p and min-p. # [R, V], 4 x [R] -> [R] int64"""
        total = scaled.exp().sum(-1).double()
        if max_top_k <= _WIDEST and max_top_k < scaled.shape[-1]:
            values, ids = stable_topk(scaled, max_top_k)
        else:
            # A stable sort leaves equal values in the order of their token ids.
            values, ids = scaled.sort(dim=-1, descending=True, stable=True)
        num_allowed = count_within_filters(values, top_k, top_p, min_p, total)
        ranks = best_rank(values, ids, num_allowed, row_keys)
        return ids.gather(-1, ranks[:, None])[:, 0]

    def _ranks(self, logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """# values [R, 1] -> [R] int64"""
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_better = (logits > values) | ((logits == values) & (ids < token_ids[:, None]))
        return 1 + is_better.sum(-1)


class CPUOps(TorchOps):
    """The operations on a CPU: by the compiled operators if available, and NumPy where it is faster than torch."""

    logits_at_a_time = 1 << 19
    """The most logits at a time: intermediate results of more would not fit a cache, and need new pages each time."""

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """See `TorchOps`."""
        vocab_size, masks = logits.shape[-1], words.numpy()
        if len(masks) * vocab_size <= _MASKED_AT_ONCE:
            is_excluded = np.unpackbits(~masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            logits[rows] = logits[rows].masked_fill_(torch.from_numpy(is_excluded.view(np.bool_)), -torch.inf)
            return
        # Reading a mask is much faster than writing a row of logits, so the smaller of both sets of tokens is written.
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

    def sampling_arrays(self, random: RandomRows, vocab_size: int, most: int = 1) -> Sequence[npt.NDArray[Any]]:
        """See `TorchOps`. Returns none, since `random` is on the host already."""
        return []

    def move_to_later(
        self, random: RandomRows, arrays: Sequence[torch.Tensor], later: Later
    ) -> tuple[RandomRows, Sequence[torch.Tensor]]:
        """See `TorchOps`."""
        return replace(random, position=random.position + later.by.numpy().clip(0)[random.rows]), arrays

    def sample(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> None:
        """See `TorchOps`."""
        if not cpu_sampling.chooses(logits):
            sent = [torch.from_numpy(array) for array in super().sampling_arrays(random, logits.shape[-1])]
            super().sample(logits, candidates, random, sent)
            return
        is_finite = np.isfinite(candidates.peaks.numpy())
        if not is_finite.all():
            random = random.take(np.flatnonzero(is_finite[random.rows]))
            if len(random.rows) == 0:
                return
        tokens = cpu_sampling.draw(logits, candidates.peaks, **_columns(random))
        candidates.tokens.numpy()[random.rows] = tokens

    def sample_with_probabilities(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """See `TorchOps`."""
        if not cpu_sampling.chooses(logits) or not np.isfinite(candidates.peaks.numpy()).all():
            return super().sample_with_probabilities(logits, candidates, random, arrays)
        found = torch.empty(len(random.rows), logits.shape[1])
        tokens = cpu_sampling.draw(logits, candidates.peaks, **_columns(random), probabilities=found)
        candidates.tokens.numpy()[random.rows] = tokens
        return found

    def sample_verified(
        self,
        logits: torch.Tensor,
        candidates: Candidates,
        random: RandomRows,
        arrays: Sequence[torch.Tensor],
        proposals: Proposals,
    ) -> None:
        """See `TorchOps`: in one call, in which nothing is computed after a rejected draft."""
        if not cpu_sampling.chooses(logits) or not np.isfinite(candidates.peaks.numpy()).all():
            super().sample_verified(logits, candidates, random, arrays, proposals)
            return
        at, given = np.searchsorted(random.rows, proposals.rows), proposals.probabilities.contiguous()
        drafts, addresses = np.full(len(random.rows), -1), np.zeros(len(random.rows), dtype=np.uint64)
        drafts[at], sequences = proposals.token_ids, np.full(len(random.rows), -1)
        sequences[at] = proposals.sequences
        stride = given.stride(0) * given.itemsize
        addresses[at] = np.arange(len(at), dtype=np.uint64) * np.uint64(stride) + np.uint64(given.data_ptr())
        # A row without a draft, after one that verifies a draft, is of the same sequence.
        is_followed = (drafts[1:] < 0) | (sequences[1:] == sequences[:-1])
        goes_on = (drafts[:-1] >= 0) & (np.diff(random.rows) == 1) & is_followed
        firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1, [len(random.rows)]))
        tokens = candidates.tokens.numpy()[random.rows]
        cpu_sampling.verify_drafts(
            logits,
            candidates.peaks,
            tokens,
            **_columns(random),
            firsts=firsts,
            drafts=drafts,
            probabilities=addresses,
            numbers=uniform(random.of_stream(ACCEPT).row_keys),
        )
        candidates.tokens.numpy()[random.rows] = tokens

    def _sample_filtered(
        self,
        scaled: torch.Tensor,
        max_top_k: int,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        row_keys: torch.Tensor,
    ) -> torch.Tensor:
        """See `TorchOps`. Each filter selects a prefix of the sorted tokens, so a few top tokens nearly always include
        the cut. Rows whose cut is further down are computed again with more tokens. The number does not change the
        result.
        """
        vocab_size = scaled.shape[-1]
        # Top-p is a share of the total weight of the tokens within top-k.
        total = scaled.exp().sum(-1).double()
        tokens = torch.zeros_like(top_k)
        pending = torch.arange(len(scaled))
        for width in (*(width for width in _CPU_WIDTHS if width < vocab_size), vocab_size):
            k, p, keys = top_k[pending], top_p[pending], row_keys[pending]
            rows = scaled[pending] if len(pending) < len(scaled) else scaled
            if width < vocab_size:
                values, ids = stable_topk(rows, width)
                num_allowed = count_within_filters(values, k, p, min_p[pending], total[pending])
                tokens[pending] = ids.gather(-1, best_rank(values, ids, num_allowed, keys)[:, None])[:, 0]
            else:
                values = sorted_descending(rows)
                num_allowed = count_within_filters(values, k, p, min_p[pending], total[pending])
                # The last token within the filters, by value and then by id.
                least, last = values.gather(-1, num_allowed[:, None] - 1), index_of_rank(rows, values, num_allowed - 1)
                is_allowed = (rows > least) | ((rows == least) & (torch.arange(vocab_size) <= last[:, None]))
                tokens[pending] = sample_unfiltered(rows.masked_fill(~is_allowed, -torch.inf), keys)
            is_settled = (k <= width) | ((k == vocab_size) & (num_allowed < width))
            pending = pending[~is_settled]
            if len(pending) == 0:
                break
        return tokens

    def _sample_rest(
        self,
        p: torch.Tensor,
        q: torch.Tensor,
        row_keys: torch.Tensor,
        sampled: torch.Tensor,
        is_accepted: torch.Tensor,
    ) -> torch.Tensor:
        """See `TorchOps`. Computes only the rows that do not accept, which are few."""
        at = (~is_accepted).nonzero()[:, 0]
        if not len(at):
            return sampled
        found = super()._sample_rest(p[at], q[at], row_keys[at], sampled[at], is_accepted[at])
        return sampled.index_copy(0, at, found)

    def _ranks(self, logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `TorchOps`. Uses NumPy, which counts ten times faster than torch."""
        rows, own = logits.numpy(), values[:, 0].numpy()
        ranks = [
            1 + int(np.count_nonzero(row[:token] >= value)) + int(np.count_nonzero(row[token + 1 :] > value))
            for row, token, value in zip(rows, token_ids.tolist(), own, strict=True)
        ]
        return torch.tensor(ranks)


def _columns(random: RandomRows) -> dict[str, Any]:
    """The arguments of `cpu_sampling.draw` that describe rows."""
    names = ("rows", "temperature", "top_k", "top_p", "min_p", "row_keys", "filtered")
    return {name: getattr(random, name) for name in names}


def sample_unfiltered(scaled: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
    """The token with the largest score of each row. # logits minus their maximum [R, V], [R] int64 -> [R] int64

    Float32 scores select a few candidates, and float64 scores decide among these.
    """
    scores = approximate_noise(row_keys, scaled.shape[-1]).add_(scaled)
    _, ids = stable_topk(scores, min(_SCORED, scaled.shape[-1]))
    exact = scaled.gather(-1, ids) + gumbel_noise(row_keys[:, None], ids)
    return ids.gather(-1, exact.argmax(-1, keepdim=True))[:, 0]


def count_within_filters(
    values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """How many of each row's values, in descending order, are within the filters. # [R, width], 4 x [R] -> [R]

    draw.c and filtered.c of `models.ops.cpu` and `models.ops.triton.sampling` implement the same rule. `total` is the
    weight of all values of the row, including those not in `values`.
    """
    width = values.shape[-1]
    weights = values.double().exp_()  # [R, width], 1 for the first
    cdf = weights.cumsum(-1)
    mass = torch.where(top_k <= width, cdf.gather(-1, top_k.clamp(max=width)[:, None] - 1)[:, 0], total)
    needed = torch.where(top_p < 1.0, top_p * mass, torch.inf)
    within_top_p = (1 + torch.searchsorted(cdf, needed[:, None])[:, 0]).clamp_(max=width)
    within_min_p = (weights >= min_p[:, None]).sum(-1)
    return torch.minimum(torch.minimum(top_k, within_top_p), within_min_p)


def best_rank(
    values: torch.Tensor, ids: torch.Tensor, num_allowed: torch.Tensor, row_keys: torch.Tensor
) -> torch.Tensor:
    """The index of the largest score among the first `num_allowed` values. # 2 x [R, width], 2 x [R] -> [R]"""
    scores = values + gumbel_noise(row_keys[:, None], ids)
    is_excluded = torch.arange(values.shape[-1], device=values.device) >= num_allowed[:, None]
    return scores.masked_fill_(is_excluded, -torch.inf).argmax(-1)
