"""`join_columns`: concatenates the columns of several tensors, for a layer with more than one input."""

import torch

from models.ops.cpu import runtime, structures
from models.ops.cpu.structures import Step


def join_columns(*parts: torch.Tensor) -> torch.Tensor:
    """Concatenate the features of all parts in new memory; a single part is copied. # n x [tokens, _] -> [tokens,
    sum]"""
    if not runtime.runs(*parts):
        return torch.cat(parts, dim=1)
    current = runtime.current()
    out = current.rows(len(parts[0]), sum(part.shape[1] for part in parts))
    first = 0
    for part in parts:
        columns = out[:, first : first + part.shape[1]]
        # Heads without gates are copied.
        arguments = structures.GateHeads(
            part.data_ptr(), part.stride(0), 0, None, 0, 0, columns.data_ptr(), columns.stride(0), 1, part.shape[1], 0
        )
        current.run(arguments, Step(num_tokens=len(part)), (part, out))
        first += part.shape[1]
    return out
