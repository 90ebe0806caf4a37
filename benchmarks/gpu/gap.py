"""How long the device is idle between two decode steps of the engine's loop, with deferred output."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.shapes import BLOCK_SIZE, RandomRunner, runner_of
from benchmarks.gpu.stepping import random_ids
from engine.deferred_steps import DeferredSteps
from engine.flight_record import FlightRecord
from engine.messages import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence as EngineSequence

_STEPS, _WARM = 60, 10
_FEWEST_KERNELS = 20
"""Of a replayed pass: what else is launched at once has fewer."""


class Interval(NamedTuple):
    """Of one activity on the device, nanoseconds."""

    begin: int
    end: int
    launch: int
    """Which launch of the host's it belongs to: all kernels of a replayed graph have one."""


class Loop:
    """The scheduler and the runner, as the engine core drives them; outputs go nowhere."""

    def __init__(self, bench: Bench, runner: RandomRunner, batch: int, context: int, *, steps: int) -> None:
        """`batch` sequences, whose prompts are computed by the time `steps` decode steps begin."""
        self.scheduler = Scheduler(runner.config)
        record = FlightRecord.of_its_own(runner.config.max_num_seqs)
        self.deferred = DeferredSteps(self.scheduler, runner, record, self, lambda kind, seconds: None)
        params = SamplingParams(temperature=0.0, max_tokens=steps + _WARM + 8, ignore_eos=True)
        vocab_size = runner.model_config.vocab_size
        self.scheduler.extend(
            EngineSequence(random_ids(context, vocab_size, row), BLOCK_SIZE, params, id=row) for row in range(batch)
        )
        self.told = 0
        while self.told < batch:
            self.turn()
        for _ in range(bench.size(_WARM, 0)):
            self.turn()

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        """Take a step's outputs."""
        self.told += len(outputs)

    def turn(self) -> None:
        """One turn of the engine's loop."""
        if (failed := self.deferred.advance()) is not None:
            raise RuntimeError(f"a step failed: {failed}")


def cases(bench: Bench) -> Iterator[Case]:
    """At the smallest shape, whose steps are the shortest and leave the host least time."""
    for batch in bench.size((64, 256), (2,)):
        yield Case(f"0.6B, {batch}", lambda batch=batch: _measure(bench, batch))  # type: ignore[misc]


def _measure(bench: Bench, batch: int) -> Values:
    context, steps = bench.size(1024, 3), bench.size(_STEPS, 2)
    length = context + 3 * steps + _WARM + 32
    blocks = -(-length // BLOCK_SIZE)
    runner = runner_of(
        bench,
        "0.6B",
        max_num_seqs=batch,
        max_model_len=blocks * BLOCK_SIZE,
        num_blocks=batch * (blocks + 1),
        sizes=(batch,),
    )
    loop = Loop(bench, runner, batch, context, steps=3 * steps)
    marks = []
    begin = time.perf_counter()
    for _ in range(steps):
        loop.turn()
        marks.append(bench.mark())
    bench.synchronize()
    took = statistics.median(one.seconds_to(other) for one, other in itertools.pairwise(marks))
    values: Values = {"step, ms": took * 1e3, "whole loop, ms a step": (time.perf_counter() - begin) / steps * 1e3}
    activity = torch.profiler.ProfilerActivity.CPU if bench.is_dry else torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(steps):
            loop.turn()
        bench.synchronize()
    if bench.is_dry:
        return values
    gaps = idle_between_passes(_intervals(profile))
    if not gaps:
        raise RuntimeError("the profiler recorded no replayed passes")
    ordered = sorted(gaps)
    values["gap, us"] = statistics.median(ordered) / 1e3
    values["gap p99, us"] = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] / 1e3
    return values


def _intervals(profile: torch.profiler.profile) -> list[Interval]:
    """What the device did, by the profiler."""
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    return [
        Interval(event.start_ns(), event.start_ns() + event.duration_ns(), event.correlation_id())
        for event in results.events()
        if event.device_type() != torch._C._autograd.DeviceType.CPU
    ]


def idle_between_passes(intervals: Sequence[Interval], fewest: int = _FEWEST_KERNELS) -> list[int]:
    """Nanoseconds in which nothing ran, from the end of each replayed pass to the begin of the next.

    A pass is what one launch started, `fewest` kernels or more.
    """
    by_launch: dict[int, list[Interval]] = defaultdict(list)
    for each in intervals:
        by_launch[each.launch].append(each)
    passes = sorted(
        (min(one.begin for one in some), max(one.end for one in some))
        for some in by_launch.values()
        if len(some) >= fewest
    )
    gaps = []
    for (_, end), (begin, _) in itertools.pairwise(passes):
        idle, busy_until = 0, end
        for each in sorted(one for one in intervals if one.end > end and one.begin < begin):
            idle += max(0, each.begin - busy_until)
            busy_until = max(busy_until, each.end)
        gaps.append(idle + max(0, begin - busy_until))
    return gaps
