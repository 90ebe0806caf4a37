"""Host time of an engine step: the scheduler's loop with a stub in place of the model, and the cost of a grammar."""

import itertools
import statistics
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.report import Table
from benchmarks.served import Served
from engine.batch import ScheduledBatchOutput
from engine.config.config import Config
from engine.core.scheduler import Scheduler
from engine.messages import RequestOutput
from engine.runner.loaded_model import load_model
from engine.runner.model_runner import ModelRunner
from engine.sampling.parameters import SamplingColumns
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.structured.matcher import Matchers
from engine.text.structured.spec import GrammarSpec, lark_of
from engine.text.tokenizer import Tokenizer
from models.architectures.config import ModelConfig
from models.demo import CHECKPOINT_DIR

BLOCK_SIZE = 16
LOOP_STEPS = 400


def decode_step_seconds(num_seqs: int, context: int, steps: int) -> tuple[float, float]:
    """Median seconds of `schedule()` and of `postprocess()` over `steps` decode steps."""
    blocks = num_seqs * (-(-(context + steps + 32) // BLOCK_SIZE))
    config = Config(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * context,
        num_kvcache_blocks=blocks,
        eos_token_id=0,
        stop_token_ids=(1,),
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=steps + 32)
    for row in range(num_seqs):
        # Contexts differ by row, so that block boundaries are distributed over the steps as in real loads.
        scheduler.add(Sequence([10 + row] * (context + row % BLOCK_SIZE - 15), BLOCK_SIZE, params))
    queue = SimpleQueue[list[RequestOutput]]()
    schedule_times, postprocess_times = [], []
    for step in range(steps + 1):
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        middle = time.perf_counter()
        assert scheduled is not None
        batch, seqs = scheduled
        token = itertools.repeat((100 + step,))
        output = ScheduledBatchOutput(dict(zip(batch.req_ids, token, strict=False)))
        begin = time.perf_counter()
        scheduler.postprocess(list(seqs.values()), output, queue)
        end = time.perf_counter()
        queue.get_nowait()
        if step:
            schedule_times.append(middle - start)
            postprocess_times.append(end - begin)
    return statistics.median(schedule_times), statistics.median(postprocess_times)


def engine_loop_table(steps: int = LOOP_STEPS) -> Table:
    """Medians over `steps` steady decode steps, by batch and context."""
    rows = []
    for num_seqs, context in [(1, 1024), (32, 1024), (256, 1024), (256, 16384), (512, 1024)]:
        schedule, postprocess = (1e3 * seconds for seconds in decode_step_seconds(num_seqs, context, steps))
        times = (f"{ms:.3f}" for ms in (schedule, postprocess, schedule + postprocess))
        rows.append((str(num_seqs), str(context), *times))
    return Table(
        "Engine loop",
        f"Host time of a decode step with the model replaced by a stub: schedule, batch and postprocess. Medians over "
        f"{steps} steps.",
        "at most 0.4 ms a step at 256 running sequences of 1k contexts, and flat in context length.",
        ("sequences", "context", "schedule, ms", "postprocess, ms", "total, ms"),
        rows,
    )


# Costs of structured output: the first use of a schema end to end, and a decode step at batch 32 with a cached one.

BATCH = 32
GRAMMAR_STEPS = 100
FIELDS = 50
WIDE_VOCABULARY = 151_936
HIDDEN_SIZE = 1024


def schema(title: str = "") -> dict[str, Any]:
    """A schema of fifty required fields of three types."""
    names = [f"field_{i}" for i in range(FIELDS)]
    types = ("string", "integer", "boolean")
    fields = {name: {"type": types[i % 3]} for i, name in enumerate(names)}
    return {
        "title": title,
        "type": "object",
        "properties": fields,
        "required": names,
        "additionalProperties": False,
    }


class WideTokenizer:
    """A vocabulary as large as a large model's, of random text."""

    special_ids = frozenset({WIDE_VOCABULARY - 1})

    def __init__(self) -> None:
        chance = np.random.default_rng(0)
        letters = np.frombuffer(
            b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _{}[]":,.-\n', np.uint8
        )
        tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(tokens) < WIDE_VOCABULARY - 1:
            tokens[chance.choice(letters, chance.integers(2, 9)).tobytes()] = None
        self._tokens = list(tokens)

    def token(self, token_id: int) -> str:
        return "<|end|>" if token_id in self.special_ids else ""

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def first_use_milliseconds() -> tuple[float, float, float]:
    """Time from request to one-token answer over HTTP: the server's first schema, new ones after it, a known one."""
    with Served() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        ask(client, None)
        first = ask(client, schema())
        others = [ask(client, schema(str(number))) for number in range(9)]
        known = [ask(client, schema()) for _ in range(9)]
    return first, statistics.median(others), statistics.median(known)


def ask(client: httpx.Client, form: dict[str, Any] | None) -> float:
    """Milliseconds of an answer of one token."""
    body: dict[str, Any] = {"model": "kaon-demo", "prompt": "Hello", "max_tokens": 1}
    if form is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    start = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return 1e3 * (time.perf_counter() - start)


def embedded_steps() -> Callable[[str | None], list[float]]:
    """Whole decode steps of the embedded model: scheduler, model, sampler."""
    model = ModelConfig.from_checkpoint(CHECKPOINT_DIR)
    config = Config(num_kvcache_blocks=1024, max_num_seqs=BATCH, eos_token_id=model.eos_token_ids[0])
    loaded = load_model(config, CHECKPOINT_DIR, model, torch.device("cpu"), torch.float32, operators=None)
    runner = ModelRunner(loaded, 1024)
    matchers = Matchers(lambda: Tokenizer.from_checkpoint(CHECKPOINT_DIR), model.vocab_size, model.eos_token_ids)
    matchers.load()

    def run(grammar: str | None) -> list[float]:
        scheduler = Scheduler(config)
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=2 * GRAMMAR_STEPS, ignore_eos=True, grammar=grammar
        )
        for row in range(BATCH):
            seq = Sequence([60 + row] * 20, config.kv_cache_block_size, params, id=row)
            seq.matcher = None if grammar is None else matchers.matcher(grammar)
            scheduler.add(seq)
        seconds = []
        for _ in range(GRAMMAR_STEPS):
            start = time.process_time()
            scheduled = scheduler.schedule()
            assert scheduled is not None
            batch, seqs = scheduled
            scheduler.postprocess(list(seqs.values()), runner.forward(batch))
            if len(seqs) == BATCH:
                seconds.append(time.process_time() - start)
        return seconds[1:]

    return run


def wide_steps() -> Callable[[str | None], list[float]]:
    """Output layer and sampling of a model with a large vocabulary: the shortest possible step of such a model."""
    matchers = Matchers(WideTokenizer, WIDE_VOCABULARY, [WIDE_VOCABULARY - 1])  # type: ignore[arg-type]
    matchers.load()
    weights = torch.randn(WIDE_VOCABULARY, HIDDEN_SIZE)
    sampler = Sampler()

    def run(grammar: str | None) -> list[float]:
        columns = SamplingColumns(max_num_seqs=BATCH, vocab_size=WIDE_VOCABULARY, seed=0)
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=2 * GRAMMAR_STEPS, ignore_eos=True, grammar=grammar
        )
        seqs = [Sequence([1, 2, 3], 16, params, id=row) for row in range(BATCH)]
        for row, seq in enumerate(seqs):
            seq.matcher = None if grammar is None else matchers.matcher(grammar)
            columns.write(row, seq)
        slots, tokens = np.arange(BATCH), np.zeros((BATCH, 2 * GRAMMAR_STEPS), dtype=np.int32)
        seconds = []
        for step in range(GRAMMAR_STEPS // 2):
            hidden = torch.randn(BATCH, HIDDEN_SIZE)
            start = time.process_time()
            with torch.inference_mode():
                logits = torch.nn.functional.linear(hidden, weights) / HIDDEN_SIZE
                rows = columns.rows(slots, np.full(BATCH, 3 + step), tokens)
                sampled = sampler.sample(logits, rows)
            for seq, token_id in zip(seqs, sampled.token_ids.tolist(), strict=True):
                if seq.matcher is not None and not seq.matcher.is_complete:
                    seq.matcher.accept(token_id)
            seconds.append(time.process_time() - start)
        return seconds[1:]

    return run


def added_by_a_grammar(run: Callable[[str | None], list[float]]) -> tuple[float, float]:
    """Median milliseconds of a step without a grammar, and with a compiled one."""
    grammar = lark_of(GrammarSpec("json", schema()))
    run(grammar)
    free, held = [], []
    for _ in range(3):
        free += run(None)
        held += run(grammar)
    return 1e3 * statistics.median(free), 1e3 * statistics.median(held)


def structured_output_table() -> Table:
    """Measure first uses by wall-clock time, and steps by the CPU time of one thread, which other processes do not
    lengthen."""
    first, new, known = first_use_milliseconds()
    rows = [
        ("a server's first schema, to its one-token answer", f"{first:.0f}", "", ""),
        ("a schema never seen before", f"{new:.1f}", "", ""),
        ("a known schema", f"{known:.1f}", "", ""),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, steps in (
        ("decode step of the embedded model", embedded_steps()),
        ("output layer and sampling over 151936 tokens", wide_steps()),
    ):
        free, held = added_by_a_grammar(steps)
        rows.append((f"{name}, batch {BATCH}", f"{held:.2f}", f"{free:.2f}", f"{100 * (held / free - 1):+.1f} %"))
    torch.set_num_threads(threads)
    return Table(
        "Structured output",
        f"A JSON schema of {FIELDS} required fields, sampled at temperature 1. First uses are end to end over HTTP; "
        "steps are medians of one thread's CPU time.",
        "at most 200 ms for the first use of a schema, and 10 % on a step.",
        ("", "ms", "ms without", "added"),
        rows,
    )
