"""`join_columns` and `precede_heads`: concatenate the columns of tensors, for layers with more than one input."""

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
            part.data_ptr(),
            part.stride(0),
            0,
            None,
            0,
            0,
            columns.data_ptr(),
            columns.stride(0),
            0,
            1,
            part.shape[1],
            0,
        )
        current.run(arguments, Step(num_tokens=len(part)), (part, out))
        first += part.shape[1]
    return out


def precede_heads(lead: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Put the same elements before each token's heads. # [heads, lead_dim], [tokens, heads, dim] -> [tokens, heads,
    lead_dim + dim]"""
    num_tokens, heads, dim = x.shape
    if not runtime.runs(lead, x):
        return torch.cat((lead.expand(num_tokens, *lead.shape), x), dim=-1)
    current = runtime.current()
    whole = lead.shape[1] + dim
    out = current.rows(num_tokens, heads * whole)
    for part, strides, first in ((lead, (0, lead.stride(0)), 0), (x, x.stride()[:2], lead.shape[1])):
        columns = out[:, first:]
        arguments = structures.GateHeads(
            part.data_ptr(), *strides, None, 0, 0, columns.data_ptr(), out.stride(0), whole, heads, part.shape[-1], 0
        )
        current.run(arguments, Step(num_tokens=num_tokens), (part, out))
    return out.view(num_tokens, heads, whole)
