"""`grouped_linear`: runs of rows, each by its own expert's weight. Called by `FusedMoE`."""

import torch
import torch.nn.functional as F

from models.kernels import native


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """The first `counts[0]` rows through expert 0, the next `counts[1]` through expert 1 ...; past the last run, zero.

    # [pairs, in], [experts, out, in], [experts, out], [experts] int64 -> [pairs, out]
    """
    runs = counts.tolist()
    total = sum(runs)
    out = rows.new_empty(len(rows), weight.shape[1])
    out[total:] = 0
    kernel = native.grouped_linear()
    if kernel is not None and max(runs) <= native.ROWS_WORTHWHILE and kernel.takes(rows, weight):
        kernel(rows, weight, bias, counts, out)
        return out
    start = 0
    for expert, count in enumerate(runs):
        if count:
            run = slice(start, start + count)
            out[run] = F.linear(rows[run], weight[expert], None if bias is None else bias[expert])
            start += count
    return out
