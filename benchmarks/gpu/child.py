"""One part of the benchmark in a process of its own, whose findings its parent reads as they come.

`python -m benchmarks.gpu.child PART` is called by `benchmarks.gpu.supervise`: each line of its output that begins with
`MARK` is JSON. It ends with `BROKEN` where the device answers no more, and another goes on behind the guilty case.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import torch

from benchmarks.gpu.bench import Bench, first_line
from benchmarks.gpu.case import Finding, Part
from benchmarks.gpu.parts import BY_NAME

MARK = "@finding "
BROKEN = 3


def run_part(
    part: Part, bench: Bench, begin: Callable[[str], None], tell: Callable[[Finding], None], *, skip: int = 0
) -> bool:
    """Run a part's cases but the first `skip`; whether the device still answers. `begin` hears of each case first."""
    for number, case in enumerate(part.cases(bench)):
        if number < skip:
            continue
        begin(case.name)
        try:
            finding = Finding(part.name, case.name, case.run())
        # A case may fail by anything: the compiler, the device, a library's refusal. Its words are its row.
        except Exception as error:  # noqa: BLE001
            finding = Finding(part.name, case.name, error=first_line(error))
        tell(finding)
        if finding.error is not None and bench.is_broken():
            return False
    return True


def main() -> int:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.child")
    parser.add_argument("part", choices=list(BY_NAME))
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    lines = sys.stdout

    def say(**told: object) -> None:
        lines.write(f"{MARK}{json.dumps(told)}\n")
        lines.flush()

    # What libraries print is no finding.
    with redirect_stdout(sys.stderr):
        bench = Bench(torch.device(options.device), is_quick=options.quick)
        answers = run_part(
            BY_NAME[options.part],
            bench,
            lambda case: say(begins=case),
            lambda finding: say(**finding.as_json()),
            skip=options.skip,
        )
    return 0 if answers else BROKEN


if __name__ == "__main__":
    sys.exit(main())
