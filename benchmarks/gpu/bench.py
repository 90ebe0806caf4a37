"""`Bench`: the measured device, the time that its work takes, and its limits."""

import functools
import importlib
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from engine.runner.device import Device, GPUDevice, HostDevice
from models.ops import triton as kernels

_FLUSH_BYTES = 1 << 29
"""Bytes written between two repetitions: more than any chip's caches can store."""
_SECONDS_A_CASE = 0.25
_T = TypeVar("_T")


Values: TypeAlias = dict[str, float | str]
"""Figures and remarks of a case, by column. A column "of the ..." holds a ratio, which is shown in percent."""


class Case(NamedTuple):
    """One row of a table. `run` raises an error if the case cannot be measured; its message becomes the row."""

    name: str
    run: Callable[[], Values]


class Wrong(ValueError):
    """The measured operation returns wrong results."""


class Ceilings(NamedTuple):
    """The highest rates measured on the device."""

    bandwidth: float
    """Bytes per second, reads and writes together."""
    matrix_rate: float
    """Floating-point operations per second of a bfloat16 product."""


class DryDevice(HostDevice):
    """A CPU that captures: a graph is the call itself, as in the model runners of a dry run."""

    has_graphs = True


class Bench:
    """A GPU; or, for a dry run, the CPU, which runs everything on small problems in Triton's interpreter."""

    def __init__(self, device: torch.device, *, is_quick: bool = False) -> None:
        """Raises `RuntimeError` if the kernels do not run on the device."""
        self.is_quick, self.is_dry = is_quick, device.type == "cpu"
        self.device = device if self.is_dry else torch.device(device.type, device.index or 0)
        self.dtype = torch.float32 if self.is_dry else torch.bfloat16
        if self.is_dry:
            # This module corrects products and conversions of the interpreter.
            importlib.import_module("tests.parity.triton_interpreter")
        else:
            torch.cuda.set_device(self.device)
        self.device_api: Device = DryDevice() if self.is_dry else GPUDevice(self.device)
        if (reason := kernels.start(self.device)) is not None:
            raise RuntimeError(f"the kernels do not run: {reason}")
        torch.manual_seed(0)

    def size(self, real: _T, dry: _T) -> _T:
        """Select the size of a problem, which is small in a dry run."""
        return dry if self.is_dry else real

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed numbers: zeros would be computed faster than real data."""
        return (torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)).mul_(scale)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    def is_broken(self) -> bool:
        """Whether this process can no longer use the device, or torch's memory on it, as after an illegal access."""
        try:
            self.synchronize()
            if not self.is_dry:
                torch.cuda.empty_cache()
                torch.rand(1, device=self.device)
        except RuntimeError:
            return True
        return False

    def free_bytes(self) -> int:
        """Free bytes of the device's memory, including what torch caches."""
        if self.is_dry:
            return 1 << 32
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def mark(self) -> "Mark":
        """Record a point in the enqueued work, from or to which time is measured."""
        return Mark(self.is_dry)

    def seconds(self, run: Callable[[], object], *, in_graph: bool = True) -> float:
        """The median time of the device's work in `run`; caches are flushed before each repetition.

        By default the work runs from a captured graph, which excludes the time of the host's launches.
        """
        run()
        if self.is_dry:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        work = self._captured(run) if in_graph else run
        took = self._repeat(work, 3)
        count = int(min(max(_SECONDS_A_CASE / (statistics.median(took) + 3e-4), 10), 100))
        return statistics.median(self._repeat(work, count))

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        def enqueue() -> None:
            run()

        self.synchronize()
        # Each graph has its own memory pool: libraries may still use memory that they took from the pool of a deleted
        # graph.
        device = self.device_api if self.is_dry else GPUDevice(self.device)
        with torch.inference_mode():
            return device.capture(enqueue).replay

    def _repeat(self, work: Callable[[], object], count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            self._flushed.zero_()
            begin = self.mark()
            work()
            pairs.append((begin, self.mark()))
        self.synchronize()
        return [begin.seconds_to(end) for begin, end in pairs]

    @functools.cached_property
    def _flushed(self) -> torch.Tensor:
        return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        """The limits, measured once in each process, because clocks differ between processes."""
        return Ceilings(self.copied_bytes_per_second(4), self.product_rate(8192))

    def copied_bytes_per_second(self, gib: int) -> float:
        """Bytes per second read and written by a copy of `gib` GiB."""
        num_bytes = self.size(gib << 30, 1 << 20)
        source = torch.empty(num_bytes // 4, device=self.device).normal_()
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source), in_graph=False)

    def product_rate(self, size: int) -> float:
        """Operations per second of a product of two square matrices."""
        size = self.size(size, 64)
        left, right = (self.random(size, size) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: left @ right, in_graph=False)

    def bound(self, *, num_bytes: float = 0.0, operations: float = 0.0, rate: float = 1.0) -> float:
        """The least time that any implementation takes to move the bytes, or to multiply at `rate` times bfloat16's
        rate."""
        ceilings = self.ceilings
        return max(num_bytes / ceilings.bandwidth, operations / (rate * ceilings.matrix_rate))

    def kernel(
        self,
        run: Callable[[], torch.Tensor],
        expected: Callable[[], torch.Tensor] | None,
        *,
        num_bytes: float = 0.0,
        operations: float = 0.0,
        rate: float = 1.0,
        tolerance: float = 1e-2,
        baselines: Mapping[str, Callable[[], object]] | None = None,
    ) -> Values:
        """Check a kernel against its reference, then time it against its bound and its `baselines`.

        `expected`: the reference; None if the caller checks the result. `tolerance`: limit of the error's norm
        relative to that of the expected values. Raises `Wrong` if it is exceeded.
        """
        with torch.inference_mode():
            checked = {} if expected is None else self.checked(run(), expected(), tolerance)
            bound, took = self.bound(num_bytes=num_bytes, operations=operations, rate=rate), self.seconds(run)
            values: Values = {"us": took * 1e6, "bound, us": bound * 1e6, "of the bound": bound / took}
            for name, other in (baselines or {}).items():
                try:
                    values[f"{name}, us"] = self.seconds(other) * 1e6
                except (RuntimeError, AttributeError) as error:
                    values[f"{name}, us"] = first_line(error)
            return {**values, **checked}

    def checked(self, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-2) -> Values:
        """Return a result's error as a column. Raises `Wrong` if it is too large."""
        error = relative_error(found, expected)
        if not error <= tolerance:
            raise Wrong(f"it is off by {error:.2g} of what is right, more than {tolerance:.2g}")
        return {"error": f"{error:.1e}"}


class Mark:
    """An event of the device; in a dry run, a time on the host."""

    def __init__(self, is_dry: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._moment = time.perf_counter()
        if not is_dry:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def seconds_to(self, end: "Mark") -> float:
        """Seconds from this event to `end`; both must have completed."""
        if self._event is None or end._event is None:
            return end._moment - self._moment
        return float(self._event.elapsed_time(end._event)) / 1e3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error's norm relative to that of the expected values; infinite if there is a NaN."""
    wanted = expected.double()
    error = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def first_line(error: BaseException) -> str:
    """The first line of an error, for a table's cell."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0].replace("|", "/")
    return text if len(text) <= 200 else f"{text[:200]}..."


# The device, its driver, and the libraries' versions.


def describe(device: str) -> dict[str, str] | None:
    """Properties by name, in the order of the report; None if there is no such device."""
    import torch

    found = {}
    if device != "cpu":
        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(device)
        arch = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
        found["device"] = f"{properties.name} ({arch}, {properties.multi_processor_count} processors)"
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["driver"] = _driver() or "unknown"
        found["ROCm" if torch.version.hip else "CUDA"] = str(torch.version.hip or torch.version.cuda)
    else:
        found["device"] = "CPU (a dry run, whose figures say nothing)"
    found["torch"] = str(torch.__version__)
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = _own_version(name)
    found["Python"] = platform.python_version()
    return found


def _own_version(name: str) -> str:
    """The version of a module; ROCm's Triton is installed under another name than its own."""
    from importlib import import_module

    try:
        return str(import_module(name).__version__)
    except ImportError:
        return "none"


def _driver(root: Path = Path("/")) -> str | None:
    """Version of the kernel driver of NVIDIA or AMD."""
    for path, pattern in (
        ("proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([\d.]+)"),
        ("sys/module/amdgpu/version", r"(\S+)"),
    ):
        file = root / path
        if file.exists() and (match := re.search(pattern, file.read_text())):
            return match[1]
    return None


# The device's copy bandwidth and matrix rate, by size.


def ceilings_cases(bench: Bench) -> Iterator[Case]:
    """Measure the limits by size. The other parts' figures are relative to those of 4 GiB and 8192."""
    for gib in bench.size((1, 4, 8), (1,)):
        yield Case(f"copy of {gib} GiB", partial(_copy, bench, gib))
    for size in bench.size((4096, 8192), (64,)):
        yield Case(f"product of {size} x {size}", partial(_product, bench, size))


def _copy(bench: Bench, gib: int) -> Values:
    return {"GB/s": bench.copied_bytes_per_second(gib) / 1e9}


def _product(bench: Bench, size: int) -> Values:
    return {"TFLOP/s": bench.product_rate(size) / 1e12}
