"""`linear`: a product with a weight, wherever it lies. Called by the layers."""

import torch
import torch.nn.functional as F
from torch import nn

from models.kernels.cpu import ops
from models.layers.parameter import onednn_of, packed_of


def linear(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
    packed = packed_of(weight)
    if packed is not None:
        return ops.linear(x, packed, bias)
    by_onednn = onednn_of(weight)
    if by_onednn is None:
        return F.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, by_onednn, bias, "none", [], "")
    return out


def logits(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """`x @ weight.T` as float32. # [rows, in_features] -> [rows, out_features]"""
    packed = packed_of(weight)
    return linear(x, weight).float() if packed is None else ops.linear(x, packed, dtype=torch.float32)


def rows_of(weight: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
    """A weight's rows by number. # [tokens] int64 -> [tokens, in_features]"""
    packed = packed_of(weight)
    return F.embedding(ids, weight) if packed is None else ops.embed(ids, packed)
