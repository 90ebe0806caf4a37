"""A prompt's pass at the 8B shape, against its operations at the matrix rate."""

import itertools
import statistics
from collections.abc import Iterator

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.case import Case, Values
from benchmarks.gpu.shapes import BLOCK_SIZE, RandomRunner, runner_of
from benchmarks.gpu.stepping import random_ids
from engine.batch import ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.model_config import ModelConfig

_REPEATS = 5


def cases(bench: Bench) -> Iterator[Case]:
    """Whole prompts, and one in chunks behind what is computed already."""
    longest = bench.size(8192, 16)
    runners: list[RandomRunner] = []
    for length, cached in ((longest, 0), (longest // 4, 0), (longest // 4, longest * 3 // 4)):
        name = f"8B, {length} tokens" + (f" behind {cached}" if cached else "")
        yield Case(name, lambda length=length, cached=cached: _measure(bench, runners, length, cached))  # type: ignore[misc]


def _measure(bench: Bench, runners: list[RandomRunner], length: int, cached: int) -> Values:
    longest = bench.size(8192, 16)
    if not runners:
        blocks = longest // BLOCK_SIZE + 1
        runners.append(
            runner_of(bench, "8B", max_num_seqs=1, max_model_len=blocks * BLOCK_SIZE, num_blocks=2 * blocks)
        )
    (runner,) = runners
    ids, took = itertools.count(), []
    for _ in range(1 if bench.is_dry else _REPEATS):
        seq = Sequence(
            random_ids(cached + length, runner.model_config.vocab_size, next(ids)),
            BLOCK_SIZE,
            SamplingParams(temperature=0.0, max_tokens=4),
            id=next(ids),
        )
        seq.slot, seq.block_table = 0, list(range(seq.num_blocks))
        begin = bench.mark()
        step = runner.launch(
            ScheduledBatch(
                {seq.id: seq},
                [length],
                length,
                total_tokens_num_prefill=length,
                total_seqs_num=1,
                total_seqs_num_prefill=1,
                new_seqs=[seq],
            )
        )
        end = bench.mark()
        step.result()
        bench.synchronize()
        took.append(begin.seconds_to(end))
    median, operations = statistics.median(took), operations_of(runner, length, cached)
    bound = bench.bound(operations=operations)
    return {
        "ms": median * 1e3,
        "bound, ms": bound * 1e3,
        "of the matrix rate": bound / median,
        "tokens/s": length / median,
        "TFLOP": operations / 1e12,
    }


def operations_of(runner: RandomRunner, length: int, cached: int) -> float:
    """Two a weight and token, of the head for the last token alone; four a query's and key's dimension and head."""
    config = runner.model_config
    assert isinstance(config, ModelConfig)
    table = runner.embedding_parameters
    layers = sum(weight.numel() for weight in runner.model.parameters())
    layers -= table if config.tie_word_embeddings else 2 * table
    pairs = length * cached + length * (length + 1) / 2
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 2.0 * layers * length + 2.0 * table + attention
