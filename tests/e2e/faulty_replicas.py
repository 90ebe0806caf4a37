"""An engine core in lockstep with faults that the tests choose.

`FAULTY_REPLICA` is `REPLICA:FAULT`, or `raise:TOKEN` or `hang:TOKEN` for all replicas that compute the token.
"""

import os
import sys
import time
from typing import Any

from engine.core import main as core_main
from engine.distributed.lockstep import ReplicaLinks
from engine.runner.model_runner import ModelRunner


def _stay_away(self: ReplicaLinks, timeout: float) -> None:
    time.sleep(3600)


def _fail(self: ModelRunner) -> None:
    raise ZeroDivisionError("division by cucumber")


_run_model = ModelRunner.run_model


def _fail_on_token(self: ModelRunner, inputs: Any, *arguments: Any) -> Any:
    fault, _, token = os.environ["FAULTY_REPLICA"].partition(":")
    if int(token) in inputs.input_ids:
        if fault == "hang":
            time.sleep(3600)
        raise ZeroDivisionError("division by cucumber")
    return _run_model(self, inputs, *arguments)


def main() -> None:
    number, _, fault = os.environ["FAULTY_REPLICA"].partition(":")
    if number in ("raise", "hang"):
        ModelRunner.run_model = _fail_on_token  # type: ignore[method-assign]
    elif sys.argv[1] == f"kaon-engine-{number}":
        if fault == "absent":
            ReplicaLinks.connect = _stay_away  # type: ignore[method-assign]
        else:
            ModelRunner.warm_up = _fail  # type: ignore[method-assign]
    core_main.main()


if __name__ == "__main__":
    main()
