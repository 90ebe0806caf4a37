"""The k largest values of each row in a defined order: descending, equal values by ascending index.

`torch.topk` does not define the order of equal values, nor which of them are among the k largest; logits computed in
bfloat16 have many equal values. On CPUs the compiled operators select, or NumPy, which is ten times faster than torch.
"""

import numpy as np
import torch

from models.ops.cpu import sampling as sampling_ops
from models.ops.cpu.structures import MAX_LARGEST

_BLOCK = 128
_LOW_32_BITS = 0xFFFFFFFF


def argmax(values: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest value, the first of equal ones; NaN is largest. # [R, V] -> [R] int64"""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(-1))
    return values.argmax(-1)


def stable_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest values of each row and their indexes. # [R, V] float32 -> [R, k] float32, [R, k] int64

    The k largest values are in the k blocks with the largest maxima (of equal maxima, the first ones), because each
    block with a larger maximum has a larger value. So a wide row is read once, and only k of its blocks are sorted.
    """
    if 0 < k <= MAX_LARGEST and sampling_ops.chooses(values):
        best = sampling_ops.largest(values, k)
        return values.gather(-1, best), best
    width = values.shape[-1]
    index = torch.arange(width, device=values.device)
    candidates = values
    if 2 * k * _BLOCK < width:
        maxima = _block_maxima(values)
        blocks = _best(maxima, torch.arange(maxima.shape[-1], device=values.device), k)
        index = (blocks[:, :, None] * _BLOCK + index[:_BLOCK]).flatten(1)  # [R, k * block]
        candidates = values.gather(-1, index.clamp(max=width - 1)).masked_fill_(index >= width, -torch.inf)
    best = _best(candidates, index, k)
    return values.gather(-1, best), best


def sorted_descending(values: torch.Tensor) -> torch.Tensor:
    """Return each row's values in descending order. # [R, V] float32

    Together with `index_of_rank`, it takes a third of the time of sorting the indexes.
    """
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def index_of_rank(values: torch.Tensor, ordered: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Return the index of the value with the given rank per row. Equal values rank by index. # 2 x [R, V], [R] -> [R]

    `ordered` is the result of `sorted_descending` for `values`.
    """
    wanted = ordered.gather(-1, ranks[:, None])  # [R, 1]
    among_equals = ranks - (ordered > wanted).sum(-1)
    equal = zip(values == wanted, among_equals.tolist(), strict=True)
    return torch.stack([row.nonzero()[index, 0] for row, index in equal])


def block_view(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows into full blocks and the rest. # [R, V] -> [R, V // size, size], [R, V % size]"""
    rows, width = values.shape
    whole = width // size * size
    return values[:, :whole].reshape(rows, whole // size, size), values[:, whole:]


def _block_maxima(values: torch.Tensor) -> torch.Tensor:
    blocks, rest = block_view(values, _BLOCK)
    maxima = blocks.amax(-1)
    return torch.cat((maxima, rest.amax(-1, keepdim=True)), -1) if rest.shape[-1] else maxima


def _best(values: torch.Tensor, index: torch.Tensor, k: int) -> torch.Tensor:
    """Return `index` of the `k` largest values in order, equal ones by ascending index. # [R, n], [n] or [R, n] -> [R,
    k]

    Value and index are packed into one integer, so that no two are equal and the selection is unique.
    """
    # Adding 0 turns -0 into +0. Flipping a negative float's lower bits makes integers order like the floats.
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    packed = (bits.long() << 32) | (_LOW_32_BITS - index)
    return _LOW_32_BITS - (_largest(packed, k) & _LOW_32_BITS)


def _largest(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Return the `k` largest of each row, descending. Overwrites `packed`. # [R, n] int64 -> [R, k]"""
    if packed.device.type != "cpu":
        return packed.topk(k, dim=-1).values
    rows = packed.numpy()
    if k < rows.shape[-1]:
        rows.partition(rows.shape[-1] - k, axis=-1)
        rows = rows[:, rows.shape[-1] - k :]
    rows.sort(axis=-1)
    return torch.from_numpy(rows).flip(-1)
