"""What the embedded model's drafts gain over HTTP: `python -m benchmarks.drafts`.

Three servers take turns: one with the default drafts, and two without. The second one without shows what the method
finds where nothing differs. With `--new`, each window of `--seconds` has servers of its own, started for it. With
`--host`, the engine's loop runs in this process instead, to measure what drafts cost it outside the operators.
"""

import argparse
import asyncio
import itertools
import math
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.report import Table
from benchmarks.served import Served, chunks
from engine.config.config import EMBEDDED_MODEL_NAME, Config
from engine.core.scheduler import Scheduler
from engine.core.step_pipeline import StepPipeline
from engine.distributed.flight_record import FlightRecord
from engine.runner.loaded_model import load_model, start_operators
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as Seq
from engine.speculative.adaptive import DraftGate, DraftPlan
from models.architectures.config import ModelConfig
from models.demo import CHECKPOINT_DIR
from models.ops.cpu.runtime import Library
from tools.demo.examples import ANIMALS, NAMES, Example
from tools.demo.generate import held_out_texts

STREAMS = (1, 8, 32, 128)
ROUNDS, SECONDS = 5, 0.6
_WITHOUT = ("--num-speculative-tokens", "0")
SERVERS: dict[str, tuple[str, ...]] = {"default": (), "no drafts": _WITHOUT, "no drafts again": _WITHOUT}
_QUESTIONS = ("facts", "addition and subtraction", "about Kaon", "small talk", "copying", "outside its world")
_RUNNING = re.compile(r"^kaon_requests_running(?:\{.*\})? (\S+)$", re.MULTILINE)
_GENERATED = re.compile(r"^kaon_generation_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)

Bodies = Callable[[random.Random], Iterator[dict[str, Any]]]


def _stories(draw: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        text = f"Tell me a story about a {draw.choice(ANIMALS)} called {draw.choice(NAMES)}."
        yield {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 120}


def _questions(draw: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        messages = [message.as_openai() for message in draw.choice(_asked()).messages if message.role != "assistant"]
        yield {"messages": messages, "temperature": 0, "max_tokens": 64}


@cache
def _asked() -> list[Example]:
    found = held_out_texts(0, 40)
    return [text for category in _QUESTIONS for text in found[category] if isinstance(text, Example)]


def _never_repeating(draw: random.Random) -> Iterator[dict[str, Any]]:
    for body in _stories(draw):
        yield {**body, "temperature": 1.5, "seed": draw.randrange(1 << 30), "ignore_eos": True}


TEXTS: dict[str, Bodies] = {
    "stories, 120 tokens": _stories,
    "questions": _questions,
    "text that never repeats, temperature 1.5": _never_repeating,
}


class Rates(NamedTuple):
    """Tokens of a window for each second of time, and for each of the core's processor time."""

    by_time: float
    by_processor: float


def _counts(server: Served) -> tuple[float, float]:
    """The requests that run, and the tokens that were generated since the start."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    running, generated = (sum(map(float, each.findall(text))) for each in (_RUNNING, _GENERATED))
    return running, generated


def _processor_seconds(pid: int) -> float:
    """Processor time of all threads, which the system counts in nanoseconds."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError):
            total += int(file.read_text().split()[0])
    return total / 1e9


async def _stream(server: Served, bodies: Iterator[dict[str, Any]]) -> None:
    for body in bodies:
        async for _ in chunks(server.port, "/v1/chat/completions", {"model": EMBEDDED_MODEL_NAME, **body}):
            pass


async def window(server: Served, bodies: Bodies, streams: int, seconds: float, seed: int) -> Rates:
    """Keep `streams` requests running for so long, then cancel them."""
    pid = server.core.pid
    _asked()
    sources = [bodies(random.Random(f"{seed} {stream}")) for stream in range(streams)]
    _, generated = _counts(server)
    used, start = _processor_seconds(pid), time.perf_counter()
    tasks = [asyncio.create_task(_stream(server, source)) for source in sources]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [task for task in tasks if not task.cancelled()]
    if failed:
        failed[0].result()
    while _counts(server)[0]:
        await asyncio.sleep(0.001)
    taken, used = time.perf_counter() - start, _processor_seconds(pid) - used
    tokens = _counts(server)[1] - generated
    if not tokens:
        raise RuntimeError(f"{streams} streams had no token in {seconds:g} s: the machine is too busy")
    return Rates(tokens / taken, tokens / used)


def measure(texts: Sequence[str], streams: Sequence[int], rounds: int, seconds: float, *, new: bool) -> Table:
    """Windows of all loads in turn, `rounds` times; means of the ratios, and their standard errors."""
    found: dict[tuple[str, str, int], list[Rates]] = {}
    loads = list(itertools.product(texts, streams))
    with ExitStack() as stack:
        servers = {} if new else {name: stack.enter_context(Served(*flags)) for name, flags in SERVERS.items()}
        for number in range(rounds):
            for text, count in loads:
                # Each server is first, second and last equally often.
                order = [list(SERVERS)[(number + turn) % len(SERVERS)] for turn in range(len(SERVERS))]
                for name in order:
                    with ExitStack() as once:
                        server = servers.get(name) or once.enter_context(Served(*SERVERS[name]))
                        rates = asyncio.run(window(server, TEXTS[text], count, seconds, number))
                    found.setdefault((name, text, count), []).append(rates)
    rows = []
    for text in texts:
        for name in ("default", "no drafts again"):
            cells = (_ratio(found[name, text, count], found["no drafts", text, count]) for count in streams)
            rows.append((text if name == "default" else "", name, *cells))
    what = "new servers for each window" if new else "windows of all loads in turn"
    return Table(
        "Drafts of the embedded model",
        f"Tokens a second over HTTP as multiples of those of a server with `{' '.join(_WITHOUT)}`: {rounds} rounds of "
        f"{seconds:g} s, {what}, means and standard errors; in brackets for each second of the core's processor time.",
        "1 stream at least 1.6, 8 streams at least 1.3, and never less than 0.98.",
        ("text", "", *(f"{count} stream{'s' if count > 1 else ''}" for count in streams)),
        rows,
    )


def _ratio(rates: Sequence[Rates], plain: Sequence[Rates]) -> str:
    time_ratio, processor_ratio = (
        _mean_and_error([each[field] / other[field] for each, other in zip(rates, plain, strict=True)])
        for field in range(2)
    )
    return f"{time_ratio} ({processor_ratio})"


def _mean_and_error(ratios: Sequence[float]) -> str:
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = math.exp(statistics.fmean(logarithms))
    if len(ratios) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {mean * statistics.stdev(logarithms) / math.sqrt(len(ratios)):.2f}"


_DRAFTS, _WARM, _CONTEXT = 3, 12, 3900
_HEAD = {"speculative_method": "eagle", "num_speculative_tokens": _DRAFTS}


def host_table(streams: Sequence[int], steps: int = 60) -> Table:
    """The host's part of steps without drafts, and with three of each row in every round."""
    rows = []
    for count in streams:
        (plain, _), (drafting, rounds) = (_host(count, steps, drafts=drafts) for drafts in (False, True))
        added = (drafting - plain) / count
        figures = (f"{each:.0f}" for each in (plain, drafting, added))
        rows.append((str(count), *figures, f"{rounds:.1f}", f"{added / rounds:.0f}"))
    return Table(
        "Host cost of drafts",
        "Microseconds that a step's schedule, launch, reading and statistics take outside the operators, greedy: the "
        f"first tenth of {steps} steps of the embedded model, which other programs lengthen least, without drafts and "
        "with three of each row in every round.",
        "at most 15 us a sequence.",
        ("rows", "plain step", "step with drafts", "more, a row", "rounds", "more, a row and round"),
        rows,
    )


def _host(num_rows: int, steps: int, *, drafts: bool) -> tuple[float, float]:
    """Microseconds of a step outside the operators, the first tenth, and the mean number of its rounds."""
    config = Config.model_validate(
        {
            "max_num_seqs": (1 + _DRAFTS) * num_rows,
            "max_model_len": _CONTEXT,
            "num_kvcache_blocks": num_rows * (2 + _CONTEXT // 16),
            "speculative_config": _HEAD if drafts else None,
        }
    )
    cpu, model = torch.device("cpu"), ModelConfig.from_checkpoint(CHECKPOINT_DIR)
    operators = start_operators(config, cpu, torch.bfloat16)
    assert operators is not None, "the compiled operators are not there"
    runner = ModelRunner(
        load_model(config, CHECKPOINT_DIR, model, cpu, torch.bfloat16, operators=operators),
        num_rows * (2 + _CONTEXT // 16),
    )
    scheduler = Scheduler(runner.config, max_rounds=runner.max_rounds)
    pipeline = StepPipeline(scheduler, runner, FlightRecord.of_its_own(config.max_num_seqs))
    params = SamplingParams(temperature=0.0, max_tokens=_CONTEXT - 64, ignore_eos=True)
    scheduler.extend(Seq([60 + row % 64] * (16 + row % 16), 16, params, id=row) for row in range(num_rows))
    in_operators, run, limit = [0.0], Library.run, DraftPlan.limit

    def timed(*arguments: Any, **fields: Any) -> int:
        start = time.perf_counter()
        done = run(*arguments, **fields)
        in_operators[0] += time.perf_counter() - start
        return done

    seconds, rounds = [], []
    with (
        patch.object(Library, "run", timed),
        # Blocks are timed and planned as ever, but drafting goes on whatever it gains.
        patch.object(DraftGate, "_end_block", lambda gate, **_: gate._begin()),
        patch.object(DraftPlan, "limit", lambda plan, seq: max(limit(plan, seq), _DRAFTS)),
        patch.object(DraftPlan, "limit_rows", lambda _, limits: limits),
    ):
        for _ in range(_WARM + steps):
            start, in_operators[0] = time.perf_counter(), 0.0
            failed = pipeline.advance(lambda *_: None)
            assert failed is None, failed
            seconds.append(time.perf_counter() - start - in_operators[0])
            rounds.append(scheduler.drafts.num_rounds_read)
    assert len(scheduler.running) == num_rows, "no row has ended"
    return 1e6 * statistics.quantiles(seconds[_WARM:], n=10)[0], statistics.fmean(rounds[_WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--new", action="store_true", help="start new servers for each window")
    parser.add_argument("--host", action="store_true", help="measure the host's part of steps in this process")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of a window")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--texts", nargs="+", default=("",), help=f"beginnings of {', '.join(TEXTS)}; all by default")
    options = parser.parse_args()
    if options.host:
        sys.stdout.write(host_table(options.streams).markdown())
        return
    texts = [text for text in TEXTS if text.startswith(tuple(options.texts))]
    table = measure(texts, options.streams, options.rounds, options.seconds, new=options.new)
    sys.stdout.write(table.markdown())


if __name__ == "__main__":
    main()
