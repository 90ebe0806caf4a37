"""A scheduler on a device whose steps take a computed time, on a clock of its own."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.core.scheduler import Scheduler
from engine.core.step_time import StepWork
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 16


class SimulatedEngine:
    """Runs steps one after the other; `seconds` gives the duration of a step from its work."""

    def __init__(self, seconds: Callable[[StepWork], float], **settings: Any) -> None:
        self.now = 0.0
        self._seconds = seconds
        fields = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 16384,
            "kv_cache_block_size": BLOCK_SIZE,
            "num_kvcache_blocks": 100_000,
            "enable_prefix_caching": True,
            "scheduler_delay_factor": 0.0,
            "bos_token_id": None,
            "eos_token_id": 0,
            "stop_token_ids": (),
            "speculative_config": None,
            "max_step_seconds": 0.5,
        }
        options = {name: settings.pop(name, 0) for name in ("default_step_seconds", "max_interposed_tokens")}
        config = SimpleNamespace(**(fields | settings))
        self.scheduler = Scheduler(config, **options, clock=lambda: self.now)
        self.token_times: dict[int, list[float]] = {}
        """By sequence: its arrival, and when each of its tokens was sampled."""
        self.steps: list[tuple[ScheduledBatch, float]] = []
        """Each step and its duration, with what was interposed in it."""
        self.interposed: list[ScheduledBatch] = []
        self.num_pauses = 0
        self._arrivals: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()

    def add(
        self, num_prompt_tokens: int, max_tokens: int = 1, *, owner: str = "", at: float = 0.0, **fields: Any
    ) -> Sequence:
        """A sequence that arrives at a time, with a prompt that shares nothing with others."""
        number = next(self._numbers)
        prompt = [number + 1] * num_prompt_tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = Sequence(prompt, BLOCK_SIZE, params, id=number, owner=owner, **fields)
        seq.arrive_time = at
        heapq.heappush(self._arrivals, (at, number, seq))
        self.token_times[number] = [at]
        return seq

    def step(self) -> bool:
        """Take in what has arrived and run one step; False where nothing is left to do."""
        if self.scheduler.is_finished():
            if not self._arrivals:
                return False
            self.now = max(self.now, self._arrivals[0][0])
        self._take_in()
        self._interpose(None)
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            assert self.scheduler.is_finished()
            return True
        batch, seqs = scheduled
        start, duration = self.now, self._seconds(StepWork.of(batch))
        self._pause(batch, duration)
        self.steps.append((batch, self.now - start))
        whole = [seq.id for seq in seqs.values() if seq.num_computed_tokens == seq.num_tokens]
        self.scheduler.postprocess(list(seqs.values()), ScheduledBatchOutput(dict.fromkeys(whole, (7,))))
        self.scheduler.note_duration(batch, duration)
        for seq_id in whole:
            self.token_times[seq_id].append(self.now)
        return True

    def _take_in(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            self.scheduler.add(heapq.heappop(self._arrivals)[2])

    def _pause(self, batch: ScheduledBatch, left: float) -> None:
        """Let the time pass that a step takes, which is paused when a sequence arrives that is to be interposed."""
        unseen = deque[Sequence]()
        while self.scheduler.may_pause(batch) and self._arrivals and self._arrivals[0][0] < self.now + left:
            at, _, seq = heapq.heappop(self._arrivals)
            unseen.append(seq)
            passed = max(0.0, at - self.now)
            self.now, left = self.now + passed, left - passed
            if self.scheduler.would_interpose(seq):
                self.num_pauses += 1
                self.scheduler.extend(unseen)
                unseen.clear()
                before = len(self.interposed)
                self._interpose(batch)
                if len(self.interposed) == before:
                    self.scheduler.note_idle_pause()
        self.now += left
        self.scheduler.extend(unseen)

    def _interpose(self, paused: ScheduledBatch | None) -> None:
        """Run the steps that are interposed in a paused one, or before the next."""
        while (scheduled := self.scheduler.interpose(paused)) is not None:
            batch, seqs = scheduled
            seconds = self._seconds(StepWork.of(batch))
            self.now += seconds
            self.interposed.append(batch)
            self.scheduler.read_interposed(batch, ScheduledBatchOutput(dict.fromkeys(seqs, (7,))), seconds)
            for seq_id in seqs:
                self.token_times[seq_id].append(self.now)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run steps until everything has ended, or `until` holds after one."""
        while self.step() and not until():
            pass

    def ttft(self, seq: Sequence) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[seq.id][1] - self.token_times[seq.id][0]

    def longest_gap(self, seq: Sequence) -> float:
        """Most seconds between two tokens of a sequence."""
        times = self.token_times[seq.id][1:]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def device(base: float, token: float, *, decode: float | None = None, pair: float = 0.0, key: float = 0.0) -> Any:
    """Durations of a device with these seconds of each."""

    def seconds(work: StepWork) -> float:
        return (
            base
            + token * work.prompt_tokens
            + (token if decode is None else decode) * work.decode_tokens
            + pair * work.prompt_pairs
            + key * work.decode_keys
        )

    return seconds
