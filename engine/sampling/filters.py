"""`FILTERS`: the table of filters, by which a request excludes tokens from random sampling.

To add a filter, add a field to `SamplingParams` and to the request schema, and a row with its `keep` here.
`TorchOps.sample` and its counterparts in C and Triton implement the first three filters themselves, because these need
the order of the tokens; any other filter masks the logits before `sample`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Keep: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Filter(NamedTuple):
    """One filter. Its name is the field of `SamplingParams` with its value."""

    name: str
    dtype: npt.DTypeLike
    is_off: Callable[[npt.NDArray[Any], int], npt.NDArray[np.bool_]]
    """Returns which values exclude no token of a vocabulary of the given size. # [R] -> [R]"""
    keep: Keep | None = None
    """Returns which tokens stay, from logits minus their row's maximum, divided by its temperature; None if
    `sample` implements the filter.

    Each row's argmax must stay. # [R, V] float32, values [R] -> [R, V] bool
    """


FILTERS = (
    Filter("top_k", np.int64, lambda values, vocab_size: (values <= 0) | (values >= vocab_size)),
    Filter("top_p", np.float64, lambda values, _: values >= 1.0),
    Filter("min_p", np.float64, lambda values, _: values <= 0.0),
)


class FilteredRows(NamedTuple):
    """Rows of a step that one filter masks before `sample`. # 3 x [R]"""

    keep: Keep
    rows: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    values: npt.NDArray[Any]


def mask_excluded(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    keep: Keep,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Set the tokens that a filter excludes in `rows` to minus infinity, in place. # logits [N, V], peaks [N], 3 x
    [R]"""
    chosen = logits.index_select(0, rows)
    scaled = (chosen - peaks[rows][:, None]) / temperature[:, None]
    logits.index_copy_(0, rows, chosen.masked_fill_(~keep(scaled, values), -torch.inf))
