"""Dense CPU operators over bfloat16 tensors: products with packed weights, norms, activations and embeddings.

Rows are a step's tokens; matrices may have any row stride. The products accept every kind of `PackedWeight`.
"""

import torch

from models.ops.cpu import structures
from models.ops.cpu.packed_weight import PANEL, CodedWeight, PackedWeight, dense_elements
from models.ops.cpu.runtime import current, pointer, runs
from models.ops.cpu.structures import Arguments, Step
from models.ops.types import NormWeight


def _require_rows(x: torch.Tensor, weight: PackedWeight) -> None:
    """Raise `ValueError` if `x` has another width than the weight's inputs, or another dtype than bfloat16."""
    if not runs(x) or x.shape[1:] != (weight.in_features,):
        raise ValueError(f"{x.dtype} {list(x.shape)} where a product takes rows of {weight.in_features} bfloat16")


def _multiply(
    operator: type[Arguments],
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    *options: float,
) -> torch.Tensor:
    """Run a product whose structure begins with the fields of `structures.Linear`.

    # [rows, in_features] -> [rows, out_features]
    """
    _require_rows(x, weight)
    runtime = current()
    out = runtime.rows(len(x), out_features, dtype)
    arguments = operator(
        x.data_ptr(),
        x.stride(0),
        weight.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        weight.out_features,
        dtype is torch.float32,
        *options,
        *weight.options,
    )
    step, kept = Step(num_tokens=len(x)), (x, weight.memory, bias, out)
    if weight.operators.expand is not None:
        # Scratch for the expanded weight; the system commits it only when a step has many rows.
        room = runtime.fixed(dense_elements(weight.out_features, weight.in_features), torch.bfloat16)
        arguments.expanded = room.data_ptr()
        runtime.run(weight.operators.expand.from_buffer_copy(arguments), step, kept)
        runtime.run(arguments, step, (*kept, room))
        return out
    runtime.run(arguments, step, kept)
    return out


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` as bfloat16 or float32. # [rows, in_features] -> [rows, out_features]"""
    return _multiply(weight.operators.linear, x, weight, bias, weight.out_features, dtype)


def dequantized(weight: CodedWeight) -> PackedWeight:
    """Dequantise a weight to bfloat16; rows that were not written are 0."""
    dense = PackedWeight(weight.out_features, weight.in_features)
    if not weight.is_empty:
        columns = linear(torch.eye(weight.in_features, dtype=torch.bfloat16), weight)
        dense.put(0, columns.t().contiguous())
    return dense


def supports_gated_linear(weight: PackedWeight) -> bool:
    """Whether `gated_linear` supports the weight."""
    return weight.operators.gated_linear is not None and weight.out_features % (2 * PANEL) == 0


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: int,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Compute `gated(linear(x, weight, bias), activation)` bit for bit, if `supports_gated_linear(weight)`.

    # [rows, in_features] -> [rows, out_features / 2]
    """
    operator = weight.operators.gated_linear
    assert operator is not None
    return _multiply(operator, x, weight, bias, weight.out_features // 2, torch.bfloat16, activation, alpha, limit)


def grouped_linear(
    x: torch.Tensor,
    weights: PackedWeight,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    out_features: int | None = None,
) -> torch.Tensor:
    """Multiply the first `counts[0]` rows by the stack's first weight, the next `counts[1]` by the second, and so on.

    # [rows, in_features], [groups, out_features], [groups] int64 -> [rows, out_features]

    Rows past the sum of `counts` become 0. With `tokens` [rows] int64 the inputs are `x[tokens]`.
    `out_features`: the outputs of one weight, which the stack pads to whole panels; None if it pads none.
    """
    _require_rows(x, weights)
    runtime = current()
    groups, num_rows = len(counts), len(x if tokens is None else tokens)
    out_features = out_features or weights.out_features // groups
    out = runtime.rows(num_rows, out_features)
    arguments = weights.operators.grouped_linear(
        x.data_ptr(),
        x.stride(0),
        pointer(tokens),
        weights.memory.data_ptr(),
        pointer(bias),
        out.data_ptr(),
        out.stride(0),
        counts.data_ptr(),
        groups,
        weights.in_features,
        out_features,
        runtime.per_token(num_rows),
        *weights.options,
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (x, tokens, weights.memory, bias, counts, out))
    return out


def linear_by_group(x: torch.Tensor, weights: PackedWeight, out_features: int) -> torch.Tensor:
    """Multiply each group of columns by its weight of a stack, in which each is padded to whole panels.

    # [T, groups, in], groups weights [out_features, in] -> [T, groups * out_features]
    """
    num_tokens, groups, in_features = x.shape
    _require_rows(x[:, 0], weights)
    assert x.stride(1) == in_features
    out = current().rows(num_tokens, groups * out_features)
    arguments = weights.operators.grouped_linear(
        x.data_ptr(),
        x.stride(0),
        None,
        weights.memory.data_ptr(),
        None,
        out.data_ptr(),
        out.stride(0),
        None,
        groups,
        in_features,
        out_features,
        1,
        *weights.options,
    )
    current().run(arguments, Step(num_tokens=num_tokens), (x, weights.memory, out))
    return out


def embed(input_ids: torch.Tensor, weight: PackedWeight, scale: float = 1.0, first_row: int = 0) -> torch.Tensor:
    """Look up and scale rows of a weight. # [rows] int64 -> [rows, in_features]

    `first_row`: index of the first row of this rank's shard; the result is 0 for rows of other ranks.
    """
    assert weight.operators.embed is not None, "embeddings are packed as bfloat16 or rounded"
    runtime = current()
    out = runtime.rows(len(input_ids), weight.in_features)
    arguments = weight.operators.embed(
        weight.memory.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        weight.in_features,
        scale,
        first_row,
        weight.out_features,
        *weight.options,
    )
    step = Step(num_tokens=len(input_ids), input_ids=input_ids.data_ptr())
    runtime.run(arguments, step, (input_ids, weight.memory, out))
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    residual: torch.Tensor | None = None,
    x_scale: float = 1.0,
) -> torch.Tensor:
    """Normalise `x`, or with `residual` the sum `x_scale * x + residual`, which overwrites `residual`. See
    `NormWeight`.

    # [rows, size], or [rows, heads, size] with contiguous heads; weights [size] or [heads, size]
    """
    out = current().rows(len(x), x.shape[1:].numel()).view(x.shape)
    _norm(x, NormWeight(weight, eps, offset, bias, is_centred), residual, out, x_scale=x_scale)
    return out


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    sum_scale: float = 1.0,
) -> torch.Tensor:
    """Set `residual` to `sum_scale * (residual + norm of x)`, and return it. # [rows, size], or [rows, heads, size]"""
    norm = NormWeight(weight, eps, offset, bias, is_centred)
    _norm(x, norm, residual, None, is_added=True, sum_scale=sum_scale)
    return residual


def add(residual: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Add `scale * x` to `residual`, and return it. # [rows, size]"""
    # Without an output no norm is computed, and its weight (here `x`) is not read.
    _norm(x, NormWeight(x, 0.0, 0.0), residual, None, x_scale=scale)
    return residual


def _norm(
    x: torch.Tensor,
    norm: NormWeight,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    is_added: bool = False,
    x_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> None:
    weight, eps, offset, bias, is_centred = norm
    arguments = structures.RMSNorm(
        x.data_ptr(),
        x.stride(0),
        pointer(residual),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        pointer(bias),
        pointer(out),
        0 if out is None else out.stride(0),
        x.shape[-1],
        x.shape[1] if x.dim() == 3 else 1,
        weight.shape[1] if weight.dim() == 2 else 0,
        is_added,
        is_centred,
        offset,
        eps,
        x_scale,
        sum_scale,
    )
    current().run(arguments, Step(num_tokens=len(x)), (x, residual, weight, bias, out))


def gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    """Compute `activation(gate) * up` from a row's two halves. # [rows, 2 * size] -> [rows, size]

    `alpha` and `limit`: parameters of the clamped activation, see `models.ops.activation`.
    """
    gate, up = gate_up.chunk(2, dim=1)
    return activated(gate, activation, up, alpha=alpha, limit=limit)


def activated(
    gate: torch.Tensor, activation: int, up: torch.Tensor | None, *, alpha: float = 1.0, limit: float = 0.0
) -> torch.Tensor:
    """Compute `activation(gate) * up`, or without `up` only the activation. # [rows, size] each"""
    runtime = current()
    num_rows, size = gate.shape
    out = runtime.rows(num_rows, size)
    arguments = structures.Gated(
        gate.data_ptr(),
        gate.stride(0),
        pointer(up),
        0 if up is None else up.stride(0),
        out.data_ptr(),
        out.stride(0),
        size,
        runtime.per_token(num_rows),
        activation,
        alpha,
        limit,
    )
    runtime.run(arguments, Step(num_tokens=num_rows), (gate, up, out))
    return out
