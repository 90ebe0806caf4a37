"""`kaon quantize MODEL OUT`: writes a quantised copy of a dense checkpoint, for faster starts with less memory.

A child process loads torch and does the work.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from models.child_environment import code_environment
from models.quantization.config import ROUNDINGS

_INTERRUPTED = 130


def quantize_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        "kaon quantize",
        description="Write a dense checkpoint with its linear layers and experts rounded, in compressed-tensors' "
        "layout, tokenizer and settings included.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    parser.add_argument("out", metavar="OUT", help="directory to be written, which must not exist")
    parser.add_argument("--quantization", choices=tuple(ROUNDINGS), default="int8", help="default: int8")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    try:
        asked = quantize_parser().parse_args(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 2
    command = [sys.executable, "-P", "-m", "engine.commands.quantize", asked.model, os.path.abspath(asked.out)]
    # Ctrl-C reaches the child process as well, which removes its incomplete output.
    with subprocess.Popen([*command, asked.quantization], env=code_environment()) as child:
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                continue
    if code == 0:
        sys.stdout.write(f"{asked.out} is written; serve it with: kaon serve {asked.out}\n")
    return code if code >= 0 else _INTERRUPTED
