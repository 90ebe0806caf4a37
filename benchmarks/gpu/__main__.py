"""`python -m benchmarks.gpu`: measures the GPU's kernels, steps and throughput; `make bench-gpu` calls it.

Each part runs in a process of its own, for a bounded time. Findings are written as they arrive: to the terminal, to a
JSON file, and to their section of docs/benchmarks.md.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import parts as page
from benchmarks.gpu.bench import describe
from benchmarks.gpu.part_process import command_of, findings_of
from benchmarks.gpu.parts import BY_NAME, PARTS, Finding

_PAGE = Path(__file__).parent.parent.parent / "docs" / "benchmarks.md"
_MINUTES, _QUICK_MINUTES = 9.0, 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a measurement failed, 2 if there is no device to measure."""
    options = _parser().parse_args(arguments)
    described = describe(options.device)
    if described is None:
        _say("torch finds no GPU; run `kaon doctor` for the reason. --device cpu tries everything on a CPU")
        return 2
    _say(", ".join(f"{name} {value}" for name, value in described.items()))
    minutes = options.minutes or (_QUICK_MINUTES if options.quick else _MINUTES)
    deadline = time.monotonic() + 60 * minutes
    findings: list[Finding] = []
    # The figures of a dry run mean nothing.
    written = None if options.no_page or options.device == "cpu" else options.page
    for part in PARTS:
        if options.parts and part.name not in options.parts:
            continue
        left = deadline - time.monotonic()
        if left < 5:
            findings.append(Finding(part.name, "all", error=f"not begun: the run's {minutes:g} minutes were over"))
        else:
            seconds = min(part.quick_seconds if options.quick else part.seconds, left)
            # A user who selects parts has time for them, and the interpreter is slow.
            if options.parts or options.device == "cpu":
                seconds = left
            command = partial(_command, part.name, options.device, options.quick)
            for finding in findings_of(part, command, seconds):
                findings.append(finding)
                if options.json is not None:
                    page.write_json(options.json, described, findings)
        _say(page.as_text(part, [finding for finding in findings if finding.part == part.name]))
        if written is not None:
            page.put(written, described, findings)
    if written is not None:
        _say(f"the section is in {written}")
    return 1 if any(finding.error is not None for finding in findings) else 0


def _command(part: str, device: str, is_quick: bool, skip: int) -> list[str]:
    return command_of(BY_NAME[part], device, is_quick=is_quick, skip=skip)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, in 3 minutes at most")
    parser.add_argument("--parts", type=_names, help=f"which of {','.join(BY_NAME)}; by default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too, as they come")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a dry run (default: cuda)")
    parser.add_argument("--minutes", type=float, help="the most that the run may take (default: 9; quick: 3)")
    parser.add_argument("--page", type=Path, default=_PAGE, help="page that gets the section (default: %(default)s)")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    return parser


def _names(text: str) -> list[str]:
    """The type of a comma-separated list of parts, for argparse."""
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(BY_NAME)}")
    return names


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
