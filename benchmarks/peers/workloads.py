"""The workloads: which requests each sends, and the figure that comes out of their answers."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.checkpoints import QWEN3_06B, TINY, Checkpoint, words
from benchmarks.peers.load import Answer, Request, steady_gaps

SHARED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """What is read from the answers of a workload, and how figures compare."""

    unit: str
    of: Callable[[Sequence[Answer]], float]
    more_is_better: bool

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times as good ours is: above 1 is better, whichever way the figure goes."""
        return ours / theirs if self.more_is_better else theirs / ours


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


RATE = Figure("tok/s", _tokens_per_second, True)
TTFT = Figure("s", lambda answers: statistics.median(answer.ttft for answer in answers), False)
TOTAL = Figure("s", lambda answers: max(each.ended for each in answers) - min(each.started for each in answers), False)
SECONDS = Figure("s", lambda _: 0.0, False)
BYTES = Figure("GB", lambda _: 0.0, False)


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` requests sent at once, whose prompts begin with `shared_tokens` in common."""

    name: str
    title: str
    checkpoint: Checkpoint
    streams: int
    prompt_tokens: int
    max_tokens: int
    figure: Figure = RATE
    shared_tokens: int = 0

    def requests(self, seed: int) -> list[Request]:
        """Prompts that no other workload, and no other seed, has a first word's cache of."""
        source = random.Random(f"{self.name}/{seed}")
        vocabulary = words()
        shared = source.choices(vocabulary, k=self.shared_tokens)
        own = self.prompt_tokens - self.shared_tokens
        return [
            Request(
                "".join(f" {word}" for word in itertools.chain(shared, source.choices(vocabulary, k=own))),
                self.prompt_tokens,
                self.max_tokens,
            )
            for _ in range(self.streams)
        ]

    def gaps(self, answers: Sequence[Answer]) -> list[float]:
        """Seconds between tokens in steady decode; none where the workload is too short to have any."""
        return steady_gaps(answers) if self.figure is RATE else []


_B = QWEN3_06B
WARM_UP = Workload("warm-up", "warm-up", _B, 3, 64, 8)
WORKLOADS = (
    Workload("one", "1 stream 128/128", _B, 1, 128, 128),
    Workload("eight", "8 streams 256/64", _B, 8, 256, 64),
    Workload("many", "32 streams 256/64", _B, 32, 256, 64),
    Workload("long", "TTFT of 2048 tokens", _B, 1, 2048, 4, TTFT),
    Workload("shared", "16 sharing 1024 tokens", _B, 16, SHARED_TOKENS + 32, 16, TOTAL, SHARED_TOKENS),
    Workload("tiny-1", "tiny, 1 stream 64/64", TINY, 1, 64, 64),
    Workload("tiny-32", "tiny, 32 streams 64/64", TINY, 32, 64, 64),
    Workload("tiny-128", "tiny, 128 streams 64/64", TINY, 128, 64, 64),
)
"""In the order in which a server gets them."""
