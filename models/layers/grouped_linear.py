"""`grouped_linear`: runs of rows, each by its own expert's weight. Called by `FusedMoE`."""

import torch
import torch.nn.functional as F
from torch import nn

from models.kernels.cpu import ops
from models.layers.parameter import packed_of


def grouped_linear(
    rows: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first `counts[0]` rows through expert 0, the next `counts[1]` through expert 1 ...; past the last run, zero.

    # [pairs, in], [experts, out, in], [experts, out], [experts] int64 -> [pairs, out]

    With `tokens` [pairs] int64 the rows are `rows[tokens]`.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.grouped_linear(rows, packed, bias, counts, tokens=tokens)
    if tokens is not None:
        rows = rows[tokens]
    runs = counts.tolist()
    out = rows.new_empty(len(rows), weight.shape[1])
    out[sum(runs) :] = 0
    start = 0
    for expert, count in enumerate(runs):
        if count:
            run = slice(start, start + count)
            out[run] = F.linear(rows[run], weight[expert], None if bias is None else bias[expert])
            start += count
    return out
