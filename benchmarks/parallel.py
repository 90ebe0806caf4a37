"""What tensor-parallel ranks cost beside the model: telling them of a step, and adding up their results.

Run as `python -m benchmarks.parallel`; it starts the second rank, and the second host, itself.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.report import Table
from benchmarks.second_process import second_process
from engine.batch import ScheduledBatch
from engine.cluster_key import CurvePair
from engine.config import ParallelConfig, ServerConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.worker.curve import Doorkeeper
from engine.worker.input_batch import InputBatch, StepInputs
from engine.worker.rank_messages import SharedMemory, StepAddress
from engine.worker.rank_places import EndTaker, StepWriter
from engine.worker.step_ends import StepEnds
from engine.worker.step_message import decode_step, encode_step, rank_batch
from engine.worker.step_ring import StepRing
from engine.worker.step_socket import StepSocket
from engine.worker.told_steps import ToldSteps, open_steps
from models.kernels.cpu.group import SharedMemoryCollectives
from models.kernels.cpu.library import load_library
from models.process_group import ProcessGroupCollectives
from models.rendezvous import Rendezvous

_MODULE = "benchmarks.parallel"
BLOCK_SIZE = 16
CONTEXT = 1024
STEPS, ROUNDS = 100, 5
MODEL_SECONDS = 0.001
REDUCED = (32, 1024)
"""Rows and columns of the all-reduce, in bfloat16."""
PORT = 29600
"""And the four behind it: of the step's socket, and of the hosts."""
TOKENS = 200


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


def _follow(steps: ToldSteps, num_rows: int) -> None:
    """The other rank: does with each step what a shard's runner does, but for the model."""
    input_batch = _input_batch(num_rows)
    inputs: StepInputs | None = None
    for _ in range(STEPS + 1):
        message = decode_step(steps.read())
        if inputs is not None:
            input_batch.keep(inputs, np.array(message.sampled, dtype=np.int64))
        batch = rank_batch(message, BLOCK_SIZE)
        input_batch.apply(batch)
        inputs = input_batch.step_inputs(batch)
        _compute(MODEL_SECONDS)
        steps.tell()


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def _by_ring(num_rows: int) -> Iterator[tuple[StepWriter, EndTaker]]:
    """The second rank, told of steps through shared memory."""
    ring_descriptor, ring = StepRing.create(1)
    ends_descriptor, ends = StepEnds.create(1)
    descriptors = ring_descriptor, ends_descriptor
    with second_process(_MODULE, "follow", "memory", *descriptors, num_rows, descriptors=descriptors):
        yield ring, ends
    os.close(ring_descriptor)
    os.close(ends_descriptor)


@contextmanager
def _by_socket(num_rows: int) -> Iterator[tuple[StepWriter, EndTaker]]:
    """The second rank, told of steps as one on another host is, over the loopback interface."""
    own, theirs = CurvePair.new(), CurvePair.new()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    doorkeeper = Doorkeeper(context)
    doorkeeper.admit(theirs.public)
    address = f"tcp://127.0.0.1:{PORT}"
    steps = StepSocket(context, address, own, 1)
    keys = [key.decode() for key in (own.public, theirs.public, theirs.secret)]
    with second_process(_MODULE, "follow", "tcp", address, *keys, num_rows):
        if steps.wait_for_ranks(60.0) is not None:
            raise RuntimeError("the second rank did not come")
        yield steps, steps
    steps.close()
    doorkeeper.close()
    context.term()


def control_seconds(
    way: Callable[[int], AbstractContextManager[tuple[StepWriter, EndTaker]]], num_rows: int, pause: float
) -> float:
    """Median of what the other rank adds to a decode step, `pause` seconds after the one before.

    From telling it to hearing that it has ended, less what the first takes for the step itself.
    """
    input_batch, seqs = _input_batch(num_rows), _rows(num_rows)
    added = []
    with way(num_rows) as (steps, ends):
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
            steps.write(encode_step(batch, step, [5] * num_rows, is_greedy=True))
            told = time.perf_counter()
            input_batch.apply(batch)
            inputs = input_batch.step_inputs(batch)
            _compute(MODEL_SECONDS)
            input_batch.keep(inputs, inputs.input_ids[-num_rows:])
            alone = time.perf_counter() - told
            ends.take(0)
            added.append(time.perf_counter() - start - alone)
            _compute(pause)
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
    group = ProcessGroupCollectives(rank, 2, torch.device("cpu"), Rendezvous(Path(store).as_uri(), 60.0))
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
        with second_process(_MODULE, "gloo", store):
            by_gloo = _by_gloo(0, store)
    with second_process(_MODULE, "shared", memory, descriptors=(memory,)):
        by_memory = _by_memory(0, memory)
    rows = []
    for name, times in (("Gloo", by_gloo), ("shared memory", by_memory)):
        median, tail = (1e6 * times[int(share * len(times))] for share in (0.5, 0.99))
        rows.append((f"all-reduce of {REDUCED[0]} x {REDUCED[1]} bfloat16, {name}", f"{median:.0f}", f"{tail:.0f}"))
    return rows


@contextmanager
def _second_host(flags: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "server", "serve", *flags, "--node-rank", "1"]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            raise RuntimeError("the second host failed")


def _engine(**parallel: Any) -> LLMEngine:
    config = ParallelConfig(tensor_parallel_size=2, **parallel)
    server = ServerConfig(log_level="warning")
    return LLMEngine(parallel_config=config, server_config=server, cpu_threads=1, num_kvcache_blocks=1024)


def _step_seconds(engine: LLMEngine, num_rows: int) -> float:
    """Of a decode step of the embedded model, at the mean of one run."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([[token] for token in range(100, 100 + num_rows)], params, use_tqdm=False)
    return (time.perf_counter() - start) / TOKENS


def decode_rows() -> list[tuple[str, str, str]]:
    """Microseconds of a decode step of the embedded model on two ranks, by where they are and what adds up."""
    hosts = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": PORT + 1}
    flags = ["--tensor-parallel-size", "2", "--cpu-threads", "1", "--log-level", "warning"]
    for name, value in hosts.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    with ExitStack() as stack:
        stack.enter_context(_second_host(flags))
        engines = {
            "one host": stack.enter_context(_engine()),
            "one host, sums by Gloo": stack.enter_context(_engine(cpu_collectives="gloo")),
            "two hosts, on the loopback interface": stack.enter_context(_engine(**hosts)),
        }
        rows = []
        for num_rows in (1, 32):
            times: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(ROUNDS + 1):
                for name, engine in engines.items():
                    times[name].append(_step_seconds(engine, num_rows))
            for name, found in times.items():
                what = f"decode step of {num_rows} rows of the embedded model, {name}"
                rows.append((what, f"{1e6 * statistics.median(found[1:]):.0f}", ""))
    return rows


def run() -> Table:
    """Microseconds a step that a second rank adds on the host, and of a collective."""
    rows = []
    for num_rows, pause in [(1, 0.0003), (32, 0.0003), (256, 0.0003), (32, 0.02)]:
        ways = {"": _by_ring, ", over TCP": _by_socket}
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for way, told in ways.items():
                least[way] = min(least[way], control_seconds(told, num_rows, pause))
        for way, seconds in least.items():
            name = f"control of a decode step of {num_rows} rows, {1e3 * pause:g} ms after the last{way}"
            rows.append((name, f"{1e6 * seconds:.0f}", ""))
    return Table(
        "Two ranks on one host",
        "What the second rank adds to a step beside its computing, from telling it of the step to hearing of its end, "
        "through shared memory or as a rank on another host is told; one sum of both ranks' rows, of which a layer "
        "takes two; and whole steps. Each rank on one thread, all on one machine; the control's are medians of the "
        f"quickest of {ROUNDS} rounds of {STEPS} steps, the whole steps' are medians of {ROUNDS} rounds of {TOKENS}.",
        "control at most 150 µs a step of a busy engine on one host.",
        ("what", "median, µs", "99th percentile, µs"),
        rows + reduce_rows() + decode_rows(),
    )


def _be_other_rank(arguments: list[str]) -> None:
    match arguments:
        case ["follow", "memory", ring, ends, num_rows]:
            _follow(open_steps(SharedMemory(int(ring), int(ends)), 1, 2), int(num_rows))
        case ["follow", "tcp", address, *keys, num_rows]:
            steps = StepAddress(address, *(key.encode() for key in keys))
            _follow(open_steps(steps, 1, 2), int(num_rows))
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
