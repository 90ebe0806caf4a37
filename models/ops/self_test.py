"""The self-test of kernels: cases that compute a small problem with a kernel and compare it with torch.

No kernel equals torch to the bit: sums run in another order and exponentials are approximate. How far a result may be
off follows from how often numbers are rounded and how large the terms of a sum are, so each case derives a bound for
each number; an error beyond the bound has no explanation in rounding. The start, `kaon doctor` and the tests compare
the same cases, which `models.ops.triton.cases` declares next to each family's references.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

import torch

FLOAT32 = 2.0**-16
"""The share of a float32 sum of thousands of terms that its order and approximate functions may change."""
FAILURE_FACTOR = 4.0
"""An error of more bounds than this is a failure. Sound kernels stay below 1 in Triton's interpreter, miscompiled
ones are far above; leaving a sound kernel to torch would cost more than the test gains."""
_LEAST_BOUND = 2.0**-12
_STEPS = 8
_FP8 = 2.0**-3
"""The share that rounding to FP8 may change, twice over."""
_FP8_LEAST = 2.0**-8
"""The same for the smallest numbers, in units of the scale."""
_TINY = 1e-30
_FAR = 2**31
"""Elements, and bytes, beyond which offsets need 64 bits and compilers address memory in another way."""


class Finding(NamedTuple):
    """The result of one comparison."""

    problem: str
    error: float
    """The largest difference from the exact number, in units of its bound; a failure above `FAILURE_FACTOR`."""


class Exact(NamedTuple):
    """What a reference computes: sums in float32, and the sums of their terms' magnitudes."""

    value: torch.Tensor
    magnitude: torch.Tensor


class Problems:
    """Random inputs of problems, the same on each device."""

    def __init__(self, device: torch.device, seed: int = 0, *, are_pools_large: bool = False) -> None:
        """`are_pools_large`: caches are as large as those that serve, and their blocks lie far apart."""
        self.device = device
        self._are_pools_large = are_pools_large
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of mean 0."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.device, dtype)

    def pool(self, num_blocks: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Blocks of a cache, filled with NaN. # [num_blocks, *shape], each block contiguous

        Raises `torch.OutOfMemoryError` where the device has no memory for a large one.
        """
        nan = torch.full((1,), torch.nan, device=self.device).to(dtype)
        if not self._are_pools_large:
            return torch.empty(num_blocks, *shape, dtype=dtype, device=self.device).copy_(nan)
        block = math.prod(shape)
        stride = (_FAR // (num_blocks - 1) // block + 1) * block
        memory = torch.empty((num_blocks - 1) * stride + block, dtype=dtype, device=self.device)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return memory.as_strided((num_blocks, *shape), (stride, *strides)).copy_(nan)

    def first_slot(self, size: int) -> int:
        """The first slot to use of states of so many elements each, which lie one after the other."""
        return _FAR // size + 1 if self._are_pools_large else 0

    def near_one(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers like the weights of norms."""
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
    """Rows of a paged cache whose blocks lie in random order; block 0 belongs to no row."""

    def __init__(self, problems: Problems, lengths: Sequence[int], block_size: int) -> None:
        """`lengths`: tokens of each row."""
        counts = [-(-length // block_size) for length in lengths]
        order = 1 + problems.permutation(sum(counts))
        self.num_blocks = len(order) + 1
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)  # [rows, max(counts)], on the host
        self.slots: list[torch.Tensor] = []
        """By row, the slot of each token: block times `block_size` plus offset. # [length] int64, on the host"""
        for row, (blocks, length) in enumerate(zip(torch.split(order, counts), lengths, strict=True)):
            self.tables[row, : len(blocks)] = blocks
            positions = torch.arange(length)
            self.slots.append(blocks[positions // block_size] * block_size + positions % block_size)


class Case(ABC):
    """A problem of one operator: sizes, types and flags, and a loaded model's weights, of which no copy is made."""

    __slots__ = ()
    operator: ClassVar[str]
    """One of the operators of `kernel_backend`, or `latents`, attention of latents."""
    has_pool: ClassVar[bool] = False
    """Whether kernels read or write a cache: such a case is compared over a small one and over a large one."""
    gives_addresses: ClassVar[bool] = False
    """Whether other kernels take addresses from the results: such a case is compared before all others."""

    @property
    def key(self) -> Hashable:
        """Equal for cases that the same kernels compute, of which one is compared."""
        return self

    @abstractmethod
    def compare(self, problems: Problems) -> Iterator[Finding]:
        """Compute the problem with the kernels and with torch. Raises what the kernels raise."""


def rounding_bound(dtype: torch.dtype) -> float:
    """The share of a number that rounding it to a type a few times may change."""
    # Half of `eps` each time; all of it in Triton's interpreter, which truncates to bfloat16.
    return max(3 * torch.finfo(dtype).eps, _LEAST_BOUND)


def relative_error(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest difference in units of its bound; infinite if a number is not finite that is expected to be.

    Where the expected number or its bound is not finite, any number is right.
    """
    # The smallest numbers of a type lie a step apart.
    step = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    error = (found.float() - expected.float()).abs() / (bound.float() + _STEPS * step).clamp(min=_TINY)
    error = torch.where(found.float().isfinite(), error, torch.inf)[expected.isfinite() & bound.isfinite()]
    return float(error.max()) if len(error) else 0.0


def fp8_bounds(
    codes: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers that stored codes mean, the exact ones clamped to the type's range, and bounds with its rounding."""
    limit = torch.finfo(dtype).max * scale
    exact = exact.clamp(-limit, limit)
    return codes * scale, exact, bound + _FP8 * exact.abs() + _FP8_LEAST * scale


def exact_match(is_equal: bool) -> float:
    """The error of a result that is either right or wrong."""
    return 0.0 if is_equal else float("inf")


def first_failure(cases: Iterable[Case], device: torch.device, seed: int = 0) -> str | None:
    """What is wrong with kernels, in words; None: nothing. Raises what they raise, and `torch.OutOfMemoryError`."""
    with torch.inference_mode():
        return failure_among(finding for case in cases for finding in _findings(case, device, seed))


def compute_all(cases: Iterable[Case], device: torch.device) -> None:
    """Launch all that `first_failure` compares where nothing is wrong. Raises what the kernels raise."""
    with torch.inference_mode():
        for case in cases:
            for _ in _findings(case, device, 0):
                pass


def _findings(case: Case, device: torch.device, seed: int) -> Iterator[Finding]:
    yield from case.compare(Problems(device, seed))
    if case.has_pool:
        # Where there is no memory for a large pool now, no large one will serve.
        with suppress(torch.OutOfMemoryError):
            for problem, error in case.compare(Problems(device, seed, are_pools_large=True)):
                yield Finding(f"{problem}, over a cache of more than 2 GiB", error)


def failure_among(findings: Iterable[Finding]) -> str | None:
    """What the first failure among comparisons is, in words; None: there is none."""
    for problem, error in findings:
        if error == float("inf"):
            return f"its numbers are not the right ones: {problem}"
        if not error <= FAILURE_FACTOR:
            return f"its numbers are off by {error:.3g} times what rounding explains: {problem}"
    return None
