"""An engine core and ranks with faults that the tests choose: real processes, a real model.

It runs in place of `engine.core.main`, which starts it in place of `engine.runner.rank_process`. `FAULTY_RANK` selects
the faults.
"""

import math
import os
import signal
import sys
import time
from itertools import count
from typing import Any, NoReturn, cast

import torch

from engine.core import main as core_main
from engine.distributed import rank_link
from engine.runner import build, rank_process
from engine.runner.draft_passes import DraftPasses
from engine.runner.model_runner import ModelRunner
from engine.speculative import drafts
from engine.speculative.adaptive import DraftGate, DraftPlan
from models.ops.cpu.draft_chain import DraftChain
from models.ops.cpu.runtime import Library, Operations
from models.ops.cpu.structures import Step

FAULTS = dict(each.split(":") for each in os.environ.get("FAULTY_RANK", "").split())
"""Faults as `RANK:FAULT`, separated by spaces."""
RAISING = 301
"""Prompt token that rank 0 cannot compute; rank 1 cannot compute the next one."""


def _raise_on_token(rank: int) -> None:
    """Raise in the middle of a step, after its first collective."""
    forward = ModelRunner.run_model

    def run_model(self, inputs, metadata, spans):  # type: ignore[no-untyped-def]
        if self.parallel.rank == rank and RAISING + rank in inputs.input_ids:
            hidden = self.model.model.embed_tokens(torch.from_numpy(inputs.input_ids))
            raise RuntimeError(f"division by cucumber of {len(hidden)} tokens")
        return forward(self, inputs, metadata, spans)

    ModelRunner.run_model = run_model  # type: ignore[method-assign]


def _kill_in_a_round() -> None:
    """End the process in the second round of a step, however long steps take and whatever drafts gain."""
    verify = DraftChain.verify

    def killed(self: DraftChain, *arguments: Any, **fields: Any) -> Any:
        library = self._library
        if arguments[-1] is not None:
            self._library = cast(Library, _Killing(library))
        verified = verify(self, *arguments, **fields)
        self._library = library
        return verified

    drafts._ROUNDS_SECONDS = math.inf
    DraftGate.note = lambda *_, **__: None  # type: ignore[method-assign]
    DraftChain.verify = killed  # type: ignore[method-assign]


def _draft_always() -> None:
    """Draft for each row in each step, whatever that gains: a draft that is accepted seldom must cost no answer."""
    DraftGate.note = lambda *_, **__: None  # type: ignore[method-assign]
    DraftPlan.limit = lambda self, _: self._max_drafts  # type: ignore[method-assign]
    DraftPlan.limit_rows = lambda _, limits: limits  # type: ignore[method-assign]
    DraftPlan.is_idle = False  # type: ignore[method-assign, assignment]


class _Killing:
    """Operators whose second call ends the process."""

    def __init__(self, library: Library) -> None:
        self._library, self._num_calls = library, 0

    def run(self, operations: Operations, step: Step) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self._library.run(operations, step)


def _kill_in_a_pass() -> None:
    """End the process in the fifth pass over drafts."""
    run, counted = DraftPasses.run, count(1)

    def killed(self: DraftPasses, *arguments: Any, is_first: bool) -> Any:
        if not is_first and next(counted) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, *arguments, is_first=is_first)

    DraftPasses.run = killed  # type: ignore[method-assign]


def _prepare(fault: str, rank: int) -> None:
    match fault:
        case "step":
            _raise_on_token(rank)
        case "round":
            _kill_in_a_round()
        case "pass":
            _kill_in_a_pass()
        case "drafts":
            _draft_always()
        case "load":

            def load(*arguments: object, **fields: object) -> NoReturn:
                raise ValueError("the shard is damaged")

            build.load_model = load
        case "late":

            def wait(*arguments: object, **fields: object) -> None:
                time.sleep(3600)

            build.load_model = wait  # type: ignore[assignment]
        case "bug":

            def warm_up(self) -> None:  # type: ignore[no-untyped-def]
                raise ZeroDivisionError("division by cucumber")

            ModelRunner.warm_up = warm_up  # type: ignore[method-assign]


def main() -> int:
    name = sys.argv[1]
    is_worker = name.startswith("kaon-worker")
    number = name.rpartition(".")[2] if is_worker else "0"
    if number in FAULTS:
        _prepare(FAULTS[number], int(number))
    if is_worker:
        return rank_process.main()
    rank_link.RANK_MODULE = "faulty_ranks"
    return core_main.main()


if __name__ == "__main__":
    sys.exit(main())
