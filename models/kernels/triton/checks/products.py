"""Products of weights that stay quantised against torch."""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from models.kernels.triton.checks.findings import FLOAT32, Finding, Numbers, excess, slack
from models.kernels.triton.configs import target_of
from models.kernels.triton.reference.quantized import rounded
from models.layers.quantized_product import StoredWeight

_ROWS = (1, 40, 200)
"""Each takes other tiles."""
_OUTPUTS = 64
"""Looked at at either end."""


class Product(NamedTuple):
    """Sums of products in float32, and how far a kernel's may be from them before they are rounded."""

    exact: torch.Tensor
    bound: torch.Tensor


def product_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Product:
    """`x @ weight.T + bias`. # float32 [rows, inputs], [outputs, inputs], [outputs] of any type

    Numbers may have been rounded to `dtype` before they are multiplied, each by itself: what that makes of a sum grows
    as the root of the number of its terms.
    """
    exact = x @ weight.T
    each = (x.square() @ weight.square().T).sqrt()
    bound = 2 * slack(dtype) * each + FLOAT32 * (x.abs() @ weight.abs().T)
    return Product(exact if bias is None else exact + bias.float(), bound)


def as_multiplied(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Activations as kernels of a kind of weight see them. # [rows, inputs] -> float32"""
    fp8 = target_of(x.device).fp8
    return rounded(x, getattr(torch, f"float8_{fp8}")) if kind == "fp8" and fp8 is not None else x.float()


def ends_of(outputs: int) -> tuple[slice, ...]:
    """Outputs that are looked at."""
    return slice(0, min(_OUTPUTS, outputs)), slice(max(0, outputs - _OUTPUTS), outputs)


class ProductForm(NamedTuple):
    """A linear layer's weight."""

    weight: StoredWeight
    outputs: int
    inputs: int
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """Equal for weights that the same kernels multiply by, in as many steps."""
        return self.weight.form, self.outputs, self.inputs, self.bias is not None

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """By one token, by some and by many."""
        for rows in _ROWS:
            x = numbers.normal(rows, self.inputs, dtype=self.dtype)
            found, seen = self.weight.linear(x, self.bias), as_multiplied(x, self.weight.kind)
            for some in ends_of(self.outputs):
                bias = None if self.bias is None else self.bias[some]
                exact, bound = product_of(seen, self.weight.part(some), bias, self.dtype)
                error = excess(found[:, some], exact, bound + slack(self.dtype) * exact.abs())
                yield Finding(f"{rows} tokens by a weight of {self.weight.kind}, {self.outputs}x{self.inputs}", error)
