"""`launch`: the sampler's steps as kernels on the device, none of which waits for the host. Called by `Sampler`.

It gives the tokens that the sampler in torch gives; see `models.ops.triton.sampling`.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import TokenLogprobs
from engine.sampling.logprobs import as_messages, by_kernels, pack_columns, pack_logprobs, token_logprobs
from engine.sampling.parameters import Adjustments, RandomRows, SamplingRows
from engine.sampling.sampled_tokens import SampledTokens, exhausted
from engine.sampling.sampler import Send
from engine.text.structured.matcher import MaskedRow, TokenMasks, packed
from models.ops.memory import upload
from models.ops.triton import logits as sampling
from models.ops.triton import sampling as draw
from models.ops.triton.logits import Logprobs


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """The tokens of N rows, on the device, where they will be once the kernels have run."""

    rows: SamplingRows
    likeliest: sampling.Likeliest
    """Its tokens are those that were sampled."""
    asked: dict[int, int]
    """Alternatives asked for, by row."""
    asking: torch.Tensor | None
    """These rows; None where there are none. # [len(asked)] int64"""
    logits: torch.Tensor | None
    """Of the rows that asked, as the model gave them. # [len(asked), V]"""
    logprobs: Logprobs | None
    """Of these; None where more alternatives are asked for than the kernels look for."""
    refused: dict[int, str]

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens, for the next step. # [N] int64"""
        return self.likeliest.tokens

    def words(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What there is to read, on the device: tokens and peaks, and log probabilities where asked for.

        # as `Likeliest` has both, and as `pack_logprobs` makes them
        """
        words = self.likeliest.both
        if self.logits is None or self.asking is None:
            return words, None
        chosen = self.token_ids.index_select(0, self.asking)
        if self.logprobs is None:
            return words, pack_logprobs(self.logits, chosen, max(self.asked.values()))
        return words, pack_columns(chosen, self.logprobs)

    def read(self) -> SampledTokens:
        """Waits for the device."""
        token_ids, peaks = self.likeliest.read()
        broken = np.flatnonzero(~np.isfinite(peaks)).tolist()
        refused = self.refused | exhausted(broken, peaks, self.rows)
        logprobs = self._read_logprobs(token_ids)
        for row in (*broken, *refused):
            logprobs.pop(row, None)
        return SampledTokens(token_ids, logprobs, [row for row in broken if row not in refused], refused)

    def _read_logprobs(self, token_ids: npt.NDArray[np.int64]) -> dict[int, TokenLogprobs]:
        if self.logits is None:
            return {}
        rows, counts = list(self.asked), list(self.asked.values())
        chosen = token_ids[rows]
        if self.logprobs is None:
            found = token_logprobs(self.logits, torch.from_numpy(chosen).to(self.logits.device), counts)
        else:
            found = as_messages(chosen.tolist(), counts, self.logprobs)
        return dict(zip(rows, found, strict=True))


def launch(logits: torch.Tensor, rows: SamplingRows, masks: TokenMasks, send: Send | None = None) -> LaunchedTokens:
    """One token a row. `logits` are overwritten. `send` brings arrays to the device. # [N, V] float32"""
    asked = rows.num_logprobs or {}
    masked = rows.masked or []
    changes = [
        (kind, change)
        for kind, change in (
            (sampling.REPETITION, rows.repetition),
            (sampling.PRESENCE, rows.presence),
            (sampling.FREQUENCY, rows.frequency),
            (sampling.BIAS, rows.bias),
        )
        if change is not None and len(change.rows)
    ]
    if not (asked or masked or changes or rows.random is not None):
        # All rows take their likeliest token, as in most steps: there is nothing to send.
        return LaunchedTokens(rows, sampling.argmax(logits), {}, None, None, None, {})
    words, refused = masks.fill(masked, logits.shape[-1]) if masked else (np.zeros((0, 0), np.int32), {})
    asking, masked_rows, mask_words, columns, *changed = (send or partial(upload, device=logits.device))(
        [
            np.array(list(asked), dtype=np.int64),
            np.array([each.row for each in masked], dtype=np.int64),
            words,
            columns_of(rows.random),
            *(array for _, change in changes for array in _arrays(change)),
        ]
    )
    unmodified = logits.index_select(0, asking) if asked else None
    for nth, (kind, _) in enumerate(changes):
        change_rows, ids, values = changed[3 * nth : 3 * nth + 3]
        sampling.adjust(logits, change_rows, ids, values, kind)
    if masked:
        sampling.mask(logits, masked_rows, mask_words)
    likeliest = sampling.argmax(logits)
    if rows.random is not None:
        has_filtered = bool(rows.random.filtered.any())
        draw.draw(logits, likeliest.peaks, likeliest.tokens, columns, has_filtered=has_filtered)
    found = None
    if unmodified is not None:
        most = min(max(asked.values()), logits.shape[-1])
        found = by_kernels(unmodified, likeliest.tokens.index_select(0, asking), most)
    return LaunchedTokens(rows, likeliest, asked, asking, unmodified, found, refused)


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Has every kernel compiled before a request needs it."""
    rows = np.arange(2)
    one_token = Adjustments(rows, rows, np.ones(2, dtype=np.float32))
    filtered = RandomRows(
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
        random=filtered,
        repetition=one_token,
        presence=one_token,
        frequency=one_token,
        bias=one_token,
        masked=[MaskedRow(0, allowed=packed(range(vocab_size), vocab_size))],
        num_logprobs={0: 1},
    )
    for sampling_rows in (everything, SamplingRows(random=filtered.take(rows[1:]))):
        launch(torch.zeros(2, vocab_size, device=device), sampling_rows, TokenMasks()).read()


def _arrays(change: Adjustments) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    return change.rows.astype(np.int64, copy=False), change.token_ids, change.values


def columns_of(random: RandomRows | None) -> npt.NDArray[np.int64]:
    """What `draw` reads of each row. # [NUM_COLUMNS, D]"""
    if random is None:
        return np.zeros((draw.NUM_COLUMNS, 0), dtype=np.int64)
    columns = np.empty((draw.NUM_COLUMNS, len(random.rows)), dtype=np.int64)
    columns[draw.ROW] = random.rows
    columns[draw.TEMPERATURE] = random.temperature.view(np.int32)
    columns[draw.TOP_K] = random.top_k
    columns[draw.TOP_P] = random.top_p.view(np.int64)
    columns[draw.LEAST_LIKELY] = _least_likely(random.min_p)
    columns[draw.KEY] = random.key.view(np.int64)
    columns[draw.POSITION] = random.position
    columns[draw.IS_FILTERED] = random.filtered
    return columns


def _least_likely(min_p: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """The bits of the largest float32 that is not more than `-log(min_p)`: whoever is further off is too unlikely."""
    with np.errstate(divide="ignore"):
        exact = np.abs(np.log(min_p))
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest).view(np.int32)
