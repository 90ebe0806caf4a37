"""`TokenMasks`: which tokens each row of a step may sample, a bit each, kept between steps. Owned by the sampler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.structured.matchers import MaskComputer, Matcher


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row that may not sample every token."""

    row: int
    matcher: Matcher | None = None
    ends: Sequence[int] = ()
    """Tokens that may be sampled wherever the grammar may end, besides the model's EOS tokens."""
    withheld: Sequence[int] = ()
    """Ends not to be sampled, unless the grammar allows nothing else."""
    allowed: npt.NDArray[np.int32] | None = None
    """The only tokens of the request, whatever the grammar allows. # [V / 32]"""

    @property
    def fields(self) -> list[str]:
        """What restricts the row, as a client knows it."""
        restricting = {"the request's grammar": self.matcher, "allowed_token_ids": self.allowed}
        return [name for name, restriction in restricting.items() if restriction is not None]


def packed(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A mask that allows `token_ids`. # [ceil(V / 32)]"""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenMasks:
    """Fills one bitmask a masked row, into memory that is kept."""

    def __init__(
        self, compute: Callable[[Sequence[tuple[Matcher, int]], npt.NDArray[np.int32]], object] | None = None
    ) -> None:
        self._compute = compute or MaskComputer()
        self._masks = np.zeros((0, 0), dtype=np.int32)

    def fill(self, masked: Sequence[MaskedRow], vocab_size: int) -> tuple[npt.NDArray[np.int32], dict[int, str]]:
        """The masks, in the order of `masked`, and why of the rows whose grammar cannot be followed any further.

        # [len(masked), ceil(V / 32)]
        """
        num_words = -(-vocab_size // 32)
        width = max([num_words, *(row.matcher.num_words for row in masked if row.matcher is not None)])
        if len(self._masks) < len(masked) or self._masks.shape[1] != width:
            self._masks = np.zeros((len(masked), width), dtype=np.int32)
        matchers = [(row.matcher, index) for index, row in enumerate(masked) if row.matcher is not None]
        if matchers:
            self._compute(matchers, self._masks)
        failed: dict[int, str] = {}
        for mask, row in zip(self._masks, masked, strict=False):
            if row.matcher is None:
                mask[:] = -1
            elif not row.matcher.settle(mask, row.ends, row.withheld):
                failed[row.row] = row.matcher.error or ""
                mask[:] = -1
            if row.allowed is not None:
                mask[:num_words] &= row.allowed
        return self._masks[: len(masked), :num_words], failed
