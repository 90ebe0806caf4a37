"""`TritonOps`: the sampler's operations as Triton's kernels. Imported only where they run."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy.typing as npt
import torch

from engine.sampling.parameters import BIAS, FREQUENCY, PRESENCE, REPETITION, Later, RandomRows
from engine.sampling.torch_ops import Candidates, LogprobColumns, TorchOps
from models.ops.triton import logits as kernels
from models.ops.triton import sampling as sampling_kernels
from models.ops.triton.logits import MAX_TOP_LOGPROBS

_KINDS = {
    REPETITION: kernels.REPETITION,
    PRESENCE: kernels.PRESENCE,
    FREQUENCY: kernels.FREQUENCY,
    BIAS: kernels.BIAS,
}


class TritonOps(TorchOps):
    """The operations as Triton kernels; torch computes log probabilities of more alternatives than they support."""

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, kind: int
    ) -> None:
        """See `TorchOps`."""
        kernels.adjust(logits, rows, ids, values, _KINDS[kind])

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """See `TorchOps`."""
        kernels.mask(logits, rows, words)

    def argmax(self, logits: torch.Tensor) -> Candidates:
        """See `TorchOps`."""
        found = kernels.argmax(logits)
        return Candidates(found.both, found.tokens, found.peaks)

    def sampling_arrays(self, random: RandomRows, vocab_size: int, most: int = 1) -> Sequence[npt.NDArray[Any]]:
        """See `TorchOps`: one array, with positions."""
        return [sampling_kernels.pack_columns(**{each.name: getattr(random, each.name) for each in fields(random)})]

    def move_to_later(
        self, random: RandomRows, arrays: Sequence[torch.Tensor], later: Later
    ) -> tuple[RandomRows, Sequence[torch.Tensor]]:
        """See `TorchOps`."""
        columns = arrays[0]
        columns[sampling_kernels.POSITION] += later.by.clamp(min=0)[columns[sampling_kernels.ROW]]
        return random, arrays

    def sample(
        self, logits: torch.Tensor, candidates: Candidates, random: RandomRows, arrays: Sequence[torch.Tensor]
    ) -> None:
        """See `TorchOps`."""
        has_filtered = bool(random.filtered.any())
        sampling_kernels.draw(logits, candidates.peaks, candidates.tokens, arrays[0], has_filtered=has_filtered)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobColumns:
        """See `TorchOps`."""
        if count > MAX_TOP_LOGPROBS:
            return super().logprobs(logits, token_ids, count)
        return kernels.logprobs(logits, token_ids, count)
