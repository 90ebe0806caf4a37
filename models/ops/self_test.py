"""The self-test of kernels: cases that compute a small problem with a kernel and compare it with torch.

A correct kernel does not equal torch bit for bit: sums have another order, and exponentials are approximate. The
expected error of each number follows from how often numbers are rounded, and from the magnitude of a sum's terms. Each
case therefore computes an error bound for each number; a larger error is not caused by rounding. The start, `kaon
doctor` and the tests compare the same cases, which `models.ops.triton.cases` defines together with the references.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

import torch

FLOAT32 = 2.0**-16
"""Relative error of a float32 sum of thousands of terms, caused by its order and by approximate functions."""
FAILURE_FACTOR = 4.0
"""An error of more than this many bounds is a failure. Correct kernels stay below 1 in Triton's interpreter, and
miscompiled ones are far above. The margin avoids replacing a correct kernel by torch, which would be much slower."""
_LEAST_BOUND = 2.0**-12
_STEPS = 8
_FP8 = 2.0**-3
"""Twice the relative error of rounding to FP8."""
_FP8_LEAST = 2.0**-8
"""The error of the smallest FP8 numbers, in units of the scale."""
_TINY = 1e-30
_FAR = 2**31
"""Number of elements, or bytes, from which offsets need 64 bits, so that compilers generate other addressing."""


class Finding(NamedTuple):
    """The result of one comparison."""

    problem: str
    error: float
    """The largest difference from the exact number, in units of its bound; a failure above `FAILURE_FACTOR`."""


class Exact(NamedTuple):
    """The result of a reference: sums in float32, and the sums of the terms' magnitudes."""

    value: torch.Tensor
    magnitude: torch.Tensor


class Problems:
    """Random inputs of problems, equal on each device."""

    def __init__(self, device: torch.device, seed: int = 0, *, are_pools_large: bool = False) -> None:
        """`are_pools_large`: whether caches are as large as in service, with blocks that are far apart."""
        self.device = device
        self._are_pools_large = are_pools_large
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of mean 0."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.device, dtype)

    def pool(self, num_blocks: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Blocks of a cache, filled with NaN. # [num_blocks, *shape], each block contiguous

        Raises `torch.OutOfMemoryError` if the device has no memory for a large pool.
        """
        nan = torch.full((1,), torch.nan, device=self.device).to(dtype)
        if not self._are_pools_large:
            return torch.empty(num_blocks, *shape, dtype=dtype, device=self.device).copy_(nan)
        block = math.prod(shape)
        # An odd number of blocks apart, so that 16 divides the stride only if it divides a block's size.
        stride = (_FAR // (num_blocks - 1) // block + 1 | 1) * block
        memory = torch.empty((num_blocks - 1) * stride + block, dtype=dtype, device=self.device)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return memory.as_strided((num_blocks, *shape), (stride, *strides)).copy_(nan)

    def first_slot(self, size: int) -> int:
        """Return the first slot to use in contiguous states of `size` elements each."""
        return _FAR // size + 1 if self._are_pools_large else 0

    def near_one(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random numbers near 1, like the weights of norms."""
        return (1 + 0.2 * torch.randn(shape, generator=self._generator)).to(self.device, dtype)

    def permutation(self, count: int) -> torch.Tensor:
        """The numbers below `count` in random order. # [count] int64, on the host"""
        return torch.randperm(count, generator=self._generator)

    def sample(self, below: int, count: int) -> list[int]:
        """At most `count` distinct numbers below a bound, sorted."""
        return sorted(set(torch.randint(below, (count,), generator=self._generator).tolist()))

    def distinct_rows(self, below: int, rows: int, count: int) -> torch.Tensor:
        """Rows of distinct numbers below a bound. # [rows, count] int64"""
        return torch.rand(rows, below, generator=self._generator).topk(count).indices.to(self.device)


class PagedRows:
    """Rows of a paged cache whose blocks are in random order; block 0 belongs to no row."""

    def __init__(self, problems: Problems, lengths: Sequence[int], block_size: int) -> None:
        """`lengths`: number of tokens of each row."""
        counts = [-(-length // block_size) for length in lengths]
        order = 1 + problems.permutation(sum(counts))
        self.num_blocks = len(order) + 1
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)  # [rows, max(counts)], on the host
        self.slots: list[torch.Tensor] = []
        """For each row, the slot of each token: block times `block_size` plus offset. # [length] int64, on the host"""
        for row, (blocks, length) in enumerate(zip(torch.split(order, counts), lengths, strict=True)):
            self.tables[row, : len(blocks)] = blocks
            positions = torch.arange(length)
            self.slots.append(blocks[positions // block_size] * block_size + positions % block_size)


class Case(ABC):
    """A problem of one operator: sizes, dtypes and flags, and references to a loaded model's weights."""

    __slots__ = ()
    operator: ClassVar[str]
    """One of the operators of `kernel_backend`, or `latents` for latent attention."""
    is_in_aiter: ClassVar[bool] = True
    """Whether aiter computes this where it computes the operator."""
    has_pool: ClassVar[bool] = False
    """Whether kernels read or write a cache; the case is then compared with a small cache and with a large one."""
    gives_addresses: ClassVar[bool] = False
    """Whether other kernels use the results as addresses; the case is then compared before all others."""

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for cases that the same kernels compute; one case per key is compared."""
        return self

    @abstractmethod
    def compare(self, problems: Problems) -> Iterator[Finding]:
        """Compute the problem with the kernels and with torch. Exceptions of the kernels are not caught."""


def rounding_bound(dtype: torch.dtype) -> float:
    """Return the relative error of rounding a number to a dtype a few times."""
    # Each rounding has an error of eps / 2, but eps in Triton's interpreter, which truncates to bfloat16.
    return max(3 * torch.finfo(dtype).eps, _LEAST_BOUND)


def relative_error(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest difference in units of its bound.

    Infinite if a number is not finite although the expected one is. If the expected number or its bound is not finite,
    any number is accepted.
    """
    # Subnormal numbers of a dtype have a constant spacing, which is the smallest possible error.
    step = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    error = (found.float() - expected.float()).abs() / (bound.float() + _STEPS * step).clamp(min=_TINY)
    error = torch.where(found.float().isfinite(), error, torch.inf)[expected.isfinite() & bound.isfinite()]
    return float(error.max()) if len(error) else 0.0


def fp8_bounds(
    codes: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the dequantised codes, the exact numbers clamped to the dtype's range, and bounds that include the
    rounding to the dtype."""
    limit = torch.finfo(dtype).max * scale
    exact = exact.clamp(-limit, limit)
    return codes * scale, exact, bound + _FP8 * exact.abs() + _FP8_LEAST * scale


def exact_match(is_equal: bool) -> float:
    """Return the error of a result that is either correct or not."""
    return 0.0 if is_equal else float("inf")


def first_failure(cases: Iterable[Case], device: torch.device, seed: int = 0) -> str | None:
    """Compare cases, and describe the first failure; None if there is none.

    Exceptions of the kernels and `torch.OutOfMemoryError` are not caught.
    """
    with torch.inference_mode():
        return failure_among(finding for case in cases for finding in _findings(case, device, seed))


def compute_all(cases: Iterable[Case], device: torch.device) -> None:
    """Launch all kernels that `first_failure` launches if there is no failure. Exceptions of the kernels are not
    caught."""
    with torch.inference_mode():
        for case in cases:
            for _ in _findings(case, device, 0):
                pass


def _findings(case: Case, device: torch.device, seed: int) -> Iterator[Finding]:
    yield from case.compare(Problems(device, seed))
    if case.has_pool:
        # If there is no memory for a large pool now, the service will not have a large one either.
        with suppress(torch.OutOfMemoryError):
            for problem, error in case.compare(Problems(device, seed, are_pools_large=True)):
                yield Finding(f"{problem}, over a cache of more than 2 GiB", error)


def failure_among(findings: Iterable[Finding]) -> str | None:
    """Describe the first failure among comparisons; None if there is none."""
    for problem, error in findings:
        if error == float("inf"):
            return f"its numbers are not the right ones: {problem}"
        if not error <= FAILURE_FACTOR:
            return f"its numbers are off by {error:.3g} times what rounding explains: {problem}"
    return None
