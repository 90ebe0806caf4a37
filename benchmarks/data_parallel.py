"""What placing requests by their prefixes gains over taking replicas in turn, and what it costs.

Run as `python -m benchmarks.data_parallel`.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.report import Table
from engine.config import Config
from engine.core_manager import CoreManager
from engine.messages import AddRequest
from engine.placement import Placement
from engine.sampling_params import SamplingParams

REPLICAS = 2
CONCURRENCY = 8
PREFIX, QUESTION, ANSWER = 1024, 48, 16
"""Tokens."""
DOCUMENTS, QUESTIONS = 40, 8
CHATS, TURNS = 88, 6
CACHE = 28 * (PREFIX + QUESTION + ANSWER)
"""Tokens that the cache of a replica holds."""
BLOCK_SIZE = 16
_VOCAB = range(300, 1300)

_Load = Iterator[tuple[int, list[int]]]
"""Conversations by number, and what is sent of each; a later prompt of one waits for the answer before it."""


class Outcome(NamedTuple):
    """Of one load."""

    hit_rate: float
    """Prompt tokens that came from the caches, of all."""
    busiest: float
    """Share of the requests that the busiest replica computed."""
    seconds: float


def documents(rng: random.Random) -> _Load:
    """Questions about documents, in any order, each behind its whole document."""
    texts = [rng.choices(_VOCAB, k=PREFIX) for _ in range(DOCUMENTS)]
    order = [number for number in range(DOCUMENTS) for _ in range(QUESTIONS)]
    rng.shuffle(order)
    for request, document in enumerate(order):
        yield request, texts[document] + rng.choices(_VOCAB, k=QUESTION)


def system_prompt(rng: random.Random) -> _Load:
    """One long system prompt before everything."""
    prompt = rng.choices(_VOCAB, k=PREFIX)
    for request in range(DOCUMENTS * QUESTIONS):
        yield request, prompt + rng.choices(_VOCAB, k=QUESTION)


def chats(rng: random.Random) -> _Load:
    """Conversations that take turns; each says what is new, behind its history."""
    for chat in range(CHATS):
        yield chat, rng.choices(_VOCAB, k=PREFIX // 4)
    for _ in range(TURNS - 1):
        for chat in rng.sample(range(CHATS), CHATS):
            yield chat, rng.choices(_VOCAB, k=QUESTION)


def outcome(load: Callable[[random.Random], _Load], placement: str, *, has_history: bool) -> Outcome:
    """Serve a load, `CONCURRENCY` requests at a time, by fresh replicas of the embedded model."""
    config = Config.model_validate(
        {
            "parallel_config": {"data_parallel_size": REPLICAS, "data_parallel_placement": placement},
            "num_kvcache_blocks": CACHE // BLOCK_SIZE,
            "kv_cache_block_size": BLOCK_SIZE,
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
    """Median of placing a prompt among `REPLICAS`, which begins as another did."""
    rng = random.Random(0)
    placement = Placement([1 << 22] * REPLICAS, BLOCK_SIZE, 1 << 20, by_prefix=True)
    prompts = [rng.choices(_VOCAB, k=num_tokens) for _ in range(20)]
    times = []
    for number, prompt in enumerate([*prompts, *prompts]):
        request = AddRequest(number, prompt, SamplingParams())
        start = time.perf_counter()
        placement.place([request], range(REPLICAS))
        times.append(time.perf_counter() - start)
    return statistics.median(times[len(prompts) :])


def run() -> Table:
    """Both placements under three loads."""
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
    sys.stdout.write(run().markdown())
