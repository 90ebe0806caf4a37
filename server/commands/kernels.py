"""`kaon kernels build`: compiles the GPU kernels that a start needs, on a machine that need not have the GPU.

A child process for each target loads torch and does the work; see `engine.commands.kernel_build`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from models.child_environment import code_environment

_USAGE = "usage: kaon kernels build --target TARGET[,TARGET] --model MODEL [flags of kaon serve]\n"
TARGETS = (
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201", "sm_80", "sm_86", "sm_89",
    "sm_90",
)  # fmt: skip
"""The keys of `models.ops.triton.configs.TARGETS`, which imports torch."""


def kernels_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own arguments. All others are flags of `kaon serve`."""
    parser = argparse.ArgumentParser(
        "kaon kernels build",
        usage=_USAGE.removeprefix("usage: ").rstrip(),
        description="Compile the kernels that a start of MODEL on each GPU needs into Triton's cache "
        "(TRITON_CACHE_DIR, by default ~/.triton/cache), so that a server with the same flags, release and cache "
        "compiles none.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help=f"GPUs, separated by commas: {', '.join(TARGETS)}")
    parser.add_argument(
        "--model", metavar="MODEL", help="checkpoint directory or hub id; without it the embedded model"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0 if all kernels were compiled, 1 if not, 2 for a wrong argument."""
    if not arguments or arguments[0] != "build":
        is_help = list(arguments) in (["--help"], ["-h"])
        (sys.stdout if is_help else sys.stderr).write(_USAGE)
        return 0 if is_help else 2
    try:
        asked, flags = kernels_parser().parse_known_args(list(arguments[1:]))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 2
    targets = asked.target.split(",")
    if unknown := next((each for each in targets if each not in TARGETS), None):
        sys.stderr.write(f"kaon kernels: target is {unknown}, which has no kernels; choose of {', '.join(TARGETS)}\n")
        return 2
    if find_spec("triton") is None:
        sys.stderr.write(
            "kaon kernels: Triton, which compiles the kernels, is not installed; install it with a GPU build of "
            "torch, or alone with pip install triton\n"
        )
        return 1
    flags = [*([asked.model] if asked.model else []), *flags]
    # One process per target: within a process, Triton holds the compiled kernels of one target.
    codes = [
        subprocess.run(
            [sys.executable, "-P", "-m", "engine.commands.kernel_build", target, *flags],
            env=code_environment() | {"TRITON_INTERPRET": "0"},
            check=False,
        ).returncode
        for target in targets
    ]
    return max((code if code >= 0 else 1 for code in codes), default=0)
