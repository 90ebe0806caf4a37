"""What a check is: problems that kernels compute, and how far they are from torch's numbers. Run at the start.

Nobody knows what a kernel gives to the bit: sums are made in another order, exponentials are approximate. How far it
may be off follows from how often a number is rounded, and from how large the terms of its sum are; so a check knows a
bound for each number, and what is over it no rounding explains.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch

FLOAT32 = 2.0**-16
"""Of the terms of a sum of thousands in float32: what its order, and approximate functions, may change."""
WRONG = 4.0
"""Times a bound that no rounding explains. Sound kernels stay below 1 in Triton's interpreter, and what a compiler
spoils is off by far more; to leave a sound one to torch would cost more than the check is worth."""
_LEAST_SLACK = 2.0**-12
_STEPS = 8
_FP8 = 2.0**-3
"""What rounding to FP8 may change, twice over, as a share."""
_FP8_LEAST = 2.0**-8
"""And of the smallest numbers."""
_TINY = 1e-30


class Finding(NamedTuple):
    """How far one problem's numbers are off."""

    problem: str
    error: float
    """The largest difference from the right number, over what rounding explains: wrong where it is over `WRONG`."""


class Numbers:
    """Random numbers for problems, the same on each device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._made = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """About 0."""
        return (torch.randn(shape, generator=self._made) * scale).to(self.device, dtype)

    def near_one(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As the weights of norms are."""
        return (1 + 0.2 * torch.randn(shape, generator=self._made)).to(self.device, dtype)

    def order(self, count: int) -> torch.Tensor:
        """The numbers below `count` in some order. # [count] int64, on the host"""
        return torch.randperm(count, generator=self._made)

    def some(self, below: int, count: int) -> list[int]:
        """At most so many numbers below a bound, in order."""
        return sorted(set(torch.randint(below, (count,), generator=self._made).tolist()))

    def rows_of_different(self, below: int, rows: int, count: int) -> torch.Tensor:
        """In each row different numbers. # [rows, count] int64"""
        return torch.rand(rows, below, generator=self._made).topk(count).indices.to(self.device)


Check: TypeAlias = Callable[[Numbers], Iterator[Finding]]


def slack(dtype: torch.dtype) -> float:
    """What rounding a number to a type a few times may change, as a share of it."""
    # Half of `eps` each time; all of it in Triton's interpreter, which cuts bfloat16 off.
    return max(3 * torch.finfo(dtype).eps, _LEAST_SLACK)


def excess(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest difference over its bound, infinite where a number is none. What is expected to be none is free."""
    # The smallest numbers of a type lie a step apart.
    step = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    over = (found.float() - expected.float()).abs() / (bound.float() + _STEPS * step).clamp(min=_TINY)
    over = torch.where(found.float().isfinite(), over, torch.inf)[expected.isfinite() & bound.isfinite()]
    return float(over.max()) if len(over) else 0.0


def of_fp8(
    codes: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers of codes that stand for so many times theirs, what they should be, and their bounds."""
    limit = torch.finfo(dtype).max * scale
    exact = exact.clamp(-limit, limit)
    return codes * scale, exact, bound + _FP8 * exact.abs() + _FP8_LEAST * scale


def unless(is_right: bool) -> float:
    """The error of what is right or wrong, and nothing between."""
    return 0.0 if is_right else float("inf")


def wrong(checks: Iterable[Check], device: torch.device, seed: int = 0) -> str | None:
    """What is wrong with kernels, in words; None: nothing. Raises what they raise, and `torch.OutOfMemoryError`."""
    with torch.inference_mode():
        for check in checks:
            for problem, error in check(Numbers(device, seed)):
                if not error <= WRONG:
                    times = "are not the right ones" if error == float("inf") else f"are off by {error:.3g} times"
                    why = "" if error == float("inf") else " what rounding explains"
                    return f"its numbers {times}{why}: {problem}"
    return None
