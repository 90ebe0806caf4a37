"""What tensor-parallel ranks on one host cost beside the model: telling them of a step, and adding up their results.

Run as `python -m benchmarks.parallel`; it starts the second rank itself.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Table
from engine.batch import ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.worker.input_batch import InputBatch
from engine.worker.shard import own_cpus
from engine.worker.step_ends import StepEnds
from engine.worker.step_message import decode_step, encode_step, rank_batch
from engine.worker.step_ring import StepRing
from models.kernels.cpu.group import SharedMemoryCollectives
from models.kernels.cpu.library import load_library
from models.meeting import Meeting
from models.process_group import ProcessGroupCollectives

BLOCK_SIZE = 16
CONTEXT = 1024
STEPS, ROUNDS = 100, 5
MODEL_SECONDS = 0.001
REDUCED = (32, 1024)
"""Rows and columns of the all-reduce, in bfloat16."""


def _input_batch(num_rows: int) -> InputBatch:
    return InputBatch(
        max_num_seqs=num_rows, max_model_len=CONTEXT + STEPS + 8, block_size=BLOCK_SIZE, vocab_size=32000, seed=0
    )


def _rows(num_rows: int) -> dict[int, Sequence]:
    seqs = {}
    blocks = -(-(CONTEXT + STEPS + 8) // BLOCK_SIZE)
    for row in range(num_rows):
        seq = Sequence([7] * CONTEXT, BLOCK_SIZE, SamplingParams(temperature=0.0), id=row)
        seq.slot, seq.block_table = row, [row * blocks + block for block in range(blocks)]
        seqs[row] = seq
    return seqs


def _follow(ring_descriptor: int, ends_descriptor: int, num_rows: int) -> None:
    """The other rank: does with each step what a shard's runner does, but for the model."""
    ring, ends = StepRing(ring_descriptor, 1), StepEnds(ends_descriptor, 1)
    input_batch = _input_batch(num_rows)
    slots = np.zeros(0, dtype=np.int64)
    for _ in range(STEPS + 1):
        message = decode_step(ring.read(0))
        if len(slots):
            input_batch.append(slots, np.array(message.sampled, dtype=np.int64))
        batch = rank_batch(message, BLOCK_SIZE)
        input_batch.apply(batch)
        slots = input_batch.step_inputs(batch).sampled_slots
        _compute(MODEL_SECONDS)
        ends.tell(0)


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def _other_rank(*arguments: object, descriptors: tuple[int, ...] = ()) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.parallel", *map(str, arguments)]
    allowed = os.sched_getaffinity(0)
    mine, theirs = own_cpus(0, 2), own_cpus(1, 2)
    # Each on CPUs of its own, as ranks are.
    os.sched_setaffinity(0, theirs)
    try:
        with subprocess.Popen(command, pass_fds=descriptors, cwd=Path(__file__).parent.parent) as process:
            os.sched_setaffinity(0, mine)
            yield
            if process.wait():
                raise RuntimeError("the second rank failed")
    finally:
        os.sched_setaffinity(0, allowed)


def control_seconds(num_rows: int, pause: float) -> float:
    """Median of what the other rank adds to a decode step, `pause` seconds after the one before.

    From telling it to hearing that it has ended, less what the first takes for the step itself.
    """
    ring_descriptor, ring = StepRing.create(1)
    ends_descriptor, ends = StepEnds.create(1)
    input_batch, seqs = _input_batch(num_rows), _rows(num_rows)
    added = []
    descriptors = ring_descriptor, ends_descriptor
    with _other_rank("follow", *descriptors, num_rows, descriptors=descriptors):
        for step in range(STEPS + 1):
            counts = [CONTEXT if step == 0 else 1] * num_rows
            batch = ScheduledBatch(
                seqs,
                counts,
                sum(counts),
                total_seqs_num=num_rows,
                total_seqs_num_decode=num_rows if step else 0,
                context_lens=[CONTEXT + step] * num_rows,
                new_seqs=[] if step else list(seqs.values()),
            )
            start = time.perf_counter()
            ring.write(encode_step(batch, step, [5] * num_rows, is_greedy=True))
            told = time.perf_counter()
            input_batch.apply(batch)
            inputs = input_batch.step_inputs(batch)
            _compute(MODEL_SECONDS)
            input_batch.append(inputs.sampled_slots, inputs.input_ids[-num_rows:])
            alone = time.perf_counter() - told
            ends.take(0)
            added.append(time.perf_counter() - start - alone)
            _compute(pause)
    os.close(ring_descriptor)
    os.close(ends_descriptor)
    return statistics.median(added[1:])


def _reduce_seconds(reduce: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    x = torch.ones(REDUCED, dtype=torch.bfloat16)
    times = []
    for _ in range(ROUNDS * STEPS):
        start = time.perf_counter()
        reduce(x)
        times.append(time.perf_counter() - start)
    return sorted(times[STEPS:])


def _by_gloo(rank: int, store: str) -> list[float]:
    group = ProcessGroupCollectives(rank, 2, torch.device("cpu"), Meeting(Path(store).as_uri(), 60.0))
    group.join()
    times = _reduce_seconds(group.all_reduce)
    group.close()
    return times


def _by_memory(rank: int, descriptor: int) -> list[float]:
    library = load_library()
    if library is None:
        raise RuntimeError("the operators were not built")
    return _reduce_seconds(SharedMemoryCollectives(library, rank, 2, descriptor).all_reduce)


def reduce_rows() -> list[tuple[str, str, str]]:
    """Median and 99th percentile of an all-reduce, in microseconds, by Gloo and through shared memory."""
    memory = os.memfd_create("benchmark")
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        with _other_rank("gloo", store):
            by_gloo = _by_gloo(0, store)
    with _other_rank("shared", memory, descriptors=(memory,)):
        by_memory = _by_memory(0, memory)
    rows = []
    for name, times in (("Gloo", by_gloo), ("shared memory", by_memory)):
        median, tail = (1e6 * times[int(share * len(times))] for share in (0.5, 0.99))
        rows.append((f"all-reduce of {REDUCED[0]} x {REDUCED[1]} bfloat16, {name}", f"{median:.0f}", f"{tail:.0f}"))
    return rows


def run() -> Table:
    """Microseconds a step that a second rank adds on the host, and of a collective."""
    rows = []
    for num_rows, pause in [(1, 0.0003), (32, 0.0003), (256, 0.0003), (32, 0.02)]:
        name = f"control of a decode step of {num_rows} rows, {1e3 * pause:g} ms after the last"
        least = min(control_seconds(num_rows, pause) for _ in range(ROUNDS))
        rows.append((name, f"{1e6 * least:.0f}", ""))
    return Table(
        "Two ranks on one host",
        "What the second rank adds to a step beside its computing, from telling it of the step to hearing of its end; "
        "and one sum of both ranks' rows, of which a layer takes two. Each rank on one thread; the control's are "
        f"medians of the quickest of {ROUNDS} rounds of {STEPS} steps.",
        "control at most 150 µs a step of a busy engine.",
        ("what", "median, µs", "99th percentile, µs"),
        rows + reduce_rows(),
    )


def _be_other_rank(arguments: list[str]) -> None:
    match arguments:
        case ["follow", ring, ends, num_rows]:
            _follow(int(ring), int(ends), int(num_rows))
        case ["gloo", store]:
            _by_gloo(1, store)
        case ["shared", descriptor]:
            _by_memory(1, int(descriptor))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        _be_other_rank(sys.argv[1:])
    else:
        sys.stdout.write(run().markdown())
