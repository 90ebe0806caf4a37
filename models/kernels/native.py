"""The compiled operators, where they were built and the processor has their instructions. Called by the layers."""

import ctypes
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ROWS_WORTHWHILE = 16
"""Rows an expert up to which reading the weights is the larger cost; torch's product is faster above."""
_INPUTS, _OUTPUTS = 32, 4
"""The kernel's steps."""


class NativeGroupedLinear:
    """`grouped_linear.c` on as many threads as torch uses."""

    def __init__(self, path: Path) -> None:
        """Load the shared library `path`. Raises `OSError` where it is none."""
        library = ctypes.CDLL(str(path))
        self.runs_here = bool(library.kaon_grouped_linear_runs_here())
        """Whether the processor has its instructions: it may not be called where not."""
        self._run: Any = library.kaon_grouped_linear
        self._run.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3
        self._run.restype = None
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kaon-experts")

    def takes(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel computes tensors such as these."""
        return (
            rows.dtype == weight.dtype == torch.bfloat16
            and rows.device.type == weight.device.type == "cpu"
            and weight.is_contiguous()
            and weight.shape[1] % _OUTPUTS == 0
            and weight.shape[2] % _INPUTS == 0
        )

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write `out`: each run of `counts[expert]` rows by its expert's weight, with its bias.

        # [pairs, in] bf16, [experts, out, in] bf16, [experts, out] bf16, [experts] int64 -> [pairs, out] bf16
        """
        rows = rows.contiguous()
        _, out_features, in_features = weight.shape
        parts = list(_shares(counts.tolist(), torch.get_num_threads()))

        def run(first: int, last: int, row: int) -> None:
            self._run(
                rows[row:].data_ptr(),
                weight[first:].data_ptr(),
                None if bias is None else bias[first:].data_ptr(),
                out[row:].data_ptr(),
                counts[first:].data_ptr(),
                last - first,
                in_features,
                out_features,
            )

        others = [self._threads.submit(run, *part) for part in parts[1:]]
        run(*parts[0])
        for other in others:
            other.result()


def _shares(counts: list[int], threads: int) -> Iterator[tuple[int, int, int]]:
    """`(first expert, past the last, first row)` a thread, each with about as many active experts to read."""
    active = [expert for expert, count in enumerate(counts) if count]
    threads = max(1, min(threads, len(active)))
    bounds = [0, *(active[len(active) * share // threads] for share in range(1, threads)), len(counts)]
    for first, last in pairwise(bounds):
        yield first, last, sum(counts[:first])


@cache
def grouped_linear() -> NativeGroupedLinear | None:
    """The operator; None, and the reason in the log, where it was not built or does not run."""
    library = Path(__file__).with_name(f"_native{EXTENSION_SUFFIXES[0]}")
    if not library.exists():
        why = "Kaon was installed without a C compiler; install one, then Kaon again"
    elif not (kernel := NativeGroupedLinear(library)).runs_here:
        why = "this processor has no AVX512-BF16"
    else:
        return kernel
    logger.info("experts are multiplied by torch, which takes longer for few tokens in bfloat16: %s", why)
    return None
