"""`Sampler`: samples the next token of each row from its logits, and computes requested log probabilities.

`launch` never waits for the device: it enqueues penalties and biases, masks, the argmax, filters, the argmax with
noise and log probabilities. `LaunchedTokens.read` returns the tokens when the device has computed them. The result of
a row depends only on its own logits, parameters and noise, never on other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import TokenLogprobs
from engine.sampling.filters import mask_excluded
from engine.sampling.logprobs import pack_logprobs, unpack_logprobs
from engine.sampling.ops import ops_for
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.torch_ops import Candidates
from engine.text.structured.matcher import MaskedRow, TokenMasks, packed
from models.ops import triton
from models.ops.memory import Send, upload

_NO_MASKS = np.zeros((0, 0), dtype=np.int32)
_NO_ROWS = SamplingRows()
"""Parameters of tokens that were chosen without a sampler."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token for each of N positions, one a row unless it verifies drafts; except those `non_finite` or `refused`."""

    token_ids: npt.NDArray[np.int64]  # [N]
    logprobs: dict[int, TokenLogprobs]
    """Log probabilities by row, for the rows that asked for them."""
    non_finite: list[int]
    """Rows whose logits have no finite maximum."""
    refused: dict[int, str]
    """Sentence for each row whose request excludes every token."""


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """The tokens of N rows on the device, valid there once the work enqueued so far has run."""

    rows: SamplingRows
    on_device: Candidates | None
    logprobs: torch.Tensor | None = None
    """Output of `pack_logprobs`, in the order of `rows.num_logprobs`; None if no row asked for them."""
    refused: dict[int, str] = field(default_factory=dict)
    on_host: npt.NDArray[np.int64] | None = None
    """The `words` of `Candidates` instead of `on_device`, for tokens that were chosen on the host: in short steps on a
    CPU, creating a few tensors would take a measurable share of the time. # [2, N]"""

    @classmethod
    def of_host(cls, token_ids: npt.NDArray[np.int64], peaks: npt.NDArray[np.floating[Any]]) -> "LaunchedTokens":
        """Create it from tokens that were chosen on the host, and their logits. # 2 x [N]"""
        words = np.empty((2, len(token_ids)), dtype=np.int64)
        words[0] = token_ids
        words[1].view(np.float32)[: len(peaks)] = peaks
        return cls(_NO_ROWS, None, on_host=words)

    @property
    def candidates(self) -> Candidates:
        """Return the tokens and their logits as tensors."""
        if self.on_device is not None:
            return self.on_device
        assert self.on_host is not None
        if not self.on_host.shape[1]:
            # torch refuses to view NumPy's strides of no columns as another type.
            return Candidates.empty(0, torch.device("cpu"))
        words = torch.from_numpy(self.on_host)
        return Candidates(words, words[0], words[1].view(torch.float32)[: words.shape[1]])

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens, as input of the next step. # [N] int64"""
        return self.candidates.tokens

    def read(self, words: torch.Tensor | None = None, logprobs: torch.Tensor | None = None) -> SampledTokens:
        """Return the tokens on the host. Waits for the device, unless given copies of `candidates.words` and
        `logprobs`."""
        if words is None and self.on_host is not None:
            tokens, peak_words = self.on_host
            num_rows = len(tokens)
        else:
            if words is None:
                words = self.candidates.words.cpu()
                logprobs = None if self.logprobs is None else self.logprobs.cpu()
            num_rows = len(self.token_ids)
            tokens, peak_words = words.numpy()
        token_ids, peaks = tokens[:num_rows].copy(), peak_words.view(np.float32)[:num_rows]
        # A NaN counts as a row's maximum, so a finite maximum means that the row has no NaN.
        non_finite = np.flatnonzero(~np.isfinite(peaks)).tolist()
        refused = self.refused | _without_a_token(non_finite, peaks, self.rows) if non_finite else self.refused
        found: dict[int, TokenLogprobs] = {}
        if logprobs is not None and self.rows.num_logprobs:
            asked = self.rows.num_logprobs
            found = dict(zip(asked, unpack_logprobs(logprobs, list(asked.values())), strict=True))
            for row in (*non_finite, *refused):
                found.pop(row, None)
        return SampledTokens(token_ids, found, [row for row in non_finite if row not in refused], refused)


class Sampler:
    """Samples tokens by the operations of `engine.sampling.ops`."""

    def __init__(self, masks: TokenMasks | None = None) -> None:
        self._masks = masks or TokenMasks()

    def launch(self, logits: torch.Tensor, rows: SamplingRows, send: Send | None = None) -> LaunchedTokens:
        """Enqueue sampling of one token per row. Overwrites `logits`; `send` copies arrays to the device. # [N, V]
        float32"""
        return self._launch(logits, rows, send, returns_probabilities=False)[0]

    def _launch(
        self, logits: torch.Tensor, rows: SamplingRows, send: Send | None, *, returns_probabilities: bool
    ) -> tuple[LaunchedTokens, torch.Tensor | None]:
        """See `launch`, and `launch_from` with the distributions."""
        probabilities: torch.Tensor | None = None
        ops = ops_for(logits)
        if rows.is_greedy:
            return LaunchedTokens(rows, ops.argmax(logits)), None
        vocab_size, asked, masked = logits.shape[-1], rows.num_logprobs or {}, rows.masked or []
        mask_words, refused = self._masks.fill(masked, vocab_size) if masked else (_NO_MASKS, {})
        arrays: list[Sequence[npt.NDArray[Any]]] = [
            [np.array(list(asked), dtype=np.int64)],
            [np.array([each.row for each in masked], dtype=np.int64), mask_words],
            []
            if rows.random is None
            else ops.sampling_arrays(rows.random, vocab_size, 1 if rows.later is None else rows.later.most),
            *((change.rows, change.token_ids, change.values) for _, change in rows.adjustments),
            *((each.rows, each.temperature, each.values) for each in rows.filters),
        ]
        # Send all arrays in one copy.
        sent = iter((send or _sender(logits.device))([array for group in arrays for array in group]))
        [asking], [masked_rows, masks], random_arrays, *others = [[next(sent) for _ in group] for group in arrays]
        unmodified = logits.index_select(0, asking) if asked else None
        for (kind, _), (at, ids, values) in zip(rows.adjustments, others, strict=False):
            ops.adjust(logits, at, ids, values, kind)
        if masked:
            ops.mask(logits, masked_rows, masks)
        candidates = ops.argmax(logits)
        for each, (at, temperature, values) in zip(rows.filters, others[len(rows.adjustments) :], strict=True):
            mask_excluded(logits, candidates.peaks, each.keep, at, temperature, values)
        if rows.random is not None:
            arguments: tuple[RandomRows, Sequence[torch.Tensor]] = rows.random, random_arrays
            if rows.later is not None:
                arguments = ops.move_to_later(*arguments, rows.later)
            if rows.proposals is not None:
                ops.sample_verified(logits, candidates, *arguments, rows.proposals)
            elif returns_probabilities:
                probabilities = ops.sample_with_probabilities(logits, candidates, *arguments)
            else:
                ops.sample(logits, candidates, *arguments)
        logprobs = None
        if unmodified is not None:
            chosen = candidates.tokens.index_select(0, asking)
            columns = ops.logprobs(unmodified, chosen, min(max(asked.values()), vocab_size))
            logprobs = pack_logprobs(chosen, columns)
        return LaunchedTokens(rows, candidates, logprobs, refused), probabilities

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """`launch`, then `read`."""
        return self.launch(logits, rows).read()

    def launch_from(
        self, logits: torch.Tensor, rows: SamplingRows, send: Send | None = None
    ) -> tuple[LaunchedTokens, torch.Tensor | None]:
        """As `launch`, and return the distributions of `rows.random`. # [D, V] float32; None without such rows"""
        return self._launch(logits, rows, send, returns_probabilities=True)

    def warm_up(self, vocab_size: int, device: torch.device) -> None:
        """Compile Triton's kernels, if they are used, before a request needs them."""
        if not triton.takes("sampling"):
            return
        rows = np.arange(2)
        one_token = Adjustments(rows, rows, np.ones(2, dtype=np.float32))
        random = RandomRows(
            rows=rows,
            temperature=np.ones(2, dtype=np.float32),
            top_k=np.full(2, vocab_size),
            top_p=np.array([0.5, 1.0]),
            min_p=np.zeros(2),
            key=np.zeros(2, dtype=np.uint64),
            position=rows,
            filtered=np.array([True, False]),
        )
        everything = SamplingRows(
            random=random,
            repetition=one_token,
            presence=one_token,
            frequency=one_token,
            bias=one_token,
            masked=[MaskedRow(0, allowed=packed(range(vocab_size), vocab_size))],
            num_logprobs={0: 1},
        )
        for sampling in (everything, SamplingRows(random=random.take(rows[1:]))):
            self.sample(torch.zeros(2, vocab_size, device=device), sampling)


def _sender(device: torch.device) -> Send:
    return _on_host if device.type == "cpu" else partial(upload, device=device)


def _on_host(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Return tensors that share the arrays' memory."""
    return [torch.from_numpy(array) for array in arrays]


def _without_a_token(non_finite: list[int], peaks: npt.NDArray[np.float32], rows: SamplingRows) -> dict[int, str]:
    """Return a sentence for each row without a finite maximum whose request excludes every token. # peaks [N]"""
    refused = {}
    masked = {each.row: each for each in rows.masked or ()}
    forbidding = set[int]()
    if rows.bias is not None:
        forbidding.update(rows.bias.rows[np.isneginf(rows.bias.values)].tolist())
    for row in non_finite:
        fields = masked[row].fields if row in masked else []
        if row in forbidding:
            fields = [*fields, "bad_words or min_tokens"]
        if fields and np.isneginf(peaks[row]):
            together = " together" if len(fields) > 1 else ""
            refused[row] = f"no token is left to sample: {' and '.join(fields)}{together} forbid every one"
    return refused
