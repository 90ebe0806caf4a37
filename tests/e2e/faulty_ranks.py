"""An engine core and ranks with faults that the tests choose: real processes, a real model.

It runs in place of `engine.core.main`, which starts it in place of `engine.runner.rank_process`. `FAULTY_RANK` selects
the faults.
"""

import os
import sys
import time
from typing import NoReturn

import torch

from engine.core import main as core_main
from engine.distributed import rank_link
from engine.runner import build, rank_process
from engine.runner.model_runner import ModelRunner

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


def _prepare(fault: str, rank: int) -> None:
    match fault:
        case "step":
            _raise_on_token(rank)
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
