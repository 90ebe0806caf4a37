"""The library's all-reduce over the ranks of one host, through memory of the GPUs that all ranks can read.

Called by `models.parallel.process_group`. The ranks first compare it with torch in child processes, and use it where
all of them found it right.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from models.ops.aiter import child, library

_log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 2**20
"""Bytes of a sum; RCCL computes larger ones. Each rank keeps two buffers of this size."""
_SECONDS = 180.0
"""Seconds of the probe: the first call compiles the library."""
_SIZES = 8, 4096, 2**20
"""Sizes of the sums that are probed: the library selects kernels by them."""
_TYPES = (torch.bfloat16, torch.float16)


class FastSum:
    """One rank of the group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """`group`: the ranks, joined by Gloo. Raises whatever the library does."""
        self._custom = library.function("CustomAllreduce")(group, device, max_size=_MOST_BYTES)
        if self._custom.disabled:
            raise RuntimeError("the library has none for these GPUs")
        if not hasattr(self._custom, "capture"):
            raise RuntimeError("sums of this release cannot be in graphs")

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' `x`; None, on all ranks alike, where the library does not compute it."""
        if x.dtype not in _TYPES or not x.is_contiguous():
            return None
        summed: torch.Tensor | None = self._custom.custom_all_reduce(x)
        return summed

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Collectives`. At its end the ranks exchange the addresses that the graph's all-reduces read.

        After an exception they do not, and RCCL computes all further sums. Raises `RuntimeError` where the library
        cannot exchange them.
        """
        failure: BaseException | None = None
        try:
            with self._custom.capture():
                try:
                    yield
                except BaseException as error:
                    # The addresses of a graph that not all ranks captured would be invalid.
                    self._custom.disabled = True
                    failure = error
                    _log.warning("all_reduce by RCCL (not aiter: a graph of its sums was not captured)")
                    raise
        # A library that is broken may raise anything.
        except Exception as error:
            if error is failure:
                raise
            raise RuntimeError(f"aiter's sums cannot be in a graph: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Free its memory."""
        self._custom.close()


def join(rank: int, size: int, device: torch.device, store: Path, agree: Callable[[bool], bool]) -> FastSum | None:
    """This rank's `FastSum`, once all ranks have found their sums right; None, with a warning, where one did not.

    `store` is a path that no other group uses. `agree`: whether a condition holds on all ranks.
    """
    reason = try_out(rank, size, device, store)
    if not agree(reason is None):
        _log.warning("all_reduce by RCCL (not aiter: %s)", reason or "another rank found it wrong")
        return None
    fast: FastSum | None = None
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SECONDS))
        assert isinstance(group, dist.ProcessGroup)
        fast = FastSum(group, device)
        reason = _wrong(fast, rank, size, device)
    # A library that is broken may raise anything.
    except Exception as failure:  # noqa: BLE001
        reason = f"it failed: {type(failure).__name__}: {failure}".splitlines()[0]
    if agree(reason is None):
        return fast
    if fast is not None:
        fast.close()
    _log.warning("all_reduce by RCCL (not aiter: %s)", reason or "another rank found it wrong")
    return None


def try_out(rank: int, size: int, device: torch.device, store: Path, seconds: float = _SECONDS) -> str | None:
    """What is wrong with sums over child processes of the ranks, which meet at `store`; None: nothing."""
    arguments = f"{rank}, {size}, {str(device)!r}, {str(store)!r}"
    call = f"from models.ops.aiter import all_reduce; all_reduce.report({arguments})"
    # A file, because reading a pipe would wait for compilers that inherited it.
    with tempfile.TemporaryFile() as errors:
        process = child.start(call, subprocess.DEVNULL, errors)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"its sums over {size} ranks took longer than {seconds:g} s"
        finally:
            child.end(process)
        errors.seek(0)
        stderr = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode < 0:
        return f"its sums over {size} ranks were ended by signal {-process.returncode}"
    if process.returncode:
        return stderr[-1] if stderr else f"its sums over {size} ranks ended with exit code {process.returncode}"
    return None


def report(rank: int, size: int, device: str, store: str) -> None:
    """Run the probe in a child process: exit status 0 if the sums are right."""
    on = torch.device(device)
    if on.type != "cpu":
        torch.cuda.set_device(on)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=wait)
    group = dist.group.WORLD
    assert group is not None
    library.bind("all_reduce")
    fast = FastSum(group, on)
    # Both, whatever the first finds: the other ranks compute both too.
    reasons = _wrong(fast, rank, size, on), _wrong_in_graph(fast, rank, size, on)
    reason = reasons[0] or reasons[1]
    if reason is not None:
        sys.stderr.write(reason)
        sys.stderr.flush()
    dist.barrier()
    # Without destructors, which may run after a peer's memory is gone.
    os._exit(reason is not None)


def _wrong(fast: FastSum, rank: int, size: int, device: torch.device) -> str | None:
    """What is wrong with some sums. Each is repeated, since its flags are reused; all ranks compute all of them."""
    reasons = [_wrong_sum(fast, rank, size, device, elements, shift) for elements in _SIZES for shift in range(3)]
    return next((reason for reason in reasons if reason is not None), None)


def _wrong_sum(fast: FastSum, rank: int, size: int, device: torch.device, elements: int, shift: int) -> str | None:
    values = torch.arange(elements, device=device) % 7 + shift
    return _off(fast((values * (rank + 1)).to(torch.bfloat16)), values, size)


def _wrong_in_graph(fast: FastSum, rank: int, size: int, device: torch.device) -> str | None:
    """What is wrong with a sum that a graph replays, of other numbers than it was captured with."""
    values = torch.arange(_SIZES[1], device=device) % 7
    given = torch.zeros_like(values, dtype=torch.bfloat16)
    if device.type == "cpu":  # A graph is the call itself.
        with fast.capturing():
            fast(given)
        given.copy_(values * (rank + 1))
        return _off(fast(given), values, size, " in a graph")
    graph = torch.cuda.CUDAGraph()
    with fast.capturing(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed = fast(given)
    given.copy_(values * (rank + 1))
    graph.replay()
    return _off(summed, values, size, " in a graph")


def _off(summed: torch.Tensor | None, values: torch.Tensor, size: int, where: str = "") -> str | None:
    """What is wrong with `summed`, which is the sum of `values * (rank + 1)` over all ranks; None: nothing."""
    if summed is None:
        return f"it does not compute a sum of {len(values)} elements{where}"
    expected = values * (size * (size + 1) // 2)
    error = (summed.float() - expected).abs().max().item()
    if error <= 0.01 * expected.max().item():
        return None
    return f"its sum of {len(values)} elements{where} over {size} ranks is off by {error:.3g}"
