"""From logits to tokens, as the sampler has the kernels do it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values, Wrong
from engine.structured.masks import MaskedRow, TokenMasks, packed
from engine.worker.device_sampler import launch
from engine.worker.sampler import Sampler
from engine.worker.sampling_columns import RandomRows, SamplingRows
from models.kernels import triton as kernels
from models.kernels.triton.sampling import argmax

_VOCABULARY = 151936
_CHECKED = 16
"""Rows that the CPU draws as well."""


def cases(bench: Bench) -> Iterator[Case]:
    """Kinds of rows by batch."""
    for rows in bench.size((64,) if bench.is_quick else (1, 64, 256), (4,)):
        yield Case(f"greedy, {rows} rows", lambda n=rows: _greedy(bench, n))  # type: ignore[misc]
        kinds = {"drawn": (1.0, False), "drawn by top-p": (0.9, False), "masked": (1.0, True)}
        for name, (top_p, is_masked) in kinds.items():
            yield Case(f"{name}, {rows} rows", lambda n=rows, p=top_p, m=is_masked: _drawn(bench, n, p, is_masked=m))  # type: ignore[misc]


def _logits(bench: Bench, rows: int) -> torch.Tensor:
    return bench.random(rows, bench.size(_VOCABULARY, 300), dtype=torch.float32, scale=3.0)


def _greedy(bench: Bench, rows: int) -> Values:
    logits = _logits(bench, rows)
    if argmax(logits).tokens.tolist() != logits.argmax(-1).tolist():
        raise Wrong("its tokens are not torch's")
    return bench.kernel(
        lambda: argmax(logits).tokens, None, num_bytes=logits.nbytes, beside={"torch": lambda: logits.argmax(-1)}
    )


def _drawn(bench: Bench, rows: int, top_p: float, *, is_masked: bool) -> Values:
    """All rows are drawn; every second one by a mask of every third token. Copies to the device are left out."""
    logits = _logits(bench, rows)
    width = logits.shape[1]
    random = RandomRows(
        rows=np.arange(rows),
        temperature=np.full(rows, 0.8, dtype=np.float32),
        top_k=np.full(rows, width),
        top_p=np.full(rows, top_p),
        min_p=np.zeros(rows),
        key=np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        position=np.arange(rows),
        filtered=np.full(rows, top_p < 1.0),
    )
    allowed = packed(range(0, width, 3), width)
    masked = [MaskedRow(row, allowed=allowed) for row in range(0, rows, 2)]
    wanted = SamplingRows(random=random, masked=masked if is_masked else None)
    masks, kept = TokenMasks(), dict[str, list[torch.Tensor]]()

    def send(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        if "sent" not in kept:
            kept["sent"] = [torch.from_numpy(np.ascontiguousarray(array)).to(bench.device) for array in arrays]
        return kept["sent"]

    def chosen() -> torch.Tensor:
        return launch(logits, wanted, masks, send).token_ids

    found = launch(logits.clone(), wanted, masks, send).token_ids[:_CHECKED].tolist()
    few = SamplingRows(
        random=random.take(np.arange(len(found))),
        masked=[each for each in masked if each.row < len(found)] if is_masked else None,
    )
    kernels.stop()
    try:
        expected = Sampler().sample(logits[:_CHECKED].cpu(), few).token_ids.tolist()
    finally:
        kernels.start(bench.device)
    # The device's exponentials differ in their last bits, which may move a draw that is at an edge.
    if sum(one != other for one, other in zip(found, expected, strict=True)) > 1:
        raise Wrong(f"its tokens are not those of the sampler in torch: {found}, {expected}")
    weights = torch.empty_like(logits)

    def by_torch() -> torch.Tensor:
        # What torch.multinomial does, but for its look at the weights, for which the host waits.
        torch.softmax(logits / 0.8, -1, out=weights)
        return (weights / torch.empty_like(weights).exponential_()).argmax(-1)

    beside = {"torch": by_torch} if top_p == 1.0 and not is_masked else None
    return bench.kernel(chosen, None, num_bytes=logits.nbytes, beside=beside)
