"""Torch references and self-test cases of norms and gated activations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Case, Finding, Problems, relative_error, rounding_bound
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, gated, rms_norm
from models.ops.types import CLAMPED_SILU, GELU_TANH, SILU, Gating


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
"""More rows than a tile has, and no multiple of it."""


@dataclass(frozen=True, slots=True)
class NormCase(Case):
    """A norm of rows, by itself or with the residual's sum before or after it."""

    operator: ClassVar[str] = "norm"
    size: int
    eps: float
    offset: float
    dtype: torch.dtype
    weight_dtype: torch.dtype
    modes: tuple[int, ...] = (PLAIN, ADD_NORM, NORM_ADD)

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: each mode on the same rows."""
        x, residual = (problems.normal(_ROWS, self.size, dtype=self.dtype) for _ in range(2))
        weight = (problems.near_one(self.size) - self.offset).to(self.weight_dtype)
        share, name = rounding_bound(self.dtype), f"a norm of {self.size}"
        for mode in self.modes:
            summed = None if mode == PLAIN else residual.clone()
            found = rms_norm(x, weight, self.eps, offset=self.offset, residual=summed, mode=mode)
            if mode == NORM_ADD:
                normed = self._exact(x, weight)
                total = residual.float() + normed
                yield Finding(
                    f"a sum after {name}", relative_error(found, total, share * (total.abs() + normed.abs()))
                )
                continue
            if summed is not None:
                total = x.float() + residual.float()
                yield Finding(f"the sum before {name}", relative_error(summed, total, share * total.abs()))
            exact = self._exact(x if summed is None else summed, weight)
            yield Finding(
                name if summed is None else f"{name} of a sum", relative_error(found, exact, share * exact.abs())
            )

    def _exact(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference_rms_norm(x.float(), weight.float(), self.eps, offset=self.offset)


@dataclass(frozen=True, slots=True)
class ActivationCase(Case):
    """A gated activation of rows."""

    operator: ClassVar[str] = "activation"
    features: int
    gating: Gating
    dtype: torch.dtype

    def compare(self, problems: Problems) -> Iterator[Finding]:
        gate_up = problems.normal(_ROWS, 2 * self.features, dtype=self.dtype, scale=3.0)
        activation, alpha, limit = self.gating
        found = gated(gate_up, activation, alpha=alpha, limit=limit)
        exact = reference_gated(gate_up.float(), activation, alpha=alpha, limit=limit)
        gate, up = gate_up.float().abs().chunk(2, -1)
        bound = rounding_bound(self.dtype) * exact.abs() + FLOAT32 * gate * (up + 1)
        yield Finding(f"an activation of {self.features}", relative_error(found, exact, bound))


_BF16, _FP16 = torch.bfloat16, torch.float16


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Sizes of a model of 8 billion parameters."""
    del device
    return NormCase(4096, 1e-6, 0.0, _BF16, _BF16), ActivationCase(14336, Gating(SILU), _BF16)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    del device
    return {
        "norm of 40 in bf16": NormCase(40, 1e-6, 0.0, _BF16, _BF16),
        "norm of 300, its weight less one, in fp16": NormCase(300, 1e-5, 1.0, _FP16, _FP16),
        "SwiGLU in bf16": ActivationCase(72, Gating(SILU), _BF16),
        "GeGLU in fp16": ActivationCase(40, Gating(GELU_TANH), _FP16),
        "clamped SwiGLU in bf16": ActivationCase(40, Gating(CLAMPED_SILU, 1.702, 7.0), _BF16),
    }
