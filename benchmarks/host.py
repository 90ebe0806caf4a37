"""The host's work for a GPU, measured without one: launches of kernels, and turns of the engine's loop.

Run as `python -m benchmarks.host`, which writes its section of docs/benchmarks.md; with `--dry` it runs everything
once and writes nothing. Each GPU's kernels are launched in a process of their own (`--target`): see
`benchmarks.gpu.absent`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

from benchmarks.report import machine, marked, put_section

SECTION = "host"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
TARGETS = ("sm_90", "gfx942")
_PARTS = ("operators", "turns")
_LAUNCH = "a launch, us"
_LAUNCHES = "its launches, us"
_BY_TRITON = "by Triton's path, us"
_MOST = 1.25
"""Limit of launches, as a multiple of Triton's own path of the same ones: without a device, kernels are empty."""
_MOST_US = 10.0
"""Limit of a launch in microseconds."""
_WHAT = """## The host of a GPU

Written by `make bench-host`. {machine} Triton {triton}.

**No device takes part.** Kernels are launched as for the named GPU, with its tiles, through all of Triton's own path
but the driver's launch at its end; their tensors lie on the CPU. A GPU's own costs are not in it: the driver's launch,
its allocator, its copies and events. Rows of a table are measured in turn in one process; single figures drift with
the machine, which other work shared.
"""
_OPERATORS = """### Launching kernels, {target}

The host's time to call an operator of a decode step outside graphs, as its layer calls it; the time of the same
launches alone, with each kernel's grid and arguments prepared; and the time of these launches through Triton's own
path, which `an empty kernel` takes as well. The column `beyond` has the operator's time without its launches: the
choice of kernels, tiles and strides, and the allocation of results. `a tensor's allocation` is torch's time to
allocate one tensor. Microseconds, medians of 31 rounds of 50 calls; `beyond` is the median of the rounds'
differences.

An empty kernel has no arguments, each of which takes any launch about a tenth of a microsecond.

Target: at most 10 us for a launch, and at most 1.25 times Triton's own path of a kernel with the same arguments.
{met} of {all} operators meet it here; the slowest launch takes {slowest:.2g} us, and launches {least:.2g} to
{most:.2g} times Triton's path.
"""
_TURNS = """### A turn of the engine's loop, {target}

The engine's loop with deferred output, greedy, 1k contexts, at the layers and heads of Qwen3-0.6B: schedule the next
step, launch it, read the one before and take its tokens in. `replayed`: an empty graph stands for the model's pass;
`eager`: its kernels are launched one by one, and torch's products only allocate. Milliseconds, medians of {steps}
turns. `a prompt of 256 tokens`: its step, eager, and with graphs of all but attention.

Target: none; where a step takes the device longer than a turn takes the host, the device waits for none of it.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, help="measure for one GPU, and print what was found as JSON")
    parser.add_argument("--part", choices=_PARTS, help="of what is measured for one GPU; by default all")
    parser.add_argument("--dry", action="store_true", help="do everything once, on small problems; write nothing")
    options = parser.parse_args(arguments)
    if options.target is not None:
        # Output of libraries is not part of the findings.
        with redirect_stdout(sys.stderr):
            found = measured(options.target, options.part, is_dry=options.dry)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    text = section({target: _in_a_process(target, is_dry=options.dry) for target in TARGETS})
    sys.stdout.write(text)
    if not options.dry:
        put_section(PAGE, SECTION, marked(SECTION, text))


Found = dict[str, list[tuple[str, dict[str, float | str]]]]
"""The values of each case, by part."""


def measured(target: str, part: str | None, *, is_dry: bool) -> Found:
    """Measure for one GPU, in a process whose kernels are not interpreted."""
    import torch

    from benchmarks.gpu import absent as turn
    from benchmarks.gpu import launch
    from benchmarks.gpu.absent import AbsentBench, on
    from models.ops.triton.configs import TARGETS as GPUS

    # Copies to a GPU are copies here; several threads would measure how they wait for each other.
    torch.set_num_threads(1)
    bench = AbsentBench(is_dry=is_dry)
    with on(GPUS[target], turn.first_tokens):
        cases = {"operators": launch.launch_cases, "turns": turn.turn_cases}
        wanted = cases if part is None else {part: cases[part]}
        return {name: [(case.name, case.run()) for case in of(bench)] for name, of in wanted.items()}


def _in_a_process(target: str, *, is_dry: bool) -> Found:
    command = [sys.executable, "-m", "benchmarks.host", "--target", target, *(["--dry"] if is_dry else [])]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout)
    return found


def section(found: dict[str, Found]) -> str:
    """The section's Markdown."""
    from benchmarks.gpu.absent import STEPS
    from benchmarks.gpu.parts import Finding, table

    parts = [_WHAT.format(machine=machine(), triton=version("triton"))]
    for name, text in zip(_PARTS, (_OPERATORS, _TURNS), strict=True):
        for target, of_target in found.items():
            values = dict(of_target[name])
            parts.append(text.format(target=target, steps=STEPS, **_reached(values)))
            findings = [Finding(name, case, values) for case, values in of_target[name]]
            parts.append("\n".join(table(findings)) + "\n")
    return "\n".join(parts)


def _reached(values: dict[str, dict[str, float | str]]) -> dict[str, float]:
    """What the text on launches says; empty where none were measured."""
    measured = [each for each in values.values() if _LAUNCH in each]
    if not measured:
        return {}
    launches = [float(each[_LAUNCH]) for each in measured]
    ratios = [float(each[_LAUNCHES]) / float(each[_BY_TRITON]) for each in measured]
    met = sum(us <= _MOST_US and ratio <= _MOST for us, ratio in zip(launches, ratios, strict=True))
    return {
        "met": met, "all": len(launches), "slowest": max(launches), "least": min(ratios), "most": max(ratios)
    }  # fmt: skip


if __name__ == "__main__":
    main()
