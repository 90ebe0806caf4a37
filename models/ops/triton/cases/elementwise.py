"""Torch references and self-test cases of norms and gated activations."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Finding, Numbers, excess, slack
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, gated, rms_norm
from models.ops.types import GELU_TANH, SILU, Gating


def reference_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    mode: int = PLAIN,
) -> torch.Tensor:
    """As the kernel's launcher; `residual` becomes the sum where `mode` is `ADD_NORM`."""
    if mode == ADD_NORM:
        assert residual is not None
        x = residual.copy_(x.float() + residual.float())
    exact = x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    if mode == NORM_ADD:
        assert residual is not None
        return (residual.float() + normed.to(x.dtype).float()).to(x.dtype)
    return normed.to(x.dtype)


def reference_gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """As the kernel's launcher."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == SILU:
        product = F.silu(gate) * up
    elif activation == GELU_TANH:
        product = F.gelu(gate, approximate="tanh") * up
    else:
        gate = gate.clamp(max=limit)
        product = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    return product.to(gate_up.dtype)


_ROWS = 21
"""More than a tile's, and no multiple of one."""


class NormForm(NamedTuple):
    """A norm of rows."""

    size: int
    eps: float
    offset: float
    dtype: torch.dtype
    weight_dtype: torch.dtype
    sums: tuple[int, ...] = (ADD_NORM, NORM_ADD)
    """How it is computed with one, besides by itself."""

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """By itself, behind a sum and before one."""
        x, residual = (numbers.normal(_ROWS, self.size, dtype=self.dtype) for _ in range(2))
        weight = (numbers.near_one(self.size) - self.offset).to(self.weight_dtype)
        rounded, of = slack(self.dtype), f"a norm of {self.size}"
        exact = self._exact(x, weight)
        yield Finding(of, excess(rms_norm(x, weight, self.eps, offset=self.offset), exact, rounded * exact.abs()))

        for mode in self.sums:
            summed = residual.clone()
            found = rms_norm(x, weight, self.eps, offset=self.offset, residual=summed, mode=mode)
            if mode == NORM_ADD:
                total = residual.float() + exact
                yield Finding(f"a sum behind {of}", excess(found, total, rounded * (total.abs() + exact.abs())))
                continue
            both = x.float() + residual.float()
            yield Finding(f"the sum before {of}", excess(summed, both, rounded * both.abs()))
            behind = self._exact(summed, weight)
            yield Finding(f"{of} of a sum", excess(found, behind, rounded * behind.abs()))

    def _exact(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference_rms_norm(x.float(), weight.float(), self.eps, offset=self.offset)


class ActivationForm(NamedTuple):
    """A gated activation of rows."""

    features: int
    gating: Gating
    dtype: torch.dtype

    def check(self, numbers: Numbers) -> Iterator[Finding]:
        """A few rows."""
        gate_up = numbers.normal(_ROWS, 2 * self.features, dtype=self.dtype, scale=3.0)
        activation, alpha, limit = self.gating
        found = gated(gate_up, activation, alpha=alpha, limit=limit)
        exact = reference_gated(gate_up.float(), activation, alpha=alpha, limit=limit)
        gate, up = gate_up.float().abs().chunk(2, -1)
        bound = slack(self.dtype) * exact.abs() + FLOAT32 * gate * (up + 1)
        yield Finding(f"an activation of {self.features}", excess(found, exact, bound))
