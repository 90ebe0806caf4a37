"""Decode steps by shape and batch, with graphs and without, against reading weights and caches once."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.shapes import BLOCK_SIZE, SHAPES, RandomRunner, runner_of
from benchmarks.gpu.stepping import Decodes

_STEPS, _WARM = 40, 4
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
_QUICK_BATCHES = (1, 64, 256)
_EAGER_BATCHES = (1, 64)


@dataclass
class _Runners:
    """One at a time: the next takes the memory of the last."""

    bench: Bench
    batches: tuple[int, ...]
    context: int
    _shape: str = ""
    _runner: RandomRunner | None = None

    def of(self, shape: str) -> RandomRunner:
        if self._runner is None or self._shape != shape:
            self._runner = None
            most = max(self.batches)
            length = self.context + _STEPS + _WARM + 2
            blocks = -(-length // BLOCK_SIZE)
            self._runner = runner_of(
                self.bench,
                shape,
                max_num_seqs=most,
                max_model_len=blocks * BLOCK_SIZE,
                num_blocks=most * blocks,
                sizes=self.batches,
            )
            self._shape = shape
        return self._runner


def cases(bench: Bench) -> Iterator[Case]:
    """The largest shape first: it is the nearest to what is served."""
    shapes = ("8B", "0.6B") if bench.is_quick else tuple(reversed(tuple(SHAPES)))
    batches = bench.size(_QUICK_BATCHES if bench.is_quick else _BATCHES, (1, 3))
    runners = _Runners(bench, batches, bench.size(1024, 3))
    for shape in bench.size(shapes, shapes[:1]):
        for batch in batches:
            for has_graphs in (True, False):
                if has_graphs or batch in bench.size(_EAGER_BATCHES, (3,)):
                    yield _case(runners, shape, batch, has_graphs)


def _case(runners: _Runners, shape: str, batch: int, has_graphs: bool) -> Case:
    how = "graphs" if has_graphs else "eager"
    return Case(f"{shape}, {batch}, {how}", lambda: _measure(runners, shape, batch, has_graphs))


def _measure(runners: _Runners, shape: str, batch: int, has_graphs: bool) -> Values:
    bench, runner = runners.bench, runners.of(shape)
    graphs = runner.graphs
    if not has_graphs:
        runner.graphs = None
    elif graphs is None or batch not in graphs.captured_sizes:
        raise RuntimeError("no graph of this size was captured; the log says why")
    try:
        steps = bench.size(_STEPS, 2)
        decodes = Decodes(bench, runner, batch, runners.context, steps=steps + _WARM + 1)
        decodes.timed(bench.size(_WARM - 1, 1))
        took = statistics.median(decodes.timed(steps))
        decodes.finish()
    finally:
        runner.graphs = graphs
    num_bytes = runner.weight_bytes + batch * runners.context * runner.token_bytes
    bound = bench.bound(num_bytes=num_bytes)
    return {
        "ms": took * 1e3,
        "bound, ms": bound * 1e3,
        "of the bound": bound / took,
        "tokens/s": batch / took,
        "GB read": num_bytes / 1e9,
    }
