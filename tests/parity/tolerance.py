"""How far float32 results of one computation may lie apart: bounds from its arithmetic, the same on any processor.

Libraries add the terms of a sum in orders of their own. By the bounds of Higham, Accuracy and Stability of Numerical
Algorithms (2nd edition, 2002), sections 3.1 and 3.5: whatever the order, a computed product of a matrix and a vector
is the exact product of a matrix each of whose entries differs by a factor of at most 1 + gamma(n), where n is the
length of the sums. Rounding errors have signs as good as random, so that usually they grow with the square root of n
instead (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

UNIT_ROUNDOFF = 2.0**-24
"""Of float32: the largest relative error of one operation."""
_LARGEST = 2.0**-9
"""Part of the median result beyond which the median bound excludes too little to be of use."""


def gamma(terms: int) -> float:
    """The largest relative error of a sum of so many products, as a part of the sum of their absolute values."""
    return terms * UNIT_ROUNDOFF / (1 - terms * UNIT_ROUNDOFF)


@torch.inference_mode()
def with_bound(
    module: nn.Module, compute: Callable[[], torch.Tensor], *, terms: int = 1, draws: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `compute` returns, and how far rounding errors in the weights of `module` move each of its rows.

    Each weight is multiplied by a factor between 1 - gamma(n) and 1 + gamma(n), where n is the length of its own sums
    or `terms`, that of the longest sum without a weight, if that is longer: over the tokens of a recurrent state, for
    example. The factors are random, from a fixed seed, and the largest of `draws` changes of the row counts: a row of
    few elements needs more draws. The bound is about ten times what float32 errs by, for the errors within one
    computed sum mostly cancel out, and these weights are moved by the bound for errors that do not.

    # compute: () -> [..., size] float32. Returns [..., size] and [..., 1].

    Raises:
        ValueError: The bounds of most rows are too large to exclude anything: take a better conditioned example.
    """
    expected = compute().clone()
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    exact = [p.clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    bound = torch.zeros_like(expected[..., :1])
    try:
        for _ in range(draws):
            for parameter, value in zip(parameters, exact, strict=True):
                n = max(terms, value.shape[-1] if value.dim() else 1)
                factors = 1 + gamma(n) * (2 * torch.rand(value.shape, generator=generator).double() - 1)
                parameter.copy_(value.double() * factors)
            bound = torch.maximum(bound, (compute() - expected).abs().amax(-1, keepdim=True))
    finally:
        for parameter, value in zip(parameters, exact, strict=True):
            parameter.copy_(value)
    if not (share := float(bound.median() / expected.abs().median())) <= _LARGEST:
        raise ValueError(f"half of the rows move by {share:.1e} of their results; {_LARGEST:.1e} is the limit")
    return expected, bound


class _InFloat64(TorchFunctionMode):
    """Computes in float64 what a model's code asks to compute in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _grouped_products(*wide, **named)
        return func(*wide, **named)


def _grouped_products(
    rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **_unset: None
) -> torch.Tensor:
    """`grouped_mm`, which torch has for up to 32 bits. # [rows, inputs], [groups, inputs, outputs], [groups] ends"""
    parts = [int(end) for end in offs]
    sizes = [end - first for first, end in zip([0, *parts[:-1]], parts, strict=True)]
    found = rows.new_zeros(len(rows), weights.shape[-1])
    found[: parts[-1]] = torch.cat([a @ b for a, b in zip(rows[: parts[-1]].split(sizes), weights, strict=True)])
    return found


@torch.inference_mode()
def in_float64(module: nn.Module, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `compute` returns if `module` computes in float64, from the float32 weights and buffers that it has."""
    default = torch.get_default_dtype()
    module.double()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            exact = compute()
    finally:
        torch.set_default_dtype(default)
        module.float()
    assert exact.dtype is torch.float64
    return exact


FLOAT32_ERROR = 1e-4
"""Largest error of a float32 model's log probabilities, on well-conditioned examples."""


def assert_as_exact(found: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that log probabilities of a float32 model err no more than another float32 model's, `reference`.

    Errors of a token are sums of many roundings that the example amplifies, in both models by the same factors but
    with other signs. So the medians over tokens are alike; the largest are those of one token each, and vary more.
    Where the example amplifies little, errors are below `FLOAT32_ERROR`. # 3 x [tokens, vocab]
    """
    ours, theirs = ((each.double() - exact).abs().amax(-1) for each in (found, reference))
    limit = max(FLOAT32_ERROR, 4 * float(theirs.max()))
    assert ours.max() <= limit, (
        f"an error of {float(ours.max()):.2e}, where the reference errs by {float(theirs.max()):.2e}"
    )
    assert ours.median() <= 2 * theirs.median(), (
        f"a median error of {float(ours.median()):.2e}, where the reference's is {float(theirs.median()):.2e}"
    )


def assert_within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """No element differs from the expected one by more than its bound, which is broadcast; NaN is never within."""
    difference = (found - expected).abs()
    within = difference <= bound
    assert within.all(), (
        f"{int((~within).sum())} of {within.numel()} elements are outside their bounds: the largest difference is "
        f"{float(difference.max()):.2e}, up to {float((difference / bound).max()):.2f} times the bound"
    )
