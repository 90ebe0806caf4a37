"""Torch references and self-test cases of norms and gated activations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from models.ops.self_test import FLOAT32, Case, Finding, Problems, relative_error, rounding_bound
from models.ops.triton.configs import target_of
from models.ops.triton.elementwise import ADD_NORM, NORM_ADD, PLAIN, activated, rms_norm
from models.ops.types import CLAMPED_SILU, CLIPPED_SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, SILU, Gating
from models.ops.weight_formats import FP8_GROUP, RoundedRows


def reference_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    bias: torch.Tensor | None = None,
    is_centred: bool = False,
    residual: torch.Tensor | None = None,
    mode: int = PLAIN,
    x_scale: float = 1.0,
    sum_scale: float = 1.0,
) -> torch.Tensor:
    """As the kernel's launcher; `residual` becomes the sum where `mode` is `ADD_NORM`."""
    if mode == ADD_NORM:
        assert residual is not None
        x = residual.copy_(x_scale * x.float() + residual.float())
    exact = x.float()
    if is_centred:
        exact = exact - exact.mean(-1, keepdim=True)
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    if bias is not None:
        normed = normed + bias.float()
    if mode == NORM_ADD:
        assert residual is not None
        return (sum_scale * (residual.float() + normed.to(x.dtype).float())).to(x.dtype)
    return normed.to(x.dtype)


def reference_gated(gate_up: torch.Tensor, activation: int, *, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """As the kernel's launcher."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == SILU:
        product = F.silu(gate) * up
    elif activation == GELU_TANH:
        product = F.gelu(gate, approximate="tanh") * up
    elif activation == GELU:
        product = F.gelu(gate) * up
    elif activation in (RELU, RELU_SQUARED):
        product = F.relu(gate) ** (1 if activation == RELU else 2) * up
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        product = F.silu(gate) * up if activation == CLIPPED_SILU else (up + 1) * gate * torch.sigmoid(alpha * gate)
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
    has_bias: bool = False
    is_centred: bool = False
    scale: float = 1.0
    """Of what is added to the residual, or of the sum with it."""
    weight_rows: int = 1
    """Heads of a row that have weights of their own."""
    rounds: bool = False
    """Whether the result is rounded to FP8 as well."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        """See `Case`: each mode on the same rows."""
        rows = self.weight_rows
        shape = (_ROWS, self.size) if rows == 1 else (_ROWS, rows, self.size)
        x, residual = (problems.normal(*shape, dtype=self.dtype) for _ in range(2))
        weight = (problems.near_one(*shape[1:]) - self.offset).to(self.weight_dtype)
        bias = problems.normal(*shape[1:], dtype=self.weight_dtype) if self.has_bias else None
        how: dict[str, Any] = {"offset": self.offset, "bias": bias, "is_centred": self.is_centred}
        share, name = rounding_bound(self.dtype), f"a norm of {self.size}"
        for mode in self.modes:
            summed = None if mode == PLAIN else residual.clone()
            scales: dict[str, Any] = {"x_scale": self.scale} if mode == ADD_NORM else {"sum_scale": self.scale}
            rounded = _memory(x) if self.rounds else None
            found = rms_norm(x, weight, self.eps, residual=summed, mode=mode, rounded=rounded, **how, **scales)
            if rounded is not None:
                yield Finding(f"{name} in FP8", _rounding_error(found, rounded))
            if mode == NORM_ADD:
                normed, _ = self._exact(x, weight, bias)
                total = self.scale * (residual.float() + normed)
                bound = share * (total.abs() + self.scale * normed.abs())
                yield Finding(f"a sum after {name}", relative_error(found, total, bound))
                continue
            if summed is not None:
                added = self.scale * x.float()
                total = added + residual.float()
                bound = share * (total.abs() + added.abs() * (self.scale != 1.0))
                yield Finding(f"the sum before {name}", relative_error(summed, total, bound))
            exact, magnitude = self._exact(x if summed is None else summed, weight, bias)
            yield Finding(
                name if summed is None else f"{name} of a sum", relative_error(found, exact, share * magnitude)
            )

    def _exact(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm, and the magnitude of its terms."""
        arguments = (x.float(), weight.float(), self.eps)
        scaled = reference_rms_norm(*arguments, offset=self.offset, is_centred=self.is_centred)
        if bias is None:
            return scaled, scaled.abs()
        return scaled + bias.float(), scaled.abs() + bias.float().abs()


@dataclass(frozen=True, slots=True)
class ActivationCase(Case):
    """An activation of rows, gated or alone."""

    operator: ClassVar[str] = "activation"
    features: int
    gating: Gating
    dtype: torch.dtype
    is_gated: bool = True
    rounds: bool = False
    """Whether the result is rounded to FP8 as well."""

    def compare(self, problems: Problems) -> Iterator[Finding]:
        gate_up = problems.normal(_ROWS, 2 * self.features, dtype=self.dtype, scale=3.0)
        activation, alpha, limit = self.gating
        gates, ups = gate_up.chunk(2, -1)
        if not self.is_gated:
            ups.fill_(1.0)
        rounded = _memory(gates) if self.rounds else None
        found = activated(gates, activation, ups if self.is_gated else None, alpha=alpha, limit=limit, rounded=rounded)
        if rounded is not None:
            yield Finding(f"an activation of {self.features} in FP8", _rounding_error(found, rounded))
        exact = reference_gated(gate_up.float(), activation, alpha=alpha, limit=limit)
        gate, up = gate_up.float().abs().chunk(2, -1)
        steepness = gate if activation == RELU_SQUARED else 1.0
        bound = rounding_bound(self.dtype) * exact.abs() + FLOAT32 * gate * (up + 1) * steepness
        yield Finding(f"an activation of {self.features}", relative_error(found, exact, bound))
        gates[0, 0] = torch.nan
        broken = activated(gates, activation, ups if self.is_gated else None, alpha=alpha, limit=limit)
        yield Finding(f"an activation of a NaN among {self.features}", 0.0 if broken[0, 0].isnan() else torch.inf)


def _memory(x: torch.Tensor) -> RoundedRows:
    fp8 = target_of(x.device).fp8_dtype
    assert fp8 is not None, "rows are rounded where the hardware has FP8"
    return RoundedRows.empty(len(x), x.shape[1], fp8, x.device)


def _rounding_error(x: torch.Tensor, rounded: RoundedRows) -> float:
    """Between rows and what a kernel made of them in FP8: half of a code's step, of the largest number at least."""
    scales = rounded.scales.repeat_interleave(FP8_GROUP, 1)[:, : x.shape[1]]
    return relative_error(rounded.codes.float() * scales, x.float(), x.float().abs() / 16 + scales * 2.0**-9)


_BF16, _FP16 = torch.bfloat16, torch.float16


def common_cases(device: torch.device) -> tuple[Case, ...]:
    """Sizes of a model of 8 billion parameters."""
    del device
    return NormCase(4096, 1e-6, 0.0, _BF16, _BF16), ActivationCase(14336, Gating(SILU), _BF16)


def small_cases(device: torch.device) -> dict[str, Case]:
    """Sizes for Triton's interpreter."""
    return {
        "norm of 40 in bf16": NormCase(40, 1e-6, 0.0, _BF16, _BF16),
        "norm of 300, its weight less one, in fp16": NormCase(300, 1e-5, 1.0, _FP16, _FP16),
        "SwiGLU in bf16": ActivationCase(72, Gating(SILU), _BF16),
        "GeGLU in fp16": ActivationCase(40, Gating(GELU_TANH), _FP16),
        "layer norm of 40 with a bias, scaled sums, in bf16": NormCase(
            40, 1e-5, 0.0, _BF16, _BF16, has_bias=True, is_centred=True, scale=0.25
        ),
        "layer norm of 24 by head, in fp16": NormCase(24, 1e-5, 1.0, _FP16, _FP16, is_centred=True, weight_rows=3),
        "gated GELU in bf16": ActivationCase(40, Gating(GELU), _BF16),
        "gated ReLU in fp16": ActivationCase(40, Gating(RELU), _FP16),
        "squared ReLU, not gated, in bf16": ActivationCase(72, Gating(RELU_SQUARED), _BF16, is_gated=False),
        "clamped SwiGLU in bf16": ActivationCase(40, Gating(CLAMPED_SILU, 1.702, 7.0), _BF16),
        "clipped SwiGLU in fp16": ActivationCase(40, Gating(CLIPPED_SILU, limit=7.0), _FP16),
    } | (
        {}
        if target_of(device).fp8 is None
        else {
            "norm of 300 in FP8 too": NormCase(300, 1e-6, 0.0, _BF16, _BF16, rounds=True),
            "SwiGLU in FP8 too": ActivationCase(300, Gating(SILU), _BF16, rounds=True),
        }
    )
