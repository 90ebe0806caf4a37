"""Activations of feed-forward layers, gated or not, each by the fastest operator that supports the tensor."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from models.ops import aiter, triton
from models.ops.aiter import operators as dense
from models.ops.cpu import dense as ops
from models.ops.cpu import gated_delta as gate_ops
from models.ops.cpu import runtime
from models.ops.stored_weight import Feed
from models.ops.types import CLAMPED_SILU, CLIPPED_SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, SILU, Gating
from models.ops.weight_formats import RoundedRows

GatedActivation = Callable[[torch.Tensor], torch.Tensor]
"""The activated first half of each row times the second half. # [tokens, 2 * features] -> [tokens, features]"""

ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU, "relu2": RELU_SQUARED}
"""The operators' numbers by name."""


def gated_activation(name: str) -> GatedActivation:
    """`activation(gate) * up` of a row's halves, of a name of `ACTIVATIONS` (Shazeer, 2020)."""
    return _GATED[ACTIVATIONS[name]]


def activate(gate: torch.Tensor, activation: int, up: torch.Tensor | None = None) -> torch.Tensor:
    """`activation(gate) * up`, or without `up` the activation alone; by the operators' number. # [tokens, features]"""
    if runtime.runs(gate) and (up is None or runtime.runs(up)):
        return ops.activated(gate, activation, up)
    if triton.runs(gate, operator="activation"):
        import models.ops.triton.elementwise as kernels

        return kernels.activated(gate, activation, up)
    out = torch_activation(gate, activation)
    return out if up is None else out * up


def gate_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)`, of each element or of whole heads.

    # [tokens, heads, dim], the same or [tokens, heads] -> [tokens, heads, dim]
    """
    if runtime.runs(x, gate):
        return gate_ops.gate_heads(x, gate)
    return x * (gate if gate.dim() == x.dim() else gate[..., None]).sigmoid()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a row's halves. # [tokens, 2 * features] -> [tokens, features]"""
    if not runtime.runs(gate_up) and aiter.runs("activation", gate_up):
        return dense.silu_and_mul(gate_up)
    return _gated(gate_up, SILU)


def geglu_tanh(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of a row's halves, GELU by tanh (Gemma). # [tokens, 2 * features] -> [tokens, features]"""
    if not runtime.runs(gate_up) and aiter.runs("activation", gate_up):
        return dense.gelu_tanh_and_mul(gate_up)
    return _gated(gate_up, GELU_TANH)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of a row's halves. # [tokens, 2 * features] -> [tokens, features]"""
    return _gated(gate_up, GELU)


def reglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`relu(gate) * up` of a row's halves. # [tokens, 2 * features] -> [tokens, features]"""
    return _gated(gate_up, RELU)


def squared_reglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`relu(gate)^2 * up` of a row's halves. # [tokens, 2 * features] -> [tokens, features]"""
    return _gated(gate_up, RELU_SQUARED)


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


def clipped_swiglu(gate_up: torch.Tensor, *, limit: float) -> torch.Tensor:
    """`silu(gate) * up` of a row's halves, clamped to `limit` first (DeepSeek-V4).

    # [tokens, 2 * features] -> [tokens, features]
    """
    if runtime.runs(gate_up):
        return ops.gated(gate_up, CLIPPED_SILU, limit=limit)
    if triton.runs(gate_up, operator="activation"):
        return _by_kernel(gate_up, Gating(CLIPPED_SILU, limit=limit))
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clipped_activation(name: str, limit: float) -> GatedActivation:
    """As `gated_activation`, with a row's halves clamped to `limit` first. torch clamps for others than SiLU."""
    if name == "silu":
        return partial(clipped_swiglu, limit=limit)
    return partial(_clipped, activation=gated_activation(name), limit=limit)


def _clipped(gate_up: torch.Tensor, *, activation: GatedActivation, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1))


_GATED = {SILU: swiglu, GELU_TANH: geglu_tanh, GELU: geglu, RELU: reglu, RELU_SQUARED: squared_reglu}
_OPERATORS: dict[GatedActivation, int] = {gated: number for number, gated in _GATED.items()}
_PARAMETRIC: dict[Callable[..., torch.Tensor], int] = {clamped_swiglu: CLAMPED_SILU, clipped_swiglu: CLIPPED_SILU}


def gating_of(activation: GatedActivation) -> Gating | None:
    """The activation in the operators' representation; None if they do not support it."""
    if isinstance(activation, partial):
        operator, parameters = _PARAMETRIC.get(activation.func), activation.keywords
    else:
        operator, parameters = _OPERATORS.get(activation), {}
    return None if operator is None else Gating(operator, **parameters)


def _gated(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    if runtime.runs(gate_up):
        return ops.gated(gate_up, activation)
    if triton.runs(gate_up, operator="activation"):
        return _by_kernel(gate_up, Gating(activation))
    gate, up = gate_up.chunk(2, dim=-1)
    return torch_activation(gate, activation) * up


def torch_activation(x: torch.Tensor, activation: int) -> torch.Tensor:
    """The activation of the operators' number, computed by torch. # any shape -> the same"""
    if activation == SILU:
        return F.silu(x)
    if activation in (GELU, GELU_TANH):
        return F.gelu(x, approximate="none" if activation == GELU else "tanh")
    return F.relu(x) if activation == RELU else F.relu(x).square()


def gated_for(gate_up: torch.Tensor, activation: GatedActivation, feed: Feed) -> torch.Tensor:
    """`activation(gate_up)`, rounded for the next product if one kernel computes both.

    # [tokens, 2 * features] -> [tokens, features]
    """
    gating = gating_of(activation)
    is_ours = gating is not None and not runtime.runs(gate_up) and not aiter.takes("activation")
    if gating is None or not is_ours or not triton.runs(gate_up, operator="activation"):
        return activation(gate_up)
    rounded = feed.memory(len(gate_up), gate_up.shape[1] // 2, gate_up)
    out = _by_kernel(gate_up, gating, rounded)
    feed.give(out, rounded)
    return out


def _by_kernel(gate_up: torch.Tensor, gating: Gating, rounded: RoundedRows | None = None) -> torch.Tensor:
    import models.ops.triton.elementwise as kernels

    return kernels.gated(gate_up, gating.activation, alpha=gating.alpha, limit=gating.limit, rounded=rounded)
