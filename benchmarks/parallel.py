"""Costs of several processes: tensor-parallel ranks, replicas that share experts, and the placement of requests.

This module also runs as the second process of each table.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

from benchmarks.checkpoints import write_random
from benchmarks.report import Table
from engine.batch import ScheduledBatch
from engine.client.core_manager import CoreManager
from engine.client.llm_engine import LLMEngine
from engine.client.placement import Placement
from engine.config.config import Config, ParallelConfig
from engine.config.server import ServerConfig
from engine.distributed.curve import CurveAuthenticator
from engine.distributed.host_resources import own_cpus
from engine.distributed.rank_link import SharedMemory, StepAddress
from engine.distributed.rank_steps import decode_step, encode_step, rank_batch
from engine.distributed.step_transport import SharedMemorySteps, StepSource, StepTransport, TcpSteps, open_steps
from engine.messages import AddRequest
from engine.runner.input_batch import InputBatch, StepInputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.demo import CHECKPOINT_DIR
from models.ops.cpu import runtime
from models.ops.cpu.collectives import SharedMemoryCollectives, SharedMemoryExchange
from models.parallel.process_group import ProcessGroupCollectives, Rendezvous, ReplicaWorld
from models.parallel.tensor_parallel import Exchange, TokenExchange


@contextmanager
def second_process(module: str, *arguments: object, descriptors: tuple[int, ...] = ()) -> Iterator[None]:
    """Run a module in a process that inherits `descriptors`; both processes have CPUs of their own, as ranks do.

    Raises `RuntimeError` if it fails.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    allowed = os.sched_getaffinity(0)
    mine, theirs = own_cpus(0, 2), own_cpus(1, 2)
    os.sched_setaffinity(0, theirs)
    try:
        with subprocess.Popen(command, pass_fds=descriptors, cwd=Path(__file__).parent.parent) as process:
            os.sched_setaffinity(0, mine)
            yield
            if process.wait():
                raise RuntimeError(f"the second process of {module} failed")
    finally:
        os.sched_setaffinity(0, allowed)


# Costs of tensor-parallel ranks in addition to the model: sending them a step, and adding up their results.

_MODULE = "benchmarks.parallel"
BLOCK_SIZE = 16
CONTEXT = 1024
RANK_STEPS, RANK_ROUNDS = 100, 5
MODEL_SECONDS = 0.001
REDUCED = (32, 1024)
"""Rows and columns of the all-reduce, in bfloat16."""
PORT = 29600
"""Further descriptors: of the step's socket, and of the hosts."""
RANK_TOKENS = 200


def _input_batch(num_rows: int) -> InputBatch:
    return InputBatch(
        max_num_seqs=num_rows, max_model_len=CONTEXT + RANK_STEPS + 8, block_size=BLOCK_SIZE, vocab_size=32000, seed=0
    )


def _rows(num_rows: int) -> dict[int, Sequence]:
    seqs = {}
    blocks = -(-(CONTEXT + RANK_STEPS + 8) // BLOCK_SIZE)
    for row in range(num_rows):
        seq = Sequence([7] * CONTEXT, BLOCK_SIZE, SamplingParams(temperature=0.0), id=row)
        seq.slot, seq.block_table = row, [row * blocks + block for block in range(blocks)]
        seqs[row] = seq
    return seqs


def _follow(steps: StepSource, num_rows: int) -> None:
    """The other rank: it does for each step what a shard's runner does, without a model."""
    input_batch = _input_batch(num_rows)
    inputs: StepInputs | None = None
    for _ in range(RANK_STEPS + 1):
        message = decode_step(steps.read())
        if inputs is not None:
            input_batch.store_tokens(inputs, np.array(message.sampled, dtype=np.int64))
        batch = rank_batch(message, BLOCK_SIZE)
        input_batch.apply(batch)
        inputs = input_batch.step_inputs(batch)
        _compute(MODEL_SECONDS)
        steps.report()


def _compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def _by_ring(num_rows: int) -> Iterator[StepTransport]:
    """The second rank, which receives steps through shared memory."""
    steps = SharedMemorySteps.create(2)
    descriptors = steps.descriptors
    with second_process(_MODULE, "follow", "memory", *descriptors, num_rows, descriptors=descriptors):
        yield steps
    steps.close()


@contextmanager
def _by_socket(num_rows: int) -> Iterator[StepTransport]:
    """The second rank, which receives steps over the loopback interface, as a rank on another host does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = CurveAuthenticator(context)
    steps = TcpSteps(context, "127.0.0.1", PORT, 2)
    address = steps.address
    authenticator.allow(address.public)
    keys = [key.decode() for key in (address.core_public, address.public, address.secret)]
    with second_process(_MODULE, "follow", "tcp", address.address, *keys, num_rows):
        if steps.missing_rank(60.0) is not None:
            raise RuntimeError("the second rank did not connect")
        yield steps
    steps.close()
    authenticator.close()
    context.term()


def control_seconds(way: Callable[[int], AbstractContextManager[StepTransport]], num_rows: int, pause: float) -> float:
    """The median time that another rank adds to a decode step, `pause` seconds after the previous step.

    It is measured from sending the step to learning that it has ended, less the first rank's own time for the step.
    """
    input_batch, seqs = _input_batch(num_rows), _rows(num_rows)
    added = []
    with way(num_rows) as steps:
        for step in range(RANK_STEPS + 1):
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
            steps.write(encode_step(batch, step, [(step - 1, [5] * num_rows)], is_greedy=True))
            reported = time.perf_counter()
            input_batch.apply(batch)
            inputs = input_batch.step_inputs(batch)
            _compute(MODEL_SECONDS)
            input_batch.store_tokens(inputs, inputs.input_ids[-num_rows:])
            alone = time.perf_counter() - reported
            steps.take(1)
            added.append(time.perf_counter() - start - alone)
            _compute(pause)
    return statistics.median(added[1:])


def _reduce_seconds(reduce: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    x = torch.ones(REDUCED, dtype=torch.bfloat16)
    times = []
    for _ in range(RANK_ROUNDS * RANK_STEPS):
        start = time.perf_counter()
        reduce(x)
        times.append(time.perf_counter() - start)
    return sorted(times[RANK_STEPS:])


def _by_gloo(rank: int, store: str) -> list[float]:
    group = ProcessGroupCollectives(rank, 2, torch.device("cpu"), Rendezvous(Path(store).as_uri(), 60.0))
    group.join()
    times = _reduce_seconds(group.all_reduce)
    group.close()
    return times


def _by_memory(rank: int, descriptor: int) -> list[float]:
    library = runtime.load_library()
    if library is None:
        raise RuntimeError("the operators were not built")
    return _reduce_seconds(SharedMemoryCollectives(library, rank, 2, descriptor).all_reduce)


def reduce_rows() -> list[tuple[str, str, str]]:
    """Median and 99th percentile of an all-reduce in microseconds, by Gloo and through shared memory."""
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
    """Mean time of a decode step of the embedded model in one run."""
    params = SamplingParams(temperature=0.0, max_tokens=RANK_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([[token] for token in range(100, 100 + num_rows)], params, use_tqdm=False)
    return (time.perf_counter() - start) / RANK_TOKENS


def decode_rows() -> list[tuple[str, str, str]]:
    """Microseconds of a decode step of the embedded model on two ranks, by their location and their collectives."""
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
            for _ in range(RANK_ROUNDS + 1):
                for name, engine in engines.items():
                    times[name].append(_step_seconds(engine, num_rows))
            for name, found in times.items():
                what = f"decode step of {num_rows} rows of the embedded model, {name}"
                rows.append((what, f"{1e6 * statistics.median(found[1:]):.0f}", ""))
    return rows


def ranks_table() -> Table:
    """Microseconds that a second rank adds to a step on the host, and those of a collective."""
    rows = []
    for num_rows, pause in [(1, 0.0003), (32, 0.0003), (256, 0.0003), (32, 0.02)]:
        ways = {"": _by_ring, ", over TCP": _by_socket}
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(RANK_ROUNDS):
            for way, reported in ways.items():
                least[way] = min(least[way], control_seconds(reported, num_rows, pause))
        for way, seconds in least.items():
            name = f"control of a decode step of {num_rows} rows, {1e3 * pause:g} ms after the last{way}"
            rows.append((name, f"{1e6 * seconds:.0f}", ""))
    return Table(
        "Two ranks on one host",
        "The time that the second rank adds to a step in addition to its computing, from sending it the step to "
        "receiving its result, through shared memory or as to a rank on another host; one sum of both ranks' rows, "
        "which a layer computes twice; and whole steps. Each rank on one thread, all on one machine; the times of the "
        "second rank are medians of the "
        f"quickest of {RANK_ROUNDS} rounds of {RANK_STEPS} steps, the whole steps' are medians of "
        f"{RANK_ROUNDS} rounds of {RANK_TOKENS}.",
        "control at most 150 µs a step of a busy engine on one host.",
        ("what", "median, µs", "99th percentile, µs"),
        rows + reduce_rows() + decode_rows(),
    )


def _be_other_process(arguments: list[str]) -> None:
    match arguments:
        case ["follow", "memory", descriptor, num_rows]:
            _follow(open_steps(SharedMemory(int(descriptor)), 1, 2), int(num_rows))
        case ["follow", "tcp", address, *keys, num_rows]:
            steps = StepAddress(address, *(key.encode() for key in keys))
            _follow(open_steps(steps, 1, 2), int(num_rows))
        case ["gloo", store]:
            _by_gloo(1, store)
        case ["shared", descriptor]:
            _by_memory(1, int(descriptor))
        case ["exchange", kind, where]:
            _by(kind, where, 1)


# Costs of replicas on one host that divide the experts among themselves, compared with one engine that has all of
# them: of an exchange, and of a step.

EXCHANGE_ROUNDS, EXCHANGE_STEPS = 7, 100
EXCHANGES, WARM_UP = 1000, 100
EXCHANGE_TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 2048, 64, 8
PROMPT = [5, 9, 17, 4, 8]
"""Steps of each request, which decodes one sequence on each busy replica."""


def _exchanges(exchange: Exchange | TokenExchange, replica: int) -> list[float]:
    """Seconds of an exchange each: tokens to their experts, which compute nothing, and back."""
    local = range(replica * EXPERTS // 2, (replica + 1) * EXPERTS // 2)
    hidden = torch.ones(EXCHANGE_TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.randn(EXCHANGE_TOKENS, EXPERTS, generator=torch.Generator().manual_seed(replica)).topk(TOP_K).indices
    times = []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        if isinstance(exchange, TokenExchange):
            exchange.add_back(exchange.gather(hidden))
        else:
            exchange.across(
                range(EXPERTS),
                local,
                hidden,
                ids,
                lambda rows, _, tokens: rows[tokens],
                (EXCHANGE_TOKENS, EXCHANGE_TOKENS),
            )
        times.append(time.perf_counter() - start)
    return sorted(times[WARM_UP:])


def _by(kind: str, where: str, replica: int) -> list[float]:
    torch.set_num_threads(1)
    if kind == "gloo":
        world = ReplicaWorld(
            replica=replica,
            num_replicas=2,
            rank=0,
            size=1,
            device=torch.device("cpu"),
            rendezvous=Rendezvous(Path(where).as_uri(), 60.0),
        )
        world.join()
        return _exchanges(world, replica)
    library = runtime.start(1)
    if library is None:
        raise RuntimeError("the operators were not built")
    return _exchanges(SharedMemoryExchange(library, replica, 2, int(where), EXCHANGE_TOKENS), replica)


def exchange_rows() -> Iterator[tuple[str, ...]]:
    """Median and 99th percentile, by Gloo and through shared memory."""
    memory = os.memfd_create("benchmark")
    with tempfile.TemporaryDirectory() as directory:
        for name, kind, where in (("Gloo", "gloo", f"{directory}/store"), ("shared memory", "memory", str(memory))):
            with second_process(_MODULE, "exchange", kind, where, descriptors=(memory,)):
                times = _by(kind, where, 0)
            median, tail = (f"{1e6 * times[int(share * len(times))]:.0f}" for share in (0.5, 0.99))
            what = f"{EXCHANGE_TOKENS} tokens of {HIDDEN} to {TOP_K} experts each and back, {name}"
            yield what, f"{median} µs", f"{tail} µs"
    os.close(memory)


def _write_mixture(directory: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = dict.fromkeys(("hidden_size", "head_dim", "moe_intermediate_size", "intermediate_size"), 64)
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=json.loads((CHECKPOINT_DIR / "config.json").read_text())["vocab_size"],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    write_random(directory, config)


def _lockstep_engine(path: Path, replicas: int, collectives: str) -> LLMEngine:
    return LLMEngine(
        str(path),
        parallel_config=ParallelConfig.model_validate(
            {
                "data_parallel_size": replicas,
                "enable_expert_parallel": replicas > 1,
                "data_parallel_placement": "round_robin",
                "cpu_collectives": collectives,
            }
        ),
        dtype="bfloat16",
        device="cpu",
        cpu_threads=1,
        num_kvcache_blocks=64,
        max_num_seqs=8,
        generation_config="none",
        server_config={"log_level": "warning"},
    )


def _lockstep_step_seconds(engine: LLMEngine, busy: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=EXCHANGE_STEPS, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([PROMPT] * busy, params, use_tqdm=False)
    return (time.perf_counter() - start) / EXCHANGE_STEPS


def step_rows() -> Iterator[tuple[str, ...]]:
    """Time each kind of step in turn."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        _write_mixture(path)
        with (
            _lockstep_engine(path, 1, "shared_memory") as alone,
            _lockstep_engine(path, 2, "shared_memory") as two,
            _lockstep_engine(path, 2, "gloo") as by_gloo,
        ):
            for _ in range(EXCHANGE_ROUNDS):
                for name, engine, busy in (
                    ("one engine", alone, 1),
                    ("two replicas, one of them idle", two, 1),
                    ("two replicas, both busy", two, 2),
                    ("two replicas, both busy, Gloo", by_gloo, 2),
                ):
                    seconds.setdefault(name, []).append(_lockstep_step_seconds(engine, busy))
    for name, found in seconds.items():
        yield f"a step of {name}", f"{1e3 * statistics.median(found):.2f} ms", f"{1e3 * min(found):.2f} ms at best"


def expert_parallel_table() -> Table:
    """Measure exchanges alone, then steps of a model that computes almost nothing, so that the other costs are
    visible."""
    return Table(
        "Experts over two replicas of one host",
        f"A layer's exchange by itself, {EXCHANGES} times, median and 99th percentile; and decode steps of one "
        f"sequence on each busy replica, from {EXCHANGE_ROUNDS} rounds in turn of {EXCHANGE_STEPS} steps of a mixture "
        "of 2 layers with a hidden size of 64. Each replica on one thread.",
        "a step of two replicas at most 1 ms longer than one engine's.",
        ("what", "median", ""),
        [*exchange_rows(), *step_rows()],
    )


# Gain and cost of placing requests by their prefixes, compared with replicas in turn.

REPLICAS = 2
CONCURRENCY = 8
PREFIX, QUESTION, ANSWER = 1024, 48, 16
"""Number of tokens."""
DOCUMENTS, QUESTIONS = 40, 8
CHATS, TURNS = 88, 6
CACHE = 28 * (PREFIX + QUESTION + ANSWER)
"""Number of tokens in the cache of a replica."""
PLACEMENT_BLOCK_SIZE = 16
_VOCAB = range(300, 1300)

_Load = Iterator[tuple[int, list[int]]]
"""Conversations by number, with the messages that each sends; a later prompt waits for the answer to the previous
one."""


class Outcome(NamedTuple):
    """Results of one load."""

    hit_rate: float
    """Ratio of prompt tokens that were found in the caches."""
    busiest: float
    """Ratio of the requests that the busiest replica computed."""
    seconds: float


def documents(rng: random.Random) -> _Load:
    """Questions about documents, in random order, each after its whole document."""
    texts = [rng.choices(_VOCAB, k=PREFIX) for _ in range(DOCUMENTS)]
    order = [number for number in range(DOCUMENTS) for _ in range(QUESTIONS)]
    rng.shuffle(order)
    for request, document in enumerate(order):
        yield request, texts[document] + rng.choices(_VOCAB, k=QUESTION)


def system_prompt(rng: random.Random) -> _Load:
    """Prompts that begin with one long system prompt."""
    prompt = rng.choices(_VOCAB, k=PREFIX)
    for request in range(DOCUMENTS * QUESTIONS):
        yield request, prompt + rng.choices(_VOCAB, k=QUESTION)


def chats(rng: random.Random) -> _Load:
    """Conversations in turn; each prompt is the history and a new message."""
    for chat in range(CHATS):
        yield chat, rng.choices(_VOCAB, k=PREFIX // 4)
    for _ in range(TURNS - 1):
        for chat in rng.sample(range(CHATS), CHATS):
            yield chat, rng.choices(_VOCAB, k=QUESTION)


def outcome(load: Callable[[random.Random], _Load], placement: str, *, has_history: bool) -> Outcome:
    """Serve a load, `CONCURRENCY` requests at a time, by new replicas of the embedded model."""
    config = Config.model_validate(
        {
            "parallel_config": {"data_parallel_size": REPLICAS, "data_parallel_placement": placement},
            "num_kvcache_blocks": CACHE // PLACEMENT_BLOCK_SIZE,
            "kv_cache_block_size": PLACEMENT_BLOCK_SIZE,
            "max_num_seqs": 32,
            "device": "cpu",
            "cpu_threads": 1,
        }
    )
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    histories: dict[int, list[int]] = {}
    live: dict[int, int] = {}
    cached = sent = 0
    by_replica = [0] * REPLICAS
    with CoreManager(config) as core:
        core.wait_ready()
        waiting = [*load(random.Random(0))]
        began = time.perf_counter()
        number = 0
        while waiting or live:
            while waiting and len(live) < CONCURRENCY and waiting[0][0] not in live.values():
                conversation, tokens = waiting.pop(0)
                prompt = [*histories.get(conversation, ()), *tokens]
                histories[conversation] = prompt
                live[number] = conversation
                core.add_requests([AddRequest(number, list(prompt), params)])
                sent += len(prompt)
                number += 1
            step = core.get_outputs()
            assert step is not None
            for output in step.outputs:
                cached += output.num_cached_tokens
                if has_history:
                    histories[live[output.request_id]] += output.output_tokens
                if output.finished:
                    by_replica[step.replica] += 1
                    del live[output.request_id]
        seconds = time.perf_counter() - began
    return Outcome(cached / sent, max(by_replica) / number, seconds)


def placement_seconds(num_tokens: int) -> float:
    """Median time to place a prompt among `REPLICAS`, which begins like an earlier one."""
    rng = random.Random(0)
    placement = Placement([1 << 22] * REPLICAS, PLACEMENT_BLOCK_SIZE, 1 << 20, by_prefix=True)
    prompts = [rng.choices(_VOCAB, k=num_tokens) for _ in range(20)]
    times = []
    for number, prompt in enumerate([*prompts, *prompts]):
        request = AddRequest(number, prompt, SamplingParams())
        start = time.perf_counter()
        placement.place([request], range(REPLICAS))
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(prompts) :])


def placement_table() -> Table:
    """Compare both placements under three loads."""
    rows: list[tuple[str, ...]] = []
    for name, load in (
        (f"{DOCUMENTS} documents of {PREFIX} tokens, {QUESTIONS} questions about each", documents),
        (f"{CHATS} chats of {TURNS} turns", chats),
        (f"{DOCUMENTS * QUESTIONS} questions behind one system prompt of {PREFIX} tokens", system_prompt),
    ):
        found = [outcome(load, each, has_history=load is chats) for each in ("prefix", "round_robin")]
        rows.append((f"{name}: prompt tokens from the cache", *(f"{each.hit_rate:.0%}" for each in found)))
        rows.append(("the same: seconds", *(f"{each.seconds:.1f}" for each in found)))
        rows.append(("the same: requests on the busier replica", *(f"{each.busiest:.0%}" for each in found)))
    for num_tokens in (100, 1000, 10_000, 100_000):
        microseconds = 1e6 * placement_seconds(num_tokens)
        rows.append((f"placing a prompt of {num_tokens} tokens, µs", f"{microseconds:.0f}", ""))
    return Table(
        "Two replicas on one host",
        f"`--data-parallel-placement prefix` and `round_robin`, over {REPLICAS} replicas of the embedded model, on a "
        f"thread each. {CONCURRENCY} requests at a time; each replica's cache holds {CACHE} tokens, so both together "
        "hold all documents or chats, and one does not.",
        "more tokens from the cache than in turn; a placement within microseconds, and within a millisecond for "
        "100,000 tokens.",
        ("what", "prefix", "round robin"),
        rows,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    _be_other_process(sys.argv[1:])
