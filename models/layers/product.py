"""`linear`: a product with a weight, wherever it lies. Called by the layers."""

import torch
import torch.nn.functional as F
from torch import nn

from models.kernels import aiter
from models.kernels.aiter import dense
from models.kernels.cpu import expert_ops, ops, runtime
from models.layers.activation import GatedActivation, operator_of
from models.layers.parameter import onednn_of, packed_of
from models.layers.quantized_product import stored_of


def linear(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
    packed = packed_of(weight)
    if packed is not None:
        return ops.linear(x, packed, bias)
    stored = stored_of(weight)
    if stored is not None:
        return stored.linear(x, bias)
    by_onednn = onednn_of(weight)
    if by_onednn is None:
        if aiter.runs("gemm", x, weight):
            return dense.linear(x, weight, bias)
        return F.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, by_onednn, bias, "none", [], "")
    return out


def gated_linear(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """`activation(linear(x, weight, bias))`, the same bits. # [tokens, in_features] -> [tokens, out_features / 2]"""
    packed, operator = packed_of(weight), operator_of(activation)
    if packed is not None and operator is not None and ops.gates(packed):
        return ops.gated_linear(x, packed, bias, operator)
    return activation(linear(x, weight, bias))


def logits(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` as float32. # [rows, in_features] -> [rows, out_features]"""
    packed = packed_of(weight)
    return linear(x, weight, bias).float() if packed is None else ops.linear(x, packed, bias, dtype=torch.float32)


def float_logits(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """`x @ weight.T` in float32, by a float32 weight. # [rows, in_features] -> [rows, out_features]"""
    return expert_ops.float_linear(x, weight) if runtime.runs(x) else F.linear(x.float(), weight)


def rows_of(
    weight: nn.Parameter, ids: torch.Tensor, scale: float = 1.0, *, first_row: int | None = None
) -> torch.Tensor:
    """A weight's rows by number, scaled. # [tokens] int64 -> [tokens, in_features]

    `first_row`: that the weight begins with, where it has some of the rows only; the others are 0.
    """
    packed = packed_of(weight)
    if packed is not None:
        return ops.embed(ids, packed, scale, first_row or 0)
    if first_row is not None:
        ids = ids - first_row
        elsewhere = (ids < 0) | (ids >= len(weight))
        return rows_of(weight, ids.masked_fill(elsewhere, 0), scale).masked_fill_(elsewhere[:, None], 0.0)
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale
