"""The sampler's kernels against torch: run at the start, as the checks of `models.ops.triton.checks`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.counter_rng import uniform
from engine.sampling.parameters import RandomRows
from engine.sampling.triton_ops import columns_of
from models.ops.self_test import FLOAT32, Finding, Numbers, excess, unless
from models.ops.triton import logits as sampling
from models.ops.triton import sampling as draw
from models.ops.triton.cases import sampling as logprobs_reference
from models.ops.triton.cases import sampling as reference
from models.ops.triton.logits import MAX_LIKELIEST, logprobs

_EDGE = 1e-5
"""Of all probability: how far behind a token's share its number may lie, since exponentials are approximate."""
_FILTERS = (
    (0, 1.0, 0.0),
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (40, 0.9, 0.01),
    (0, 0.999, 0.0),
)
"""Top-k, 0 for all, top-p and min-p of each row."""


class SamplingForm(NamedTuple):
    """From logits of a vocabulary to tokens."""

    vocab_size: int

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """Each of the sampler's steps by itself."""
        yield from self._changes(numbers)
        yield from self._likeliest(numbers)
        yield from self._drawn(numbers)
        yield from self._logprobs(numbers)

    def _logits(self, numbers: Numbers, rows: int) -> torch.Tensor:
        return numbers.normal(rows, self.vocab_size, scale=3.0)

    def _changes(self, numbers: Numbers) -> Iterator[Finding]:
        logits, count = self._logits(numbers, 3), min(self.vocab_size, 20)
        ids = numbers.rows_of_different(self.vocab_size, 3, count).flatten()
        rows = torch.arange(3, device=numbers.device).repeat_interleave(count)
        values = numbers.near_one(len(ids))
        kinds = ("repetition", sampling.REPETITION), ("presence", sampling.PRESENCE)
        for what, kind in (*kinds, ("frequency", sampling.FREQUENCY), ("bias", sampling.BIAS)):
            found, expected = logits.clone(), logits.clone()
            sampling.adjust(found, rows, ids, values, kind)
            reference.reference_adjust(expected, rows, ids, values, kind)
            bound = FLOAT32 * (1 + expected.abs())
            yield Finding(f"logits after a penalty of {what}", excess(found, expected, bound))
        words = numbers.normal(2, -(-self.vocab_size // 32)).view(torch.int32)
        masked = torch.tensor([2, 0], device=numbers.device)
        found, expected = logits.clone(), logits.clone()
        sampling.mask(found, masked, words)
        reference.reference_mask(expected, masked, words)
        yield Finding("masked logits", unless(torch.equal(found, expected)))

    def _likeliest(self, numbers: Numbers) -> Iterator[Finding]:
        logits = self._logits(numbers, 4)
        # Equal ones, of which the first counts, and what is no number.
        logits[1, -1] = logits[1, self.vocab_size // 2] = 99.0
        logits[2, self.vocab_size // 3] = torch.nan
        found, (tokens, _) = sampling.argmax(logits), reference.reference_argmax(logits)
        peaks = logits.gather(1, tokens[:, None])[:, 0]
        is_right = torch.equal(found.tokens, tokens) and torch.equal(found.peaks.nan_to_num(), peaks.nan_to_num())
        yield Finding(f"the likeliest of {self.vocab_size} tokens", unless(is_right))

    def _drawn(self, numbers: Numbers) -> Iterator[Finding]:
        count = len(_FILTERS)
        logits = self._logits(numbers, count)
        top_k, top_p, min_p = (np.array(column) for column in zip(*_FILTERS, strict=True))
        random = RandomRows(
            rows=np.arange(count),
            temperature=np.linspace(0.5, 1.5, count, dtype=np.float32),
            top_k=np.where(top_k == 0, self.vocab_size, np.minimum(top_k, self.vocab_size)),
            top_p=top_p,
            min_p=min_p,
            key=np.random.default_rng(int(numbers.order(1 << 16)[0])).integers(1 << 63, size=count).astype(np.uint64),
            position=np.arange(count),
            filtered=np.array([filters != _FILTERS[0] for filters in _FILTERS]),
        )
        share = uniform(random.key, random.position)
        for rows in (np.arange(count), np.flatnonzero(~random.filtered)):
            some = random.take(rows)
            likeliest = sampling.argmax(logits)
            columns = torch.from_numpy(columns_of(some)).to(numbers.device)
            filtered = bool(some.filtered.any())
            draw.draw(logits, likeliest.peaks, likeliest.tokens, columns, has_filtered=filtered)
            drawn, _ = likeliest.read()
            for row in rows.tolist():
                of_row = logits[row].double().cpu().numpy() / random.temperature[row]
                is_right = _may_be(int(drawn[row]), of_row, random, row, float(share[row]))
                yield Finding("a token drawn" + (" behind filters" if random.filtered[row] else ""), unless(is_right))

    def _logprobs(self, numbers: Numbers) -> Iterator[Finding]:
        logits, count = self._logits(numbers, 3), min(MAX_LIKELIEST, self.vocab_size)
        tokens = numbers.rows_of_different(self.vocab_size, 3, 1)[:, 0]
        found, expected = logprobs(logits, tokens, count), logprobs_reference.reference_logprobs(logits, tokens, count)
        for one, other in zip(found, expected, strict=True):
            if one.is_floating_point():
                yield Finding("log probabilities", excess(one, other, FLOAT32 * (1 + other.abs())))
            else:
                yield Finding("ranks of log probabilities", unless(torch.equal(one, other)))


def _may_be(token: int, logits: npt.NDArray[np.float64], random: RandomRows, row: int, share: float) -> bool:
    """Whether a row's number falls into a token's share, or so near it that exponentials decide."""
    if not 0 <= token < len(logits):
        return False
    weights = np.exp(logits - logits.max())
    order = np.argsort(-logits, kind="stable") if random.filtered[row] else np.arange(len(logits))
    ordered = weights[order]
    kept = len(ordered)
    if random.filtered[row]:
        top_k = int(random.top_k[row])
        running = ordered[:top_k].cumsum()
        kept = min(top_k, int((ordered >= random.min_p[row]).sum()))
        if random.top_p[row] < 1.0:
            kept = min(kept, 1 + int((running < random.top_p[row] * running[-1]).sum()))
    place = int(np.flatnonzero(order == token)[0])
    # Where the filters cut is as approximate.
    for cut in {max(1, kept - 1), kept, min(len(ordered), kept + 1)}:
        running = ordered[:cut].cumsum() / ordered[:cut].sum()
        if place < cut and (running[place - 1] if place else 0.0) - _EDGE <= share <= running[place] + _EDGE:
            return True
    return False
