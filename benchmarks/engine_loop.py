"""Host time of the engine loop a step: schedule, batch and postprocess, with the model replaced by a stub.

Run as `python -m benchmarks.engine_loop`.
"""

import itertools
import statistics
import sys
import time

from benchmarks.report import Table
from engine.batch import ScheduledBatchOutput
from engine.config import Config
from engine.messages import RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence

BLOCK_SIZE = 16
STEPS = 400


class _LastOutputs:
    """Stands in for the output queue: keeps the latest step's outputs."""

    outputs: list[RequestOutput]

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        self.outputs = outputs


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
        # Contexts differ by row, so block boundaries are spread over the steps as they are in life.
        scheduler.add(Sequence([10 + row] * (context + row % BLOCK_SIZE - 15), BLOCK_SIZE, params))
    queue = _LastOutputs()
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
        if step:
            schedule_times.append(middle - start)
            postprocess_times.append(end - begin)
    return statistics.median(schedule_times), statistics.median(postprocess_times)


def run(steps: int = STEPS) -> Table:
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


if __name__ == "__main__":
    sys.stdout.write(run().markdown())
