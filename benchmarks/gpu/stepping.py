"""`Decodes`: a batch that decodes step after step, each launched before the one ahead of it is read."""

import itertools

import numpy as np

from benchmarks.gpu.bench import Bench, Mark
from benchmarks.gpu.shapes import BLOCK_SIZE, RandomRunner
from engine.batch import ScheduledBatch
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.worker.step_launcher import LaunchedStep

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids."""
    found: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return found


class Decodes:
    """Sequences of one context each, whose caches are as the pool was filled."""

    def __init__(self, bench: Bench, runner: RandomRunner, batch: int, context: int, *, steps: int) -> None:
        """For `steps` steps at most, in blocks of shuffled order."""
        self._bench, self._runner = bench, runner
        blocks = -(-(context + steps + 1) // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(batch * blocks).tolist()
        self._seqs = [
            Sequence(random_ids(context, runner.model_config.vocab_size, row), BLOCK_SIZE, _GREEDY, id=row)
            for row in range(batch)
        ]
        for row, seq in enumerate(self._seqs):
            seq.slot, seq.block_table = row, order[row * blocks : (row + 1) * blocks]
        self._context, self._steps_left, self._is_new = context, steps, True
        self._running: LaunchedStep | None = None

    def step(self) -> None:
        """Launch a step, read the one before it, and have this one choose its tokens, as the engine does."""
        assert self._steps_left, "more steps than there are blocks for"
        self._steps_left -= 1
        count = len(self._seqs)
        launched = self._runner.launch(
            ScheduledBatch(
                {seq.id: seq for seq in self._seqs},
                [1] * count,
                count,
                total_tokens_num_decode=count,
                total_seqs_num=count,
                total_seqs_num_decode=count,
                context_lens=[self._context] * count,
                new_seqs=self._seqs if self._is_new else (),
            )
        )
        self._context, self._is_new = self._context + 1, False
        if self._running is not None:
            self._running.result()
        launched.sample()
        self._running = launched

    def timed(self, count: int) -> list[float]:
        """Seconds of `count` steps, from the end of one on the device to the end of the next."""
        marks: list[Mark] = []
        for _ in range(count + 1):
            self.step()
            marks.append(self._bench.mark())
        self._bench.synchronize()
        return [begin.seconds_to(end) for begin, end in itertools.pairwise(marks)]

    def finish(self) -> None:
        """Read what runs."""
        if self._running is not None:
            self._running.result()
        self._running = None
