"""An engine core with a stub for a model: the real process, loop and sockets, ready in a quarter of a second.

It runs in place of `engine.core.main`; the tests choose a fault by `STUB_CORE` in its environment.
"""

import fcntl
import os
import threading
import time

from engine.batch import ScheduledBatch, ScheduledBatchOutput
from engine.config.config import Config
from engine.config.paths import resolve_checkpoint
from engine.core import main as core_main
from engine.core.scheduler import Scheduler
from engine.core.startup import PhaseClock, StartedModel
from engine.messages import ModelInfo
from engine.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from models.errors import CheckpointError

FAULT = os.environ.get("STUB_CORE", "")
COUNTS = "STUB_CORE_COUNTS" in os.environ
"""Whether the token after n tokens is `FIRST_TOKEN + n`, so that a lost or repeated one is detected."""

FIRST_TOKEN = 1000
EOS = 2

DEADLY, RAISING, ENDLESS, OUTSIDE = 901, 902, 903, 904
"""Prompt tokens that, when computed, kill the process, raise, or hang; or that kill it before they are computed."""


STEP_SECONDS = float(os.environ.get("STUB_CORE_STEP", "0.001"))
"""Least duration of a step: requests of fewer tokens, which cost less, then take as long."""

GATE = os.environ.get("STUB_CORE_GATE")
"""A file: the start of the core is blocked while a test has it locked."""


class StubRunner:
    """Samples token 5 for every row, or counts, once in `STEP_SECONDS` at most."""

    def forward(self, batch: ScheduledBatch, /) -> ScheduledBatchOutput:
        time.sleep(STEP_SECONDS)
        computed = {token for tokens in batch.scheduled_tokens for token in tokens}
        if DEADLY in computed:
            os._exit(9)
        if RAISING in computed:
            raise RuntimeError("division by cucumber")
        if ENDLESS in computed:
            threading.Event().wait()
        if not COUNTS:
            return ScheduledBatchOutput(dict.fromkeys(batch.req_ids, (5,)))
        lengths = zip(batch.req_ids, batch.context_lens, strict=True)
        return ScheduledBatchOutput({seq_id: (FIRST_TOKEN + length,) for seq_id, length in lengths})

    generates = True

    def device_memory(self) -> tuple[int, int]:
        return 0, 0

    def sentinel_counts(self) -> tuple[int, int]:
        return 0, 0

    def launch(self, batch: ScheduledBatch, /) -> "StubStep":
        return StubStep(self.forward(batch))

    def prepare_while_idle(self) -> bool:
        return False


class StubStep:
    """A step that was complete when it was launched."""

    drafts_on_device = False

    def __init__(self, output: ScheduledBatchOutput) -> None:
        self._output = output

    def sample(self) -> None:
        pass

    def result(self) -> ScheduledBatchOutput:
        return self._output

    def wait(self) -> None:
        pass


def model_of(runner: StubRunner, config: Config, name: str, *, num_blocks: int, context: int) -> StartedModel:
    """A model that `runner` stands in for, with the tokenizer of the embedded checkpoint."""
    config = config.model_copy(
        update={"num_kvcache_blocks": num_blocks, "max_model_len": context, "eos_token_id": EOS}
    )
    info = ModelInfo(name, "float32", "cpu", "cpu", 0, 50_000, context, [EOS], 16, num_blocks)
    checkpoint = resolve_checkpoint(None)
    scheduler = Scheduler(config)
    return StartedModel(runner, scheduler, config, info, lambda: Tokenizer.from_checkpoint(checkpoint))  # type: ignore[arg-type]


def start_model(config: Config, phases: PhaseClock, *others: object) -> StartedModel:
    """A replacement of `engine.core.startup.start_model`."""
    match FAULT:
        case "bad checkpoint":
            raise CheckpointError("model is /nowhere, but there is no such directory; check the path")
        case "bug":
            raise KeyError("weight")
        case "exit":
            os._exit(3)
        case "slow":
            threading.Event().wait()
    if GATE is not None:
        with open(GATE) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
    return model_of(StubRunner(), config, "StubForCausalLM", num_blocks=1024, context=8192)


def add(self: Scheduler, seq: Sequence) -> None:
    """A replacement of `Scheduler.add`."""
    if OUTSIDE in seq.token_ids:
        os._exit(9)
    _add(self, seq)


_add = Scheduler.add

if __name__ == "__main__":
    Scheduler.add = add  # type: ignore[method-assign]
    core_main.start_model = start_model
    core_main.main()
