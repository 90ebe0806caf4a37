"""`PoolingHead`: the layers that a model applies to the pooled vector of a prompt, in float32."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "identity": lambda x: x,
        "tanh": torch.tanh,
        "gelu": F.gelu,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }
)
"""Activation functions by the names in `models.architectures.pooling.ACTIVATIONS`."""


class VectorLayer(NamedTuple):
    """A linear layer with an activation, or a layer norm."""

    weight: torch.Tensor  # [out_features, in_features] float32; for a norm [features]
    bias: torch.Tensor | None  # [out_features] float32
    activation: str = "identity"
    norm_eps: float | None = None
    """Epsilon of a layer norm; None if the layer is linear."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """# [rows, in_features] -> [rows, out_features]"""
        if self.norm_eps is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.norm_eps)
        return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class PoolingHead(NamedTuple):
    """The layers in the order in which they are applied; an embedding model may have none."""

    layers: tuple[VectorLayer, ...] = ()

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """# [rows, pooled features] float32 -> [rows, features] float32"""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled
