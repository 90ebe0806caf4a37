"""What the embedded model's drafts gain over HTTP: `python -m benchmarks.drafts`.

Three servers take turns: one with the default drafts, and two without, whose ratio shows what the method finds where
nothing differs. With `--new`, each window of `--seconds` has servers of its own, started for it. With `--ideal` and
`--host`, the engine's loop runs in this process instead: to compare numbers of drafts, and to measure what drafts cost
outside the operators. It has as many threads as OMP_NUM_THREADS says.
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
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tokenizers import Tokenizer

from benchmarks.report import Table
from benchmarks.served import Served, chunks
from engine.config.config import EMBEDDED_MODEL_NAME, Config
from engine.core.scheduler import Scheduler
from engine.core.step_pipeline import StepPipeline
from engine.distributed.flight_record import FlightRecord
from engine.messages import RequestOutput
from engine.runner.loaded_model import load_model, start_operators
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as Seq
from engine.speculative.adaptive import DraftGate, DraftPlan
from engine.speculative.drafts import Drafts
from models.architectures.config import ModelConfig
from models.demo import CHECKPOINT_DIR
from models.ops.cpu.runtime import Library
from tools.demo.examples import ANIMALS, NAMES, Example, chat_template
from tools.demo.generate import held_out_texts

STREAMS = (1, 8, 32, 128)
ROUNDS, SECONDS = 5, 0.6
_MOST_TURNS = 10
"""Multiples of a window's time without a token after which the machine is too busy."""
_WITHOUT = ("--num-speculative-tokens", "0")
SERVERS: dict[str, tuple[str, ...]] = {"default": (), "no drafts": _WITHOUT, "no drafts again": _WITHOUT}
_QUESTIONS = ("facts", "addition and subtraction", "about Kaon", "small talk", "copying", "outside its world")
_RUNNING = re.compile(r"^kaon_requests_running(?:\{.*\})? (\S+)$", re.MULTILINE)
_GENERATED = re.compile(r"^kaon_generation_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(r"^kaon_accepted_draft_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)

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
    drafted: float
    """The share of them that were drafts."""


def _counts(server: Served) -> tuple[float, float, float]:
    """The requests that run, and the tokens and accepted drafts since the start."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    running, generated, accepted = (sum(map(float, each.findall(text))) for each in (_RUNNING, _GENERATED, _ACCEPTED))
    return running, generated, accepted


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
    """Keep `streams` requests running for `seconds`, or longer until there is a token, then cancel them."""
    pid = server.core.pid
    _asked()
    sources = [bodies(random.Random(f"{seed} {stream}")) for stream in range(streams)]
    _, generated, accepted = _counts(server)
    used, start = _processor_seconds(pid), time.perf_counter()
    tasks = [asyncio.create_task(_stream(server, source)) for source in sources]
    for _ in range(_MOST_TURNS):
        # Prompts of many streams may take longer than a turn on a busy machine.
        await asyncio.sleep(seconds)
        if (await asyncio.to_thread(_counts, server))[1] > generated:
            break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = [task for task in tasks if not task.cancelled()]
    if failed:
        failed[0].result()
    while _counts(server)[0]:
        await asyncio.sleep(0.001)
    taken, used = time.perf_counter() - start, _processor_seconds(pid) - used
    _, generated_by_now, accepted_by_now = _counts(server)
    tokens = generated_by_now - generated
    if not tokens:
        raise RuntimeError(f"{streams} streams had no token in {taken:.1f} s: the machine is too busy")
    return Rates(tokens / taken, tokens / used, (accepted_by_now - accepted) / tokens)


def measure(texts: Sequence[str], streams: Sequence[int], rounds: int, seconds: float, *, new: bool) -> Table:
    """Windows of all loads in turn, `rounds` times; medians of the ratios, and the range of the control's."""
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
        default, plain, again = ([found[name, text, count] for count in streams] for name in SERVERS)
        rows += [
            (text, "default", *map(_gain, default, plain, again)),
            ("", "control", *map(_range, again, plain)),
            ("", "from drafts", *(f"{statistics.median(each.drafted for each in rates):.2f}" for rates in default)),
        ]
    what = "new servers for each window" if new else "windows of all loads in turn"
    return Table(
        "Drafts of the embedded model",
        f"Tokens a second over HTTP as multiples of those of two servers with `{' '.join(_WITHOUT)}`, of which the "
        f"geometric mean counts: medians of {rounds} rounds of {seconds:g} s, {what}; in brackets for each second of "
        "the core's processor time. Control: the least and the largest ratio of these two servers to one another. "
        "From drafts: the share of the tokens that were accepted drafts, in the median.",
        "1 stream at least 1.6, 8 streams at least 1.3, and never less than 0.98.",
        ("text", "", *(f"{count} stream{'s' if count > 1 else ''}" for count in streams)),
        rows,
    )


def _gain(default: Sequence[Rates], plain: Sequence[Rates], again: Sequence[Rates]) -> str:
    turns = [*zip(default, plain, again, strict=True)]
    by_time, by_processor = (
        statistics.median(drafts[field] / math.sqrt(one[field] * other[field]) for drafts, one, other in turns)
        for field in range(2)
    )
    return f"{by_time:.2f} ({by_processor:.2f})"


def _range(again: Sequence[Rates], plain: Sequence[Rates]) -> str:
    by_time, by_processor = (
        [one[field] / other[field] for one, other in zip(again, plain, strict=True)] for field in range(2)
    )
    spans = (f"{min(each):.2f} to {max(each):.2f}" for each in (by_time, by_processor))
    return "{} ({})".format(*spans)


_DRAFTS, _WARM, _CONTEXT = 3, 12, 3900
_HEAD = {"speculative_method": "eagle"}


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


class _Loop:
    """The loop of an engine with the embedded model in this process, with drafts or without."""

    def __init__(self, num_rows: int, context: int, num_drafts: int) -> None:
        num_blocks = num_rows * (2 + context // 16)
        config = Config.model_validate(
            {
                "max_num_seqs": (1 + _DRAFTS) * num_rows,
                "max_model_len": context,
                "num_kvcache_blocks": num_blocks,
                "eos_token_id": ModelConfig.from_checkpoint(CHECKPOINT_DIR).eos_token_ids[0],
                "speculative_config": {**_HEAD, "num_speculative_tokens": num_drafts} if num_drafts else None,
            }
        )
        cpu, model = torch.device("cpu"), ModelConfig.from_checkpoint(CHECKPOINT_DIR)
        operators = start_operators(config, cpu, torch.bfloat16)
        assert operators is not None, "the compiled operators are not there"
        loaded = load_model(config, CHECKPOINT_DIR, model, cpu, torch.bfloat16, operators=operators)
        runner = ModelRunner(loaded, num_blocks)
        self.scheduler = Scheduler(runner.config, max_rounds=runner.max_rounds)
        self.pipeline = StepPipeline(self.scheduler, runner, FlightRecord.of_its_own(config.max_num_seqs))
        self._num_drafts = num_drafts

    @contextmanager
    def always_drafting(self) -> Iterator[None]:
        """Blocks are timed and planned as ever, but each row drafts whatever it gains."""
        with (
            patch.object(DraftGate, "_end_block", lambda gate, **_: gate._begin()),
            patch.object(DraftPlan, "limit", lambda *_: self._num_drafts),
            patch.object(DraftPlan, "limit_rows", lambda _, limits: limits),
            patch.object(DraftPlan, "is_idle", property(lambda _: False)),
        ):
            yield

    def step(self) -> tuple[int, float, float]:
        """Run a step. Returns its number of tokens, and the thread's seconds in the operators and outside of them.

        The seconds are of processor time, which other programs lengthen least.
        """
        start, in_operators, num_tokens, run = time.thread_time(), 0.0, 0, Library.run

        def timed(*arguments: Any, **fields: Any) -> int:
            nonlocal in_operators
            began = time.thread_time()
            done = run(*arguments, **fields)
            in_operators += time.thread_time() - began
            return done

        def count(outputs: list[RequestOutput], *_: object) -> None:
            nonlocal num_tokens
            num_tokens = sum(len(output.output_tokens) for output in outputs)

        with patch.object(Library, "run", timed):
            failed = self.pipeline.advance(count)
        assert failed is None, failed
        return num_tokens, in_operators, time.thread_time() - start - in_operators


def _host(num_rows: int, steps: int, *, drafts: bool) -> tuple[float, float]:
    """Microseconds of a step outside the operators, the first tenth, and the mean number of its rounds."""
    loop, seconds, rounds = _Loop(num_rows, _CONTEXT, _DRAFTS if drafts else 0), [], []
    params = SamplingParams(temperature=0.0, max_tokens=_CONTEXT - 64, ignore_eos=True)
    loop.scheduler.extend(Seq([60 + row % 64] * (16 + row % 16), 16, params, id=row) for row in range(num_rows))
    with loop.always_drafting():
        for _ in range(_WARM + steps):
            seconds.append(loop.step()[2])
            rounds.append(loop.scheduler.drafts.num_rounds_read)
    assert len(loop.scheduler.running) == num_rows, "no row has ended"
    return 1e6 * statistics.quantiles(seconds[_WARM:], n=10)[0], statistics.fmean(rounds[_WARM:])


_IDEAL_SECONDS = 0.15


class _Stories:
    """Streams of stories through a `_Loop`. Each begins another story when one ends."""

    def __init__(self, streams: int, num_drafts: int, *, always: bool) -> None:
        self._loop, self._always, self._streams = _Loop(streams, 512, num_drafts), always and num_drafts > 0, streams
        self._bodies = [_stories(random.Random(stream)) for stream in range(streams)]
        self._tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
        self._rows: list[Seq | None] = [None] * streams
        self.rates: list[tuple[float, float]] = []
        """Tokens a second of each window, and for each second of the thread's processor time."""
        self.rounds: list[tuple[float, float, int]] = []
        """Seconds of a round in the operators and of its step outside of them, and the step's number of rounds, of
        steps in which all streams decode."""

    @property
    def drafts(self) -> Drafts:
        return self._loop.scheduler.drafts

    def window(self) -> None:
        # Other loops have run since the last window.
        self._loop.pipeline.note_wait()
        num_tokens, end, used = 0, (start := time.perf_counter()) + _IDEAL_SECONDS, time.thread_time()
        with self._loop.always_drafting() if self._always else nullcontext():
            while time.perf_counter() < end:
                self._begin_stories()
                is_full = len(self._loop.scheduler.running) == self._streams
                count, inside, outside = self._loop.step()
                num_tokens += count
                rounds = self.drafts.num_rounds_read
                if is_full and (not self._always or count > self._streams):
                    self.rounds.append((inside / rounds, outside, rounds))
        self.rates.append((num_tokens / (time.perf_counter() - start), num_tokens / (time.thread_time() - used)))

    def _begin_stories(self) -> None:
        for stream, row in enumerate(self._rows):
            if row is not None and not row.is_finished:
                continue
            body = next(self._bodies[stream])
            text = chat_template().render(messages=body["messages"], tools=None, add_generation_prompt=True)
            params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"])
            self._rows[stream] = seq = Seq(self._tokenizer.encode(text, add_special_tokens=False).ids, 16, params)
            self._loop.scheduler.add(seq)


def ideal_table(streams: Sequence[int], rounds: int) -> Table:
    """Numbers of drafts in every step, compared in windows in turn; and what the default chooses."""
    rows = []
    for count in streams:
        numbers = {"none": 0, "1": 1, "2": 2, "3": 3, "default": _DRAFTS}
        loops = {name: _Stories(count, most, always=name != "default") for name, most in numbers.items()}
        for number in range(1 + rounds):
            order = [*loops][number % len(loops) :] + [*loops][: number % len(loops)]
            for name in order:
                loops[name].window()
        plain = loops["none"]
        # The first window measures a new engine.
        inside, outside, _ = (statistics.median(each) for each in zip(*plain.rounds, strict=True))
        for name, loop in loops.items():
            in_round, at_host, num_rounds = (statistics.median(each) for each in zip(*loop.rounds, strict=True))
            verified = 1.0 + loop.drafts.num_accepted / max(1, loop.drafts.num_verifications)
            ideal = verified * (inside + outside) / in_round
            gains = (
                statistics.median(
                    one[field] / other[field] for one, other in zip(loop.rates[1:], plain.rates[1:], strict=True)
                )
                for field in range(2)
            )
            figures = f"{1e3 * in_round:.2f}", f"{1e3 * at_host:.2f}", f"{num_rounds:.0f}", f"{verified:.2f}"
            is_forced = name not in {"none", "default"}
            rows.append(
                (str(count), name, *figures, f"{ideal:.2f}" if is_forced else "", "{:.2f} ({:.2f})".format(*gains))
            )
    return Table(
        "The ideal number of drafts",
        f"Stories through the engine's loop, without HTTP, on {torch.get_num_threads()} threads: medians of {rounds} "
        f"windows of {_IDEAL_SECONDS:g} s in turn, processor milliseconds of steps in which all streams decode. "
        "Ideal: tokens of a verification times a plain step, host included, divided by a round's operators alone. "
        "Gain: tokens a second relative to no drafts, in brackets for each second of the thread's processor time.",
        "the default gains as much as the best number.",
        (
            "streams",
            "drafts",
            "round's operators",
            "step's host",
            "rounds",
            "tokens of a verification",
            "ideal",
            "gain",
        ),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--new", action="store_true", help="start new servers for each window")
    parser.add_argument("--ideal", action="store_true", help="compare numbers of drafts in this process")
    parser.add_argument("--host", action="store_true", help="measure the host's part of steps in this process")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of a window")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--texts", nargs="+", default=("",), help=f"beginnings of {', '.join(TEXTS)}; all by default")
    options = parser.parse_args()
    if options.ideal:
        sys.stdout.write(ideal_table(options.streams, options.rounds).markdown())
        return
    if options.host:
        sys.stdout.write(host_table(options.streams).markdown())
        return
    texts = [text for text in TEXTS if text.startswith(tuple(options.texts))]
    table = measure(texts, options.streams, options.rounds, options.seconds, new=options.new)
    sys.stdout.write(table.markdown())


if __name__ == "__main__":
    main()
