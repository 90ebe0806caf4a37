"""Gated activations of feed-forward layers, each by the fastest operator that supports the tensor."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import runtime
from models.ops.types import CLAMPED_SILU, GELU_TANH, SILU, Gating

GatedActivation = Callable[[torch.Tensor], torch.Tensor]
"""Rows whose first half are gates, to their product with the second. # [tokens, 2 * features] -> [tokens, features]"""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, 2020) of a row's halves. # [tokens, 2 * features] -> [tokens, features]"""
    if runtime.runs(gate_up):
        return ops.gated(gate_up, SILU)
    if aiter.runs("activation", gate_up):
        return dense.silu_and_mul(gate_up)
    if triton.runs(gate_up, operator="activation"):
        return _by_kernel(gate_up, Gating(SILU))
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of a row's halves, GELU by tanh (Gemma). # [tokens, 2 * features] -> [tokens, features]"""
    if runtime.runs(gate_up):
        return ops.gated(gate_up, GELU_TANH)
    if aiter.runs("activation", gate_up):
        return dense.gelu_tanh_and_mul(gate_up)
    if triton.runs(gate_up, operator="activation"):
        return _by_kernel(gate_up, Gating(GELU_TANH))
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of a row's halves, clamped to `limit` first (gpt-oss).

    # [tokens, 2 * features] -> [tokens, features]
    """
    if runtime.runs(gate_up):
        return ops.gated(gate_up, CLAMPED_SILU, alpha=alpha, limit=limit)
    if triton.runs(gate_up, operator="activation"):
        return _by_kernel(gate_up, Gating(CLAMPED_SILU, alpha, limit))
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)


def operator_of(activation: GatedActivation) -> int | None:
    """The activation's number in `models.ops.types`; None where it has none, or has parameters."""
    if activation is swiglu:
        return SILU
    return GELU_TANH if activation is geglu_tanh else None


def gating_of(activation: GatedActivation) -> Gating | None:
    """The activation as operators take it; None where they have none like it."""
    if isinstance(activation, partial) and activation.func is clamped_swiglu:
        return Gating(CLAMPED_SILU, **activation.keywords)
    operator = operator_of(activation)
    return None if operator is None else Gating(operator)


def _by_kernel(gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
    import models.ops.triton.elementwise as kernels

    return kernels.gated(gate_up, gating.activation, alpha=gating.alpha, limit=gating.limit)
