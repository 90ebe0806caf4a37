"""`linear`: a product with a weight, wherever it lies. Called by the layers."""

import torch
import torch.nn.functional as F
from torch import nn

from models.kernels.cpu import ops
from models.layers.parameter import packed_of


def linear(x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`. # [tokens, in_features] -> [tokens, out_features]"""
    packed = packed_of(weight)
    return F.linear(x, weight, bias) if packed is None else ops.linear(x, packed, bias)


def logits(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """`x @ weight.T` as float32. # [rows, in_features] -> [rows, out_features]"""
    packed = packed_of(weight)
    return F.linear(x, weight).float() if packed is None else ops.linear(x, packed, dtype=torch.float32)


def rows_of(weight: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
    """A weight's rows by number. # [tokens] int64 -> [tokens, in_features]"""
    packed = packed_of(weight)
    return F.embedding(ids, weight) if packed is None else ops.embed(ids, packed)
