"""CPU operators of hyper-connections: see `models.layers.hyper_connection`."""

import torch

from models.ops.cpu import structures
from models.ops.cpu.dense import grouped_linear
from models.ops.cpu.experts import sort_pairs
from models.ops.cpu.packed_weight import PackedWeight
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Step

Parameters = tuple[torch.Tensor, torch.Tensor]
"""Biases of the projections, and a scale for each kind of them. # [out] and [kinds] float32"""


def supports(x: torch.Tensor, count: int) -> bool:
    """Whether the operators support so many residual streams of the type of `x`."""
    return runs(x) and count <= structures.MOST_STREAMS


def mix(
    streams: torch.Tensor,
    projected: torch.Tensor,
    parameters: Parameters,
    iterations: int,
    *,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `HyperConnection.forward`. `projected` [T, (2 + N) * N] float32: of the streams before their norm.

    # [T, N, size] -> [T, size], [T, N] and [T, N, N] float32
    """
    runtime = current()
    num_tokens, count, _ = streams.shape
    post = runtime.rows(num_tokens, count, torch.float32)
    matrix = runtime.rows(num_tokens, count * count, torch.float32)
    out = _mix(streams, projected, parameters, post, matrix, iterations, eps, norm_eps)
    return out, post, matrix.view(num_tokens, count, count)


def collapse(
    streams: torch.Tensor,
    projected: torch.Tensor | None = None,
    parameters: Parameters | None = None,
    *,
    eps: float = 0.0,
    norm_eps: float = 0.0,
) -> torch.Tensor:
    """Compute the weighted sum of the streams, see `HyperHead`, or without `projected` [T, N] float32 their mean.

    # [T, N, size] -> [T, size]
    """
    return _mix(streams, projected, parameters, None, None, 0, eps, norm_eps)


def _mix(
    streams: torch.Tensor,
    projected: torch.Tensor | None,
    parameters: Parameters | None,
    post: torch.Tensor | None,
    matrix: torch.Tensor | None,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    runtime = current()
    num_tokens, count, size = streams.shape
    assert streams.stride() == (count * size, size, 1)
    base, scale = parameters or (None, None)
    out = runtime.rows(num_tokens, size)
    arguments = structures.MixStreams(
        streams.data_ptr(),
        pointer(projected),
        pointer(base),
        pointer(scale),
        count,
        size,
        iterations,
        eps,
        norm_eps,
        out.data_ptr(),
        pointer(post),
        pointer(matrix),
    )
    runtime.run(arguments, Step(num_tokens=num_tokens), (streams, projected, base, scale, out, post, matrix))
    return out


def spread(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """See `HyperConnection.spread`. # [T, size], [T, N, size], [T, N] and [T, N, N] float32 -> [T, N, size]"""
    return _spread(x, streams.shape[1], streams, post, matrix)


def repeat(x: torch.Tensor, count: int) -> torch.Tensor:
    """Copy `x` to `count` streams. # [T, size] -> [T, N, size]"""
    return _spread(x, count, None, None, None)


def linear(streams: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Multiply each stream. # [T, N, in_features] -> [T, N, out_features]"""
    num_tokens, count, _ = streams.shape
    # All rows are those of one expert, because a product takes several rows of a token only from a mixture of experts.
    counts, _, _ = sort_pairs(torch.zeros(num_tokens, count, dtype=torch.int64), 1)
    return grouped_linear(streams.view(num_tokens * count, -1), weight, None, counts).view(num_tokens, count, -1)


def _spread(
    x: torch.Tensor,
    count: int,
    streams: torch.Tensor | None,
    post: torch.Tensor | None,
    matrix: torch.Tensor | None,
) -> torch.Tensor:
    runtime = current()
    num_tokens, size = x.shape
    out = runtime.rows(num_tokens, count * size)
    arguments = structures.SpreadStreams(
        x.data_ptr(),
        x.stride(0),
        pointer(streams),
        pointer(post),
        pointer(matrix),
        count,
        size,
        out.data_ptr(),
    )
    runtime.run(arguments, Step(num_tokens=num_tokens), (x, streams, post, matrix, out))
    return out.view(num_tokens, count, size)
