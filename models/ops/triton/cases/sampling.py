"""Torch references and the self-test case of sampling: changes of logits, argmax, draws, log probabilities, drafts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from models.ops.counter_rng import gumbel_noise, row_keys
from models.ops.self_test import FLOAT32, Case, Finding, Problems, exact_match, relative_error
from models.ops.triton.logits import (
    BIAS,
    FREQUENCY,
    MAX_TOP_LOGPROBS,
    PRESENCE,
    REPETITION,
    Logprobs,
    adjust,
    argmax,
    logprobs,
    mask,
)
from models.ops.triton.sampling import draw, pack_columns


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


def reference_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """As the kernel's launcher."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ranks = 1 + ((logits > own) | ((logits == own) & (ids < token_ids[:, None]))).sum(-1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return Logprobs((own - normaliser)[:, 0], ranks, best, logits.gather(1, best) - normaliser)


_EDGE = 1e-5
"""How much less than the largest a token's score may be, since logarithms are approximate."""
_FILTERS = (
    (0, 1.0, 0.0),
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (40, 0.9, 0.01),
    (0, 0.999, 0.0),
)
"""Top-k (0: all), top-p and min-p of each row."""


@dataclass(frozen=True, slots=True)
class SamplingCase(Case):
    """From logits of a vocabulary to tokens."""

    operator: ClassVar[str] = "sampling"
    vocab_size: int

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: each of the sampler's steps by itself."""
        yield from self._changes(problems)
        yield from self._argmax(problems)
        yield from self._sampled(problems)
        yield from self._logprobs(problems)

    def _logits(self, problems: Problems, rows: int) -> torch.Tensor:
        return problems.normal(rows, self.vocab_size, scale=3.0)

    def _changes(self, problems: Problems) -> Iterator[Finding]:
        logits, count = self._logits(problems, 3), min(self.vocab_size, 20)
        ids = problems.distinct_rows(self.vocab_size, 3, count).flatten()
        rows = torch.arange(3, device=problems.device).repeat_interleave(count)
        values = problems.near_one(len(ids))
        kinds = ("repetition", REPETITION), ("presence", PRESENCE)
        for what, kind in (*kinds, ("frequency", FREQUENCY), ("bias", BIAS)):
            found, expected = logits.clone(), logits.clone()
            adjust(found, rows, ids, values, kind)
            reference_adjust(expected, rows, ids, values, kind)
            bound = FLOAT32 * (1 + expected.abs())
            yield Finding(f"logits after a penalty of {what}", relative_error(found, expected, bound))
        words = problems.normal(2, -(-self.vocab_size // 32)).view(torch.int32)
        masked = torch.tensor([2, 0], device=problems.device)
        found, expected = logits.clone(), logits.clone()
        mask(found, masked, words)
        reference_mask(expected, masked, words)
        yield Finding("masked logits", exact_match(torch.equal(found, expected)))

    def _argmax(self, problems: Problems) -> Iterator[Finding]:
        logits = self._logits(problems, 4)
        # Equal logits, of which the first counts, and a NaN.
        logits[1, -1] = logits[1, self.vocab_size // 2] = 99.0
        logits[2, self.vocab_size // 3] = torch.nan
        found, (tokens, _) = argmax(logits), reference_argmax(logits)
        peaks = logits.gather(1, tokens[:, None])[:, 0]
        is_right = torch.equal(found.tokens, tokens) and torch.equal(found.peaks.nan_to_num(), peaks.nan_to_num())
        yield Finding(f"the argmax of {self.vocab_size} tokens", exact_match(is_right))

    def _sampled(self, problems: Problems) -> Iterator[Finding]:
        count = len(_FILTERS)
        logits = self._logits(problems, count)
        top_k, top_p, min_p = (np.array(column) for column in zip(*_FILTERS, strict=True))
        seeds = np.random.default_rng(int(problems.permutation(1 << 16)[0]))
        columns: dict[str, npt.NDArray[Any]] = {
            "rows": np.arange(count),
            "temperature": np.linspace(0.5, 1.5, count, dtype=np.float32),
            "top_k": np.where(top_k == 0, self.vocab_size, np.minimum(top_k, self.vocab_size)),
            "top_p": top_p,
            "min_p": min_p,
            "key": seeds.integers(1 << 63, size=count).astype(np.uint64),
            "position": np.arange(count),
            "filtered": np.array([filters != _FILTERS[0] for filters in _FILTERS]),
        }
        keys = torch.from_numpy(row_keys(columns["key"], columns["position"]).view(np.int64))
        noise = gumbel_noise(keys[:, None], torch.arange(self.vocab_size)[None]).numpy()
        for rows in (np.arange(count), np.flatnonzero(~columns["filtered"])):
            some = {name: column[rows] for name, column in columns.items()}
            found = argmax(logits)
            packed = torch.from_numpy(pack_columns(**some)).to(problems.device)
            draw(logits, found.peaks, found.tokens, packed, has_filtered=bool(some["filtered"].any()))
            tokens, _ = found.read()
            for row in rows.tolist():
                scaled = logits[row].double().cpu().numpy() / columns["temperature"][row]
                of_row = {name: column[row] for name, column in columns.items()}
                is_right = _may_be(int(tokens[row]), scaled, of_row, noise[row])
                yield Finding(
                    "a sampled token" + (" after filters" if of_row["filtered"] else ""), exact_match(is_right)
                )

    def _logprobs(self, problems: Problems) -> Iterator[Finding]:
        logits, count = self._logits(problems, 3), min(MAX_TOP_LOGPROBS, self.vocab_size)
        tokens = problems.distinct_rows(self.vocab_size, 3, 1)[:, 0]
        found, expected = logprobs(logits, tokens, count), reference_logprobs(logits, tokens, count)
        for one, other in zip(found, expected, strict=True):
            if one.is_floating_point():
                yield Finding("log probabilities", relative_error(one, other, FLOAT32 * (1 + other.abs())))
            else:
                yield Finding("ranks of log probabilities", exact_match(torch.equal(one, other)))


def _may_be(token: int, logits: npt.NDArray[np.float64], row: dict[str, Any], noise: npt.NDArray[np.float64]) -> bool:
    """Whether a token's score is the largest of those that the filters keep, but for approximations."""
    if not 0 <= token < len(logits):
        return False
    weights = np.exp(logits - logits.max())
    order = np.argsort(-logits, kind="stable")
    ordered, scores = weights[order], (logits + noise)[order]
    kept = len(ordered)
    if row["filtered"]:
        top_k = int(row["top_k"])
        running = ordered[:top_k].cumsum()
        kept = min(top_k, int((ordered >= row["min_p"]).sum()))
        if row["top_p"] < 1.0:
            kept = min(kept, 1 + int((running < row["top_p"] * running[-1]).sum()))
    rank = int(np.flatnonzero(order == token)[0])
    # Where the filters cut is as approximate.
    cuts = {max(1, kept - 1), kept, min(len(ordered), kept + 1)}
    return any(rank < cut and scores[rank] >= scores[:cut].max() - _EDGE for cut in cuts)


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """A vocabulary of 128256."""
    del device
    return (SamplingCase(128256),)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    del device
    return {"sampling": SamplingCase(700)}
