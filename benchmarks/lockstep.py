"""What replicas of one host that share experts out cost beside one engine that has all: an exchange, and a step.

Run as `python -m benchmarks.lockstep`; it starts the second replica itself.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Table
from benchmarks.second_process import second_process

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine
    from models.parallel import Exchange

ROUNDS, STEPS = 7, 100
EXCHANGES, WARM_UP = 1000, 100
TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 2048, 64, 8
PROMPT = [5, 9, 17, 4, 8]
"""Of the steps' requests, which decode one sequence on each busy replica."""


def _exchanges(exchange: "Exchange", replica: int) -> list[float]:
    """Seconds of each: tokens to their experts, which do nothing, and back."""
    import torch

    local = range(replica * EXPERTS // 2, (replica + 1) * EXPERTS // 2)
    hidden = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(replica)).topk(TOP_K).indices
    times = []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        exchange.across(range(EXPERTS), local, hidden, ids, lambda rows, _, tokens: rows[tokens], (TOKENS, TOKENS))
        times.append(time.perf_counter() - start)
    return sorted(times[WARM_UP:])


def _by(kind: str, where: str, replica: int) -> list[float]:
    import torch

    from models.kernels.cpu import runtime
    from models.kernels.cpu.exchange import SharedMemoryExchange
    from models.replica_world import ReplicaWorld

    torch.set_num_threads(1)
    if kind == "gloo":
        world = ReplicaWorld(
            replica=replica,
            num_replicas=2,
            rank=0,
            size=1,
            device=torch.device("cpu"),
            store=Path(where),
            timeout=60.0,
        )
        world.join()
        return _exchanges(world, replica)
    library = runtime.start(1)
    if library is None:
        raise RuntimeError("the operators were not built")
    return _exchanges(SharedMemoryExchange(library, replica, 2, int(where), TOKENS), replica)


def exchange_rows() -> Iterator[tuple[str, ...]]:
    """Median and 99th percentile by Gloo and through shared memory."""
    memory = os.memfd_create("benchmark")
    with tempfile.TemporaryDirectory() as directory:
        for name, kind, where in (("Gloo", "gloo", f"{directory}/store"), ("shared memory", "memory", str(memory))):
            with second_process("benchmarks.lockstep", kind, where, descriptors=(memory,)):
                times = _by(kind, where, 0)
            median, tail = (f"{1e6 * times[int(share * len(times))]:.0f}" for share in (0.5, 0.99))
            what = f"{TOKENS} tokens of {HIDDEN} to {TOP_K} experts each and back, {name}"
            yield what, f"{median} µs", f"{tail} µs"
    os.close(memory)


def _write_checkpoint(directory: Path) -> Path:
    """Random weights, and the embedded model's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from models.demo import CHECKPOINT_DIR

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
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((CHECKPOINT_DIR / file).read_bytes())
    return directory


def _engine(path: Path, replicas: int, collectives: str) -> "LLMEngine":
    from engine.config import ParallelConfig
    from engine.llm_engine import LLMEngine

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


def _step_seconds(engine: "LLMEngine", busy: int) -> float:
    from engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([PROMPT] * busy, params, use_tqdm=False)
    return (time.perf_counter() - start) / STEPS


def step_rows() -> Iterator[tuple[str, ...]]:
    """Each kind of step in turn."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = _write_checkpoint(Path(directory))
        with (
            _engine(path, 1, "shared_memory") as alone,
            _engine(path, 2, "shared_memory") as two,
            _engine(path, 2, "gloo") as by_gloo,
        ):
            for _ in range(ROUNDS):
                for name, engine, busy in (
                    ("one engine", alone, 1),
                    ("two replicas, one of them idle", two, 1),
                    ("two replicas, both busy", two, 2),
                    ("two replicas, both busy, Gloo", by_gloo, 2),
                ):
                    seconds.setdefault(name, []).append(_step_seconds(engine, busy))
    for name, found in seconds.items():
        yield f"a step of {name}", f"{1e3 * statistics.median(found):.2f} ms", f"{1e3 * min(found):.2f} ms at best"


def run() -> Table:
    """Exchanges alone, then steps of a model that computes next to nothing, so that the rest shows."""
    return Table(
        "Experts over two replicas of one host",
        f"A layer's exchange by itself, {EXCHANGES} times, median and 99th percentile; and decode steps of one "
        f"sequence on each busy replica, from {ROUNDS} rounds in turn of {STEPS} steps of a mixture of 2 layers with "
        "a hidden size of 64. Each replica on one thread.",
        "a step of two replicas at most 1 ms longer than one engine's.",
        ("what", "median", ""),
        [*exchange_rows(), *step_rows()],
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        _by(sys.argv[1], sys.argv[2], 1)
    else:
        sys.stdout.write(run().markdown())
