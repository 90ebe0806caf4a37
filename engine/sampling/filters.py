"""`FILTERS`: what a request may exclude from the tokens of a random draw, one row of the table each.

To add a filter: a field of `SamplingParams` and of the request schema, and a row here with its `keep`. The draw
implements the first three itself, where the order of the tokens is known (`engine.sampling.torch_ops`, and operators
in C and Triton that it names); any other filter masks the logits before the draw.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Keep: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Filter(NamedTuple):
    """One filter. Its name is the field of `SamplingParams` that holds its value."""

    name: str
    dtype: npt.DTypeLike
    is_off: Callable[[npt.NDArray[Any], int], npt.NDArray[np.bool_]]
    """Which values exclude no token of a vocabulary of that size. # [R] -> [R]"""
    keep: Keep | None = None
    """Which tokens stay, of logits less their row's maximum and divided by its temperature; None: the draw decides.

    Each row's argmax must stay. # [R, V] float32, values [R] -> [R, V] bool
    """


FILTERS = (
    Filter("top_k", np.int64, lambda values, vocab_size: (values <= 0) | (values >= vocab_size)),
    Filter("top_p", np.float64, lambda values, _: values >= 1.0),
    Filter("min_p", np.float64, lambda values, _: values <= 0.0),
)


class FilteredRows(NamedTuple):
    """Rows of a step that one filter masks before the draw. # 3 x [R]"""

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
    """Minus infinity for the tokens of `rows` that a filter excludes, in place. # logits [N, V], peaks [N], 3 x [R]"""
    chosen = logits.index_select(0, rows)
    scaled = (chosen - peaks[rows][:, None]) / temperature[:, None]
    logits.index_copy_(0, rows, chosen.masked_fill_(~keep(scaled, values), -torch.inf))
